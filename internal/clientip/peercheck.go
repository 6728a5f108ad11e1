package clientip

import (
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// differingRequests is how many requests of one peer that name different clients make a verdict.
	differingRequests = 20

	// checkedPeers is how many peers are watched at a time.
	checkedPeers = 8
)

// PeerCheck notices a proxy that is missing from the trusted ones, which nothing else tells: its header is not believed, so
// all its clients have the address of the proxy, and share one budget. The sign is a peer whose chains name one client
// after another.
//
// The zero value is ready. It may be used by many requests at once. A check that has finished costs one atomic load, and
// one that has not costs nothing for peers that are trusted or send no chain.
type PeerCheck struct {
	finished atomic.Bool

	mu    sync.Mutex // guards what follows
	peers []checkedPeer
	hand  int // among equals the one from here on is replaced, so that each stays for a while
}

// checkedPeer is an untrusted peer that sends chains.
type checkedPeer struct {
	addr     netip.Addr // the zero Addr: those without one
	last     netip.Addr // whom its latest chain named
	requests int
	differ   int // of these that named another client than the one before
}

// PeerVerdict says that a proxy seems to be missing from the trusted ones.
type PeerVerdict struct {
	// Peer is its address. The zero Addr: it has none.
	Peer netip.Addr

	// Requests is how many requests it sent until then.
	Requests int

	// Clients is how many of these named another client than the one before.
	Clients int
}

// Observe takes note of a request and its client. Of all the calls, at most one returns a verdict and true.
//
// A peer that is not watched yet takes the place of the one that has named the fewest clients. So a proxy is noticed that
// sends one of eight such requests, however many callers make chains up.
func (p *PeerCheck) Observe(t *Topology, r *http.Request, c Client) (PeerVerdict, bool) {
	if c.Fallback != UntrustedPeer || p.finished.Load() {
		return PeerVerdict{}, false
	}
	name, lines := t.Present(r)
	named, _ := t.read(r, name, lines)
	if !named.Addr.IsValid() {
		return PeerVerdict{}, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.finished.Load() {
		return PeerVerdict{}, false
	}
	peer := p.watchLocked(c.Addr)
	peer.requests++
	if named.Addr != peer.last {
		peer.last = named.Addr
		peer.differ++
	}
	if peer.differ < differingRequests {
		return PeerVerdict{}, false
	}
	verdict := PeerVerdict{Peer: peer.addr, Requests: peer.requests, Clients: peer.differ}
	p.peers = nil
	p.finished.Store(true)
	return verdict, true
}

// watchLocked returns what is known of a peer.
func (p *PeerCheck) watchLocked(addr netip.Addr) *checkedPeer {
	at := slices.IndexFunc(p.peers, func(peer checkedPeer) bool { return peer.addr == addr })
	switch {
	case at >= 0:
		return &p.peers[at]
	case len(p.peers) < checkedPeers:
		p.peers = append(p.peers, checkedPeer{addr: addr})
		return &p.peers[len(p.peers)-1]
	}
	least := p.hand
	for i := range p.peers {
		if at := (p.hand + i) % len(p.peers); p.peers[at].differ < p.peers[least].differ {
			least = at
		}
	}
	p.hand = (least + 1) % len(p.peers)
	p.peers[least] = checkedPeer{addr: addr}
	return &p.peers[least]
}
