// Package clientip tells who sent a request: the peer of the connection, or an entry of a forwarding header, by what is
// stated about the proxies in front. Nothing is learned from a request, and nothing that a caller may have written is
// believed.
package clientip

import (
	"net/http"
	"net/netip"
)

// MaxHops is the largest number of hops that can be stated, and the longest row of trusted entries that is walked.
const MaxHops = 64

// DefaultHeader is the canonical name of the header that is read where the config names none.
const DefaultHeader = "X-Forwarded-For"

// Topology says who stands between the clients and this server. It is stated in the config, and not changed once requests
// are served.
type Topology struct {
	// Hops is how many entries our own proxies append: the client is that entry, counted from the right. 0: the
	// client is the peer, whatever the headers say. -1: not stated. At most MaxHops.
	Hops int

	// Header is the canonical name of the header that the hops count in. Empty: X-Forwarded-For. Elements of
	// Forwarded are read by RFC 7239, those of any other header are between commas.
	Header string

	// Trusted tells whether an address is that of a trusted proxy of the server; the address is canonical. nil: the
	// server states no trusted proxies. It is asked at most MaxHops+1 times for a request.
	Trusted func(r *http.Request, addr netip.Addr) bool

	// Unix tells that the server trusts peers that have no address.
	Unix bool

	// Headers are the canonical names of the server's client IP headers, in order. The first that a request has is
	// the one that counts when there are trusted proxies and no hops.
	Headers []string

	// NAT64 is the prefixes that IPv4 addresses are behind in IPv6 ones.
	NAT64 NAT64
}

// Stated reports whether the config says anything about who stands in front of the server. If it does not, a
// client's address must not be used.
func (t *Topology) Stated() bool { return t.Hops >= 0 || t.Limited() }

// Limited reports whether only some peers are believed.
func (t *Topology) Limited() bool { return t.Trusted != nil || t.Unix }

// Source says in a word where the client's address comes from: the peer, trusted_hops, trusted_proxies, both
// (trusted_hops, believed from trusted proxies only), or nowhere: not_stated.
func (t *Topology) Source() string {
	switch {
	case t.Hops == 0:
		return "peer"
	case t.Hops > 0 && t.Limited():
		return "both"
	case t.Hops > 0:
		return "trusted_hops"
	case t.Limited():
		return "trusted_proxies"
	}
	return "not_stated"
}

// Client is the client of a request.
//
//   - No hops and no trusted proxies, or 0 hops: the peer.
//   - Hops and no trusted proxies: the entry that many places from the right, whoever the peer is.
//   - Trusted proxies and no hops: if the peer is one of them, the rightmost entry that is not, else the peer.
//   - Both: the entry that the hops lead to if the peer is a trusted proxy, else the peer.
//
// A peer without an address (a unix socket, a call within the process) is a trusted proxy if Unix is set, and only
// then. So hops alone read its header, and so does Unix, but trusted ranges alone do not.
//
// Where the entry cannot be used the peer is, apart from what else the peer sends, and never an entry further to the
// left, which the caller may have written.
func (t *Topology) Client(r *http.Request) Client {
	c, _ := t.Find(r)
	return c
}

// Find is [Topology.Client], and which entry of the chain decided, counted from the right and from 1: the client's, or the
// one that is no address. 0: none did.
func (t *Topology) Find(r *http.Request) (c Client, place int) {
	if t.Hops == 0 || !t.Stated() {
		return direct(t.Peer(r)), 0
	}
	name, lines := t.Present(r)
	if t.Limited() {
		peer := t.Peer(r)
		trusted := t.Trusts(r, peer)
		if !trusted && len(lines) > 0 {
			return Client{Addr: peer, Fallback: UntrustedPeer}, 0
		}
		if !trusted || t.Hops < 0 && len(lines) == 0 {
			return direct(peer), 0
		}
	}
	c, place = t.read(r, name, lines)
	if c.Fallback != None {
		c.Addr, c.Apart = t.Peer(r), len(lines) > 0
	}
	return c, place
}

// Peer is the canonical address of the peer, the zero Addr if it has none.
func (t *Topology) Peer(r *http.Request) netip.Addr {
	addr, _ := t.NAT64.ParseAddr(r.RemoteAddr)
	return addr
}

// Trusts reports whether the peer is a trusted proxy of the server.
func (t *Topology) Trusts(r *http.Request, peer netip.Addr) bool {
	if !peer.IsValid() {
		return t.Unix
	}
	return t.Trusted != nil && t.Trusted(r, peer)
}

// Present is the header that counts for the request: its name and its field lines. There are no lines if the request
// does not have it. Only the presence decides which it is; what is in it does not. With 0 hops it is the first
// forwarding header that the request has, so lines tell that there is one.
func (t *Topology) Present(r *http.Request) (string, []string) {
	if t.Hops >= 0 {
		name := t.Header
		if name == "" {
			name = DefaultHeader
		}
		if lines := r.Header[name]; len(lines) > 0 || t.Hops > 0 {
			return name, lines
		}
	}
	for _, name := range t.Headers {
		if lines := r.Header[name]; len(lines) > 0 {
			return name, lines
		}
	}
	if t.Hops == 0 {
		for _, name := range [...]string{DefaultHeader, ForwardedHeader} {
			if lines := r.Header[name]; len(lines) > 0 {
				return name, lines
			}
		}
	}
	return "", nil
}

// ChainLength is how many entries the chain has, over all its field lines. It is for warnings only: the caller can
// make it any number.
func (t *Topology) ChainLength(r *http.Request) int {
	name, lines := t.Present(r)
	if name == ForwardedHeader {
		var f Forwarded
		if f.parse(lines) {
			return f.count
		}
	}
	c := commas{lines: lines}
	return c.len()
}

// neighbour is the address to the left of the one that the hops lead to, if there is one.
func (t *Topology) neighbour(r *http.Request) (netip.Addr, bool) {
	name, lines := t.Present(r)
	var entry string
	if name == ForwardedHeader {
		var f Forwarded
		if !f.parse(lines) {
			return netip.Addr{}, false
		}
		entry, _ = f.fromRight(t.Hops + 1)
	} else {
		c := commas{lines: lines}
		entry, _ = c.skip(t.Hops + 1)
	}
	return t.NAT64.ParseAddr(entry)
}

// read is the client by the field lines of a header, and the place of the entry that decided. Where there is a reason to fall
// back it has no address.
func (t *Topology) read(r *http.Request, name string, lines []string) (Client, int) {
	if name == ForwardedHeader {
		return t.readForwarded(r, lines)
	}
	c := commas{lines: lines}
	if t.Hops > 0 {
		entry, ok := c.skip(t.Hops)
		return t.hopClient(entry, ok, c.more())
	}
	for place := 1; place <= MaxHops; place++ {
		entry, ok := c.next()
		if !ok {
			break
		}
		if found, done := t.step(r, entry); done {
			return found, place
		}
	}
	return Client{Fallback: AllTrusted}, 0
}

// readForwarded is read for the Forwarded header. The room that it needs is not taken for other headers, and does not
// leave the stack.
func (t *Topology) readForwarded(r *http.Request, lines []string) (Client, int) {
	var f Forwarded
	if !f.parse(lines) {
		return Client{Fallback: BadEntry}, 0
	}
	if t.Hops > 0 {
		entry, ok := f.fromRight(t.Hops)
		return t.hopClient(entry, ok, f.count > t.Hops)
	}
	for place := 1; place <= min(f.count, MaxHops); place++ {
		entry, _ := f.fromRight(place)
		if found, done := t.step(r, entry); done {
			return found, place
		}
	}
	return Client{Fallback: AllTrusted}, 0
}

// step judges one entry of the walk past trusted proxies, and reports whether the walk ends there.
func (t *Topology) step(r *http.Request, entry string) (Client, bool) {
	addr, ok := t.NAT64.ParseAddr(entry)
	if !ok {
		return Client{Fallback: BadEntry}, true
	}
	if t.Trusted != nil && t.Trusted(r, addr) {
		return Client{}, false
	}
	return Client{Addr: addr}, true
}

// hopClient is the client by the entry that the hops lead to, if there is one, and the place of that.
func (t *Topology) hopClient(entry string, ok, longer bool) (Client, int) {
	if !ok {
		return Client{Fallback: ShortChain}, 0
	}
	addr, ok := t.NAT64.ParseAddr(entry)
	if !ok {
		return Client{Fallback: BadEntry}, t.Hops
	}
	return Client{Addr: addr, Longer: longer}, t.Hops
}
