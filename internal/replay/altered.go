package replay

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// Caddy's log filters leave less of a field than there was: hash, ip_mask, replace, delete, rename, and those for cookies and
// queries. What figures need such a field cannot be had, and nothing is suggested from them.

// fieldStudy is what is known of the values of a field, so that it can be told whether a log filter has altered it.
type fieldStudy struct {
	name    string // for people
	address bool   // its values are to be addresses
	sent    bool   // callers send it, and not all the same
	there   int64  // requests that have it
	absent  int64
	odd     int64 // values that are no addresses
	masked  int64 // addresses that end in zero bits
	coarse  int64 // those of them that end in twice as many
	values  map[string]struct{}
}

// enoughDistinct is from how many values on more are not told apart.
const enoughDistinct = 64

func newFieldStudy(name string, address bool) *fieldStudy {
	return &fieldStudy{name: name, address: address, values: make(map[string]struct{})}
}

// add takes the value of a request into account; an empty one is not there.
func (f *fieldStudy) add(value string) {
	if value == "" {
		f.absent++
		return
	}
	f.there++
	if f.address {
		addr, ok := clientip.NAT64(nil).ParseAddr(value)
		switch {
		case !ok && !isSocket(value):
			f.odd++
		case ok && endsInZeros(addr, 1):
			f.masked++
			if endsInZeros(addr, 2) {
				f.coarse++
			}
		}
	}
	if _, known := f.values[value]; !known && len(f.values) < enoughDistinct {
		f.values[strings.Clone(value)] = struct{}{}
	}
}

// isSocket reports whether a peer is one without an address.
func isSocket(peer string) bool { return peer[0] == '@' || peer[0] == '/' }

// endsInZeros reports whether the last bits of an address are none, as those of few hosts are: once or twice 8 of IPv4, or 48
// of IPv6.
func endsInZeros(addr netip.Addr, times int) bool {
	bytes, each := addr.AsSlice(), 6
	if addr.Is4() {
		each = 1
	}
	return !slices.ContainsFunc(bytes[len(bytes)-times*each:], func(b byte) bool { return b != 0 })
}

// alteration says in what way the field is not what requests had, or is empty. The log is of so many peers.
func (f *fieldStudy) alteration(peers int) string {
	switch {
	case f.there+f.absent < leastRequests:
		return ""
	case f.there == 0 && !f.address:
		return "is in none of the requests, as if it was deleted or renamed"
	case f.there == 0:
		return ""
	case f.odd*10 >= f.there*9:
		return "holds no addresses, as the log filters hash and replace leave it"
	case f.address && f.masked == f.there && (len(f.values) >= leastClients || f.coarse == f.there):
		return "holds addresses that all end in zero bits, as the log filter ip_mask leaves them"
	case f.sent && len(f.values) == 1 && f.absent == 0 && peers >= leastClients:
		return "has one value in all requests, as the log filter replace leaves it"
	}
	return ""
}

// fieldStudies are the studies of the fields that the stacks of a plan need.
type fieldStudies struct {
	peer    *fieldStudy
	headers map[string]*fieldStudy // in which clients are
	keys    map[string]*fieldStudy // by the placeholder
}

func newFieldStudies(p *plan) *fieldStudies {
	s := &fieldStudies{
		peer: newFieldStudy("request.remote_ip", true), headers: make(map[string]*fieldStudy), keys: make(map[string]*fieldStudy),
	}
	for _, name := range studiedHeaders {
		s.headers[name] = newFieldStudy(name, true)
	}
	for _, st := range p.stacks {
		for _, name := range st.info.clientHeaders() {
			s.headers[name] = newFieldStudy(name, true)
		}
		for _, t := range st.info.Tiers {
			for _, name := range t.Placeholders {
				if name != clientPlaceholder {
					f := newFieldStudy("{"+name+"}", false)
					f.sent = isSent(name)
					s.keys[name] = f
				}
			}
		}
	}
	return s
}

// clientPlaceholder is the client's address as the stacks find it.
const clientPlaceholder = "http.tiered_limit.client_ip"

// isSent reports whether a placeholder is for something that each caller sends in a way of its own.
func isSent(name string) bool {
	return name == userPlaceholder || HeaderOf(name) != "" || strings.HasPrefix(name, "http.request.uri.query.")
}

// peers is how many different peers the log has, as far as they are told apart.
func (s *fieldStudies) peers() int { return len(s.peer.values) }

// alteredChain says in what way the log has altered the peers or a forwarding header, so that nothing can be told about the
// proxies in front. It is empty if it has not.
func (s *fieldStudies) alteredChain(header string) string {
	for _, f := range []*fieldStudy{s.peer, s.headers[header]} {
		if f == nil {
			continue
		}
		if how := f.alteration(s.peers()); how != "" {
			return f.name + " " + how
		}
	}
	return ""
}

// add takes a request into account.
func (s *fieldStudies) add(peer string, q *Query) {
	s.peer.add(host(peer))
	for name, f := range s.headers {
		lines := q.Request.Header[name]
		if len(lines) == 0 {
			f.add("")
			continue
		}
		f.add(lastEntry(name, lines[len(lines)-1]))
	}
	for name, f := range s.keys {
		value, _ := q.Replacer.GetString(name)
		f.add(value)
	}
}

// lastEntry is the rightmost entry of a forwarding header.
func lastEntry(header, line string) string {
	chain, ok := new(clientip.Forwarded).Open(header, []string{line})
	if !ok {
		return strings.TrimSpace(line)
	}
	entry, _ := chain.Next()
	return strings.TrimSpace(entry)
}

// alteredFor says which field of those that a tier counts by the log has altered, and how. It is empty if none is.
func (s *fieldStudies) alteredFor(info *StackInfo, t *TierInfo) string {
	for _, name := range t.Placeholders {
		if name == clientPlaceholder {
			if text := s.alteredClient(info); text != "" {
				return text
			}
			continue
		}
		if f := s.keys[name]; f != nil {
			if how := f.alteration(s.peers()); how != "" {
				return f.name + " " + how
			}
		}
	}
	return ""
}

// alteredClient is alteredFor for what a stack takes clients from.
func (s *fieldStudies) alteredClient(info *StackInfo) string {
	if headers := info.clientHeaders(); len(headers) > 0 {
		for _, name := range headers {
			if how := s.headers[name].alteration(s.peers()); how != "" {
				return name + " " + how
			}
		}
		if !info.Trusted {
			return ""
		}
	}
	if how := s.peer.alteration(s.peers()); how != "" {
		return s.peer.name + " " + how
	}
	return ""
}

// notes say which figures cannot be had.
func (s *fieldStudies) notes(p *plan) (notes []string) {
	for _, st := range p.stacks {
		for i := range st.info.Tiers {
			t := &st.info.Tiers[i]
			if text := s.alteredFor(&st.info, t); text != "" {
				notes = append(notes, fmt.Sprintf("tier %q of stack %q: in this log %s; who would be refused, how many clients there are, and "+
					"which limit fits cannot be had from it. Replay a log that is written without that filter", t.Name, st.info.Label, text))
			}
		}
	}
	return notes
}
