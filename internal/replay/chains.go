package replay

import (
	"cmp"
	"hash/maphash"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// chainStudy collects what a log tells about the proxies in front of a server: for each peer, how many entries the
// forwarding headers had that it passed on.
type chainStudy struct {
	headers []*headerStudy
}

// headerStudy is the study of one header.
type headerStudy struct {
	header   string
	stated   bool // a stack takes clients from it
	requests int64
	with     int64 // that carried the header
	peers    map[string]*peerChains
	others   peerChains // of peers beyond maxPeers
	places   [maxPlaces]distinct
	samples  [maxPlaces][]string // the first different entries at each place

	forwarded clientip.Forwarded
}

// peerChains are the chains that one peer sent.
type peerChains struct {
	requests int64
	lengths  [maxPlaces + 2]int64 // by number of entries, 0 for no header; the last for all longer ones
	public   bool
}

const (
	maxPeers    = 4096
	maxPlaces   = 8
	maxDistinct = 1 << 14 // different entries that are told apart at one place
	maxSamples  = 3       // of them that are named
)

var placeSeed = maphash.MakeSeed()

// studiedHeaders are looked at in every log. Proxies append to the first two; they replace the others, which have one
// entry.
var studiedHeaders = [...]string{"X-Forwarded-For", "Forwarded", "X-Real-Ip", "Cf-Connecting-Ip"}

func newChainStudy() *chainStudy {
	c := new(chainStudy)
	for _, header := range studiedHeaders {
		c.headers = append(c.headers, &headerStudy{header: header, peers: make(map[string]*peerChains)})
	}
	return c
}

// state takes note of a header that a stack takes clients from, by its canonical name.
func (c *chainStudy) state(header string) {
	for _, s := range c.headers {
		if s.header == header {
			s.stated = true
			return
		}
	}
	c.headers = append(c.headers, &headerStudy{header: header, stated: true, peers: make(map[string]*peerChains)})
}

// appended tells whether proxies append to the header, and do not replace it.
func (s *headerStudy) appended() bool {
	return s.header == studiedHeaders[0] || s.header == studiedHeaders[1]
}

// add takes a request into account.
func (c *chainStudy) add(peer string, h http.Header) {
	for _, s := range c.headers {
		s.add(host(peer), h[s.header])
	}
}

func (s *headerStudy) add(peer string, lines []string) {
	p := s.peers[peer]
	switch {
	case p != nil:
	case len(s.peers) < maxPeers:
		p = &peerChains{public: isPublic(peer)}
		s.peers[strings.Clone(peer)] = p
	default:
		p = &s.others
	}
	s.requests++
	p.requests++
	if len(lines) == 0 {
		p.lengths[0]++
		return
	}
	s.with++
	p.lengths[min(s.walk(lines), len(p.lengths)-1)]++
}

// walk goes through the entries from the right, remembers who was at the first places, and returns how many there are. Of
// a chain that no handler would use it remembers nobody.
func (s *headerStudy) walk(lines []string) int {
	chain, ok := s.forwarded.Open(s.header, lines)
	if !ok {
		chain, _ = s.forwarded.Open("", lines)
		return chain.Len()
	}
	for place := range maxPlaces {
		entry, more := chain.Next()
		if !more {
			return place
		}
		s.remember(place, entry)
	}
	return maxPlaces + chain.Len()
}

func (s *headerStudy) remember(place int, entry string) {
	set := &s.places[place]
	if set.n >= maxDistinct {
		return
	}
	entry = entryHost(entry)
	if set.add(maphash.String(placeSeed, entry)) && len(s.samples[place]) < maxSamples {
		s.samples[place] = append(s.samples[place], strings.Clone(shorten(entry)))
	}
}

// distinct counts different values, by their hashes.
type distinct struct {
	slots []uint64 // 0: free
	n     int
}

// add reports whether the value is new.
func (d *distinct) add(hash uint64) bool {
	if 2*d.n >= len(d.slots) {
		old := d.slots
		d.slots, d.n = make([]uint64, max(64, 4*len(old))), 0
		for _, h := range old {
			if h != 0 {
				d.add(h)
			}
		}
	}
	hash |= 1
	mask := uint64(len(d.slots) - 1)
	for i := hash >> 16 & mask; ; i = (i + 1) & mask {
		switch d.slots[i] {
		case hash:
			return false
		case 0:
			d.slots[i] = hash
			d.n++
			return true
		}
	}
}

// entryHost is an entry without blanks and port, so that a client's connections are not told apart.
func entryHost(entry string) string {
	if addr, ok := clientip.NAT64(nil).ParseAddr(entry); ok {
		return addr.String()
	}
	return strings.TrimSpace(entry)
}

// host is the address of a peer, without its port.
func host(peer string) string {
	if strings.HasPrefix(peer, "[") {
		if i := strings.IndexByte(peer, ']'); i > 0 {
			return peer[1:i]
		}
	}
	if i := strings.LastIndexByte(peer, ':'); i >= 0 && strings.IndexByte(peer, ':') == i {
		return peer[:i]
	}
	return peer
}

// sharedRange is carrier-grade NAT and what clouds use in its place (RFC 6598).
var sharedRange = netip.MustParsePrefix("100.64.0.0/10")

// isPublic tells whether an address can be that of somebody on the internet.
func isPublic(peer string) bool {
	addr, err := netip.ParseAddr(peer)
	if err != nil {
		return false // a unix socket
	}
	addr = addr.Unmap()
	return addr.IsGlobalUnicast() && !addr.IsPrivate() && !sharedRange.Contains(addr)
}

// with is how many requests of the peer had a chain.
func (p *peerChains) with() int64 { return p.requests - p.lengths[0] }

// shortest is the length of the shortest chain, 0 if there was none.
func (p *peerChains) shortest() int {
	for n := 1; n < len(p.lengths); n++ {
		if p.lengths[n] > 0 {
			return n
		}
	}
	return 0
}

// namedPeer is a peer and its chains.
type namedPeer struct {
	name string
	*peerChains
}

// sorted lists the peers, the busiest first.
func (s *headerStudy) sorted() []namedPeer {
	list := make([]namedPeer, 0, len(s.peers))
	for _, name := range slices.Sorted(maps.Keys(s.peers)) {
		list = append(list, namedPeer{name, s.peers[name]})
	}
	slices.SortStableFunc(list, func(a, b namedPeer) int { return cmp.Compare(b.requests, a.requests) })
	return list
}

// distinct is how many different entries were seen at a place, counted from the right and from 1.
func (s *headerStudy) distinct(place int) int {
	if place < 1 || place > maxPlaces {
		return 0
	}
	return s.places[place-1].n
}
