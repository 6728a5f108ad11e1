package replay

import (
	"fmt"
	"strings"
)

// hopAdvice is what a log implies for trusted_hops.
type hopAdvice struct {
	hops   int // -1 if none can be told
	header string
	reason string
	cure   string // what to do instead, where no count can be told or it is not enough
}

// Least numbers that a conclusion is drawn from.
const (
	leastRequests = 20 // of the log, and of a peer that is to disagree with others
	leastClients  = 3  // different entries at the place that is taken for the client's
)

// advise concludes from the forwarding headers how many entries the operator's own proxies append.
//
// A proxy appends to every request, and most clients send no header of their own; so behind proxies the shortest chain
// is what they append, and longer ones begin with what clients made up. Peers that send no header are clients
// themselves.
//
// Of several headers the one that most requests have is studied, or one that a stack takes clients from if nearly as many
// have that.
func (c *chainStudy) advise() hopAdvice {
	best := c.headers[0]
	for _, s := range c.headers[1:] {
		if s.with > best.with {
			best = s
		}
	}
	for _, s := range c.headers {
		if s.stated && !best.stated && s.with > 0 && s.with*10 >= best.with*9 {
			best = s
		}
	}
	a := best.advise()
	a.header = best.header
	return a
}

// parties are the peers, by what they seem to be.
type parties struct {
	proxies, direct, unclear []namedPeer
	relayed, own, bare       int64 // requests: of proxies with a chain, without one, and of direct peers
	forged                   int64 // peers on the internet that always send a chain
}

func (s *headerStudy) advise() hopAdvice {
	if s.requests < leastRequests {
		return untold("the log has only %d requests", s.requests)
	}
	if s.with == 0 {
		return s.adviseBare()
	}
	p := s.parties()
	switch {
	case len(p.proxies) == 0 && len(p.unclear) == 0:
		return told(0, "%s of the requests carry the header; their peers send others without it, so they are clients that "+
			"made it up", share(s.with, s.requests))
	case len(p.unclear) > 0 && len(p.proxies) == 0:
		return s.adviseUnclear(p)
	case len(p.direct) > 0 || len(p.unclear) > 0:
		return s.adviseMixed(p)
	}
	return s.adviseProxied(p)
}

// parties sorts the peers. A peer on the internet is a proxy if nearly all of its requests have a chain, and a client if
// hardly any has. Others may send requests of their own, as health checks, and are proxies if some have one.
func (s *headerStudy) parties() parties {
	var p parties
	for _, peer := range s.sorted() {
		with := peer.with()
		switch {
		case with*10 >= peer.requests*9 || !peer.public && with*20 >= peer.requests:
			p.proxies = append(p.proxies, peer)
			p.relayed += with
			p.own += peer.lengths[0]
			if peer.public {
				p.forged++
			}
		case with*10 <= peer.requests:
			p.direct = append(p.direct, peer)
			p.bare += peer.requests
		default:
			p.unclear = append(p.unclear, peer)
		}
	}
	return p
}

// adviseBare is for logs in which no request has a chain.
func (s *headerStudy) adviseBare() hopAdvice {
	if len(s.peers) == 1 {
		a := untold("all requests come from one peer, and none carries the header: it may be the only client, or a proxy that " +
			"does not say whom it speaks for")
		a.cure = "make the proxy append to X-Forwarded-For, or let it speak the PROXY protocol; then replay a newer log"
		return a
	}
	return told(0, "none of the %d peers sends the header, so they are the clients", len(s.peers))
}

// adviseUnclear is for peers of which each sends chains now and then.
func (s *headerStudy) adviseUnclear(p parties) hopAdvice {
	public := true
	for _, peer := range p.unclear {
		public = public && peer.public
	}
	if public && len(p.direct) > len(p.unclear) {
		return told(0, "most peers send no header; those that do send requests without it too, so they are clients that made it up")
	}
	a := untold("%d peers send the header with some of their requests and not with others: they may be clients that make it "+
		"up, or proxies that do not always append", len(p.unclear))
	a.cure = "list your proxies in the server's trusted_proxies, with trusted_proxies_strict"
	return a
}

// adviseMixed is for logs in which some peers are proxies and others are not.
func (s *headerStudy) adviseMixed(p parties) hopAdvice {
	publicOnly := p.forged == int64(len(p.proxies))
	if publicOnly && len(p.direct) > len(p.proxies) && p.bare >= p.relayed {
		return told(0, "%d of %d peers send no header, so clients connect directly; %d send it always and must be making it up, "+
			"unless they are proxies of yours", len(p.direct), len(s.peers), len(p.proxies))
	}
	a := untold("%d peers always send the header, as proxies do, and %d others do not: requests take different ways, and no "+
		"count fits all of them", len(p.proxies), len(p.direct)+len(p.unclear))
	a.cure = "list your proxies in the server's trusted_proxies, with trusted_proxies_strict, or keep clients from reaching " +
		"the server past them; if they are yours: trusted_proxies static " + names(p.proxies)
	return a
}

// adviseProxied is for logs in which every peer is a proxy.
func (s *headerStudy) adviseProxied(p parties) hopAdvice {
	shortest, differ := p.shortest()
	distinct := s.distinct(shortest)
	switch {
	case shortest > maxPlaces:
		return untold("every chain has more than %d entries", maxPlaces)
	case differ:
		a := untold("the shortest chains of the peers differ in length (%s): requests take different ways", lengthsOf(p.proxies))
		a.cure = "list all your proxies in the server's trusted_proxies, with trusted_proxies_strict"
		return a
	case distinct < leastClients:
		return untold("the shortest chain has %d entries, but there are only %d different ones at that place, too few to tell "+
			"clients from a proxy", shortest, distinct)
	case shortest > 1 && distinct < 2*s.distinct(shortest-1) && s.distinct(shortest-1) < maxDistinct/2:
		return untold("the shortest chain has %d entries, but not many more different ones are at place %d from the right (%d) "+
			"than at place %d (%d): perhaps every client of this log sent a header of its own", shortest, shortest, distinct,
			shortest-1, s.distinct(shortest-1))
	}
	a := told(shortest, "every request that a proxy passed on has at least %s, and %s have no more; %s different addresses are at "+
		"that place", entries(shortest), share(p.exactly(shortest), p.relayed), atLeast(distinct))
	if p.own > 0 {
		a.reason += fmt.Sprintf("; %s without the header came from the proxies themselves, as health checks do", plural(p.own, "request"))
	}
	if shortest > 1 {
		a.cure = fmt.Sprintf("make sure that the entries to the right of it are your own proxies (%s): if they are clients, every "+
			"request of this log had a header that was made up, and fewer hops are right", s.rightOf(shortest))
	}
	switch {
	case !s.appended():
		a.cure = "whoever reaches the server past the proxy can write the header itself: list the proxy in the server's " +
			"trusted_proxies, or see to it that nobody else can connect"
	case p.forged > 0:
		if a.cure != "" {
			a.cure += "; "
		}
		a.cure += "the peers are addresses on the internet: see to it that nobody but your proxies can connect, or a client could " +
			"write the header itself"
	}
	return a
}

// rightOf names some of the entries to the right of a place.
func (s *headerStudy) rightOf(place int) string {
	var list []string
	more := 0
	for i := range place - 1 {
		list = append(list, s.samples[i]...)
		more += s.places[i].n - len(s.samples[i])
	}
	text := strings.Join(list, ", ")
	if more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// shortest is the length of the shortest chain that a proxy sent, and whether proxies differ in it. One that sent only a
// few chains does not differ by having longer ones.
func (p *parties) shortest() (shortest int, differ bool) {
	longest := 0
	for _, peer := range p.proxies {
		n := peer.shortest()
		if shortest == 0 || n < shortest {
			shortest = n
		}
		if peer.with() >= leastRequests {
			longest = max(longest, n)
		}
	}
	return shortest, longest > shortest
}

// exactly is how many requests of proxies had chains of a length.
func (p *parties) exactly(length int) (n int64) {
	for _, peer := range p.proxies {
		n += peer.lengths[length]
	}
	return n
}

func told(hops int, reason string, args ...any) hopAdvice {
	return hopAdvice{hops: hops, reason: fmt.Sprintf(reason, args...)}
}

func untold(reason string, args ...any) hopAdvice {
	return hopAdvice{hops: -1, reason: fmt.Sprintf(reason, args...)}
}

// names lists the first peers.
func names(list []namedPeer) string {
	var b strings.Builder
	for i, p := range list[:min(8, len(list))] {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(p.name)
	}
	if len(list) > 8 {
		b.WriteString(" ...")
	}
	return b.String()
}

// lengthsOf says how long the shortest chains of the first peers are.
func lengthsOf(list []namedPeer) string {
	var parts []string
	for _, p := range list[:min(4, len(list))] {
		parts = append(parts, fmt.Sprintf("%s: %d", p.name, p.shortest()))
	}
	if len(list) > 4 {
		parts = append(parts, "...")
	}
	return strings.Join(parts, ", ")
}

func entries(n int) string {
	if n == 1 {
		return "1 entry"
	}
	return fmt.Sprintf("%d entries", n)
}

func atLeast(n int) string {
	if n >= maxDistinct {
		return fmt.Sprintf("at least %d", n)
	}
	return fmt.Sprint(n)
}
