package tieredlimit

import (
	"net/http"
	"net/netip"
	"strings"
)

// maxHops is the largest number of hops that can be stated, and the longest row of trusted entries that is walked.
const maxHops = 64

// xffHeader is the canonical name of the header that is read where the config names none.
const xffHeader = "X-Forwarded-For"

// topology says who stands between the clients and this server. It is stated in the config and never learned from a
// request. It is not changed once requests are served.
type topology struct {
	// hops is how many entries our own proxies append: the client is that entry, counted from the right. 0: the
	// client is the peer, whatever the headers say. -1: not stated. At most maxHops.
	hops int

	// header is the canonical name of the header that the hops count in. Empty: X-Forwarded-For. Elements of
	// Forwarded are read by RFC 7239, those of any other header are between commas.
	header string

	// trusted tells whether an address is that of a trusted proxy of the server; the address is canonical. nil: the
	// server states no trusted proxies. It is asked at most maxHops+1 times for a request.
	trusted func(r *http.Request, addr netip.Addr) bool

	// unix tells that the server trusts peers that have no address.
	unix bool

	// headers are the canonical names of the server's client IP headers, in order. The first that a request has is
	// the one that counts when there are trusted proxies and no hops.
	headers []string
}

// client is what a topology says about who sent a request.
type client struct {
	// addr is the canonical address (no port, no zone, not v4-mapped), not yet masked. The zero Addr: no address is
	// known, and the client is one of those in the bucket "unknown".
	addr netip.Addr

	// fallback says why the peer is used though a proxy's entry was to be read.
	fallback fallbackReason

	// apart tells that the request had a chain, and that it was of no use. A caller can bring that about, so such
	// requests are counted for the peer and the reason together, and never drain the budget that is the peer's own.
	apart bool

	// longer tells that the header has entries to the left of the one that the hops led to. Only then is there
	// something for a [hopCheck] to see.
	longer bool
}

// fallbackReason says why the client of a request is its peer, or nobody, where a header was to name it.
type fallbackReason uint8

const (
	// fallbackNone: what the config says to use was there.
	fallbackNone fallbackReason = iota

	// fallbackShortChain: the chain has fewer entries than hops are stated. No header at all is such a chain.
	fallbackShortChain

	// fallbackBadEntry: the entry that counts is not an IP address, or the Forwarded header does not parse.
	fallbackBadEntry

	// fallbackAllTrusted: every entry is a trusted proxy.
	fallbackAllTrusted

	// fallbackNoPeer: the peer has no address and no header was read in its place. A peer without an address whose
	// header was read and was of no use has the reason of the header.
	fallbackNoPeer

	// fallbackReasons is how many reasons there are.
	fallbackReasons
)

// String is the name of the reason in metrics and logs. fallbackNone has the empty name.
func (f fallbackReason) String() string {
	switch f {
	case fallbackShortChain:
		return "short_chain"
	case fallbackBadEntry:
		return "bad_entry"
	case fallbackAllTrusted:
		return "all_trusted"
	case fallbackNoPeer:
		return "no_peer"
	}
	return ""
}

// ofChain reports whether it is a chain that the reason is about.
func (f fallbackReason) ofChain() bool {
	return f == fallbackShortChain || f == fallbackBadEntry || f == fallbackAllTrusted
}

// known reports whether the address is that of the client, and not of a proxy whose chain was of no use.
func (c client) known() bool { return c.addr.IsValid() && !c.apart }

// network is the masked address, by which clients that a store has no room for are grouped. Requests whose chain was of
// no use are no part of the peer's network, and have none.
func (c client) network(p prefixes) netip.Addr {
	if !c.known() {
		return netip.Addr{}
	}
	return p.mask(c.addr)
}

// appendAddress appends the masked address, or unknown.
func (c client) appendAddress(buf []byte, p prefixes) []byte {
	if !c.addr.IsValid() {
		return append(buf, unknownClient...)
	}
	return p.mask(c.addr).AppendTo(buf)
}

// appendIdentity appends what the client is counted as: the masked address, or unknown, and in front of it the reason
// if a chain was of no use, as in bad_entry@10.0.0.1.
func (c client) appendIdentity(buf []byte, p prefixes) []byte {
	if c.apart {
		buf = append(append(buf, c.fallback.String()...), '@')
	}
	return c.appendAddress(buf, p)
}

// parseClient reads what a client is counted as. The address may be written in any way, and need not be masked.
func parseClient(s string) (client, bool) {
	var c client
	if reason, rest, found := strings.Cut(s, "@"); found {
		for f := fallbackNone + 1; f < fallbackReasons; f++ {
			if f.ofChain() && f.String() == reason {
				c.fallback, c.apart, s = f, true, rest
			}
		}
	}
	if s == unknownClient {
		return c, true
	}
	var ok bool
	c.addr, ok = canonicalAddr(s)
	return c, ok
}

// stated reports whether the config says anything about who stands in front of the server. If it does not, a
// client's address must not be used.
func (t *topology) stated() bool { return t.hops >= 0 || t.limited() }

// limited reports whether only some peers are believed.
func (t *topology) limited() bool { return t.trusted != nil || t.unix }

// client is the client of a request.
//
//   - No hops and no trusted proxies, or 0 hops: the peer.
//   - Hops and no trusted proxies: the entry that many places from the right, whoever the peer is.
//   - Trusted proxies and no hops: if the peer is one of them, the rightmost entry that is not, else the peer.
//   - Both: the entry that the hops lead to if the peer is a trusted proxy, else the peer.
//
// A peer without an address (a unix socket, a call within the process) is a trusted proxy if unix is set, and only
// then. So hops alone read its header, and so does unix, but trusted ranges alone do not.
//
// Where the entry cannot be used the peer is, apart from what else the peer sends, and never an entry further to the
// left, which the caller may have written.
func (t *topology) client(r *http.Request) client {
	if t.hops == 0 || !t.stated() {
		return direct(peerOf(r))
	}
	name, lines := t.present(r)
	if t.limited() {
		peer := peerOf(r)
		if !t.trusts(r, peer) || t.hops < 0 && len(lines) == 0 {
			return direct(peer)
		}
	}
	c := t.read(r, name, lines)
	if c.fallback != fallbackNone {
		c.addr, c.apart = peerOf(r), len(lines) > 0
	}
	return c
}

// chainLength is how many entries the chain has, over all its field lines. It is for warnings only: the caller can
// make it any number. With 0 hops it is the length of the first forwarding header that the request has, so more than
// 0 tells that there is one.
func (t *topology) chainLength(r *http.Request) int {
	name, lines := t.present(r)
	if name == forwardedHeader {
		var tail forwardedTail
		if tail.parse(lines) {
			return tail.count
		}
	}
	n := 0
	for _, line := range lines {
		n += strings.Count(line, ",") + 1
	}
	return n
}

// neighbour is the address to the left of the one that the hops lead to, if there is one.
func (t *topology) neighbour(r *http.Request) (netip.Addr, bool) {
	name, lines := t.present(r)
	var entry string
	if name == forwardedHeader {
		var tail forwardedTail
		if !tail.parse(lines) {
			return netip.Addr{}, false
		}
		entry, _ = tail.fromRight(t.hops + 1)
	} else {
		c := chain{lines: lines}
		entry, _ = c.skip(t.hops + 1)
	}
	return canonicalAddr(entry)
}

// trusts reports whether the peer is a trusted proxy of the server.
func (t *topology) trusts(r *http.Request, peer netip.Addr) bool {
	if !peer.IsValid() {
		return t.unix
	}
	return t.trusted != nil && t.trusted(r, peer)
}

// present is the header that counts for the request: its name and its field lines. There are no lines if the request
// does not have it. Only the presence decides which it is; what is in it does not.
func (t *topology) present(r *http.Request) (string, []string) {
	if t.hops >= 0 {
		name := t.header
		if name == "" {
			name = xffHeader
		}
		if lines := r.Header[name]; len(lines) > 0 || t.hops > 0 {
			return name, lines
		}
	}
	for _, name := range t.headers {
		if lines := r.Header[name]; len(lines) > 0 {
			return name, lines
		}
	}
	if t.hops == 0 {
		for _, name := range [...]string{xffHeader, forwardedHeader} {
			if lines := r.Header[name]; len(lines) > 0 {
				return name, lines
			}
		}
	}
	return "", nil
}

// read is the client by the field lines of a header. Where there is a reason to fall back it has no address.
func (t *topology) read(r *http.Request, name string, lines []string) client {
	if name == forwardedHeader {
		return t.readForwarded(r, lines)
	}
	c := chain{lines: lines}
	if t.hops > 0 {
		entry, ok := c.skip(t.hops)
		return hopClient(entry, ok, c.more())
	}
	for range maxHops {
		entry, ok := c.next()
		if !ok {
			break
		}
		if found, done := t.step(r, entry); done {
			return found
		}
	}
	return client{fallback: fallbackAllTrusted}
}

// readForwarded is read for the Forwarded header.
func (t *topology) readForwarded(r *http.Request, lines []string) client {
	var tail forwardedTail
	if !tail.parse(lines) {
		return client{fallback: fallbackBadEntry}
	}
	if t.hops > 0 {
		entry, ok := tail.fromRight(t.hops)
		return hopClient(entry, ok, tail.count > t.hops)
	}
	for n := range min(tail.count, maxHops) {
		entry, _ := tail.fromRight(n + 1)
		if found, done := t.step(r, entry); done {
			return found
		}
	}
	return client{fallback: fallbackAllTrusted}
}

// step judges one entry of the walk past trusted proxies, and reports whether the walk ends there.
func (t *topology) step(r *http.Request, entry string) (client, bool) {
	addr, ok := canonicalAddr(entry)
	if !ok {
		return client{fallback: fallbackBadEntry}, true
	}
	if t.trusted != nil && t.trusted(r, addr) {
		return client{}, false
	}
	return client{addr: addr}, true
}

// hopClient is the client by the entry that the hops lead to, if there is one.
func hopClient(entry string, ok, longer bool) client {
	if !ok {
		return client{fallback: fallbackShortChain}
	}
	addr, ok := canonicalAddr(entry)
	if !ok {
		return client{fallback: fallbackBadEntry}
	}
	return client{addr: addr, longer: longer}
}

// direct is the client where the peer is what the config says to use.
func direct(peer netip.Addr) client {
	if !peer.IsValid() {
		return client{fallback: fallbackNoPeer}
	}
	return client{addr: peer}
}

// peerOf is the canonical address of the peer, the zero Addr if it has none.
func peerOf(r *http.Request) netip.Addr {
	addr, _ := canonicalAddr(r.RemoteAddr)
	return addr
}

// chain walks the entries between commas from the right to the left, over all field lines as if they were one. Source:
// RFC 9110 section 5.3. Empty entries count. It does not allocate and looks no further than it is asked to.
type chain struct {
	lines []string // those not yet begun
	rest  string   // what is left of the one that has been, if open
	open  bool
}

// next is the next entry to the left, and whether there is one.
func (c *chain) next() (string, bool) {
	if !c.open {
		last := len(c.lines) - 1
		if last < 0 {
			return "", false
		}
		c.rest, c.lines = c.lines[last], c.lines[:last]
	}
	i := strings.LastIndexByte(c.rest, ',')
	entry := c.rest[i+1:]
	if c.open = i >= 0; c.open {
		c.rest = c.rest[:i]
	}
	return entry, true
}

// skip is the n-th entry to the left, and whether there is one.
func (c *chain) skip(n int) (entry string, ok bool) {
	for range n {
		if entry, ok = c.next(); !ok {
			return "", false
		}
	}
	return entry, ok
}

// more reports whether there is a further entry to the left.
func (c *chain) more() bool { return c.open || len(c.lines) > 0 }
