package clientip

import (
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
)

// clientNumber is an address for each number.
func clientNumber(i int) string { return fmt.Sprintf("203.0.%d.%d", i/250%250, i%250) }

// A proxy that is missing from the trusted ones is noticed by the twentieth client that its chains name, however they are
// read; nothing else is.
func TestPeerCheck(t *testing.T) {
	for name, tc := range map[string]struct {
		topology *Topology
		peer     string
		header   string
		chain    func(i int) string // empty: none
		want     *PeerVerdict       // nil: none
		at       int                // the request that brings it
	}{
		"by ranges": {chain: clientNumber, want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"by hops":   {topology: byBoth(1), chain: clientNumber, want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"by two hops": {topology: byBoth(2), chain: func(i int) string { return clientNumber(i) + ", 10.0.0.2" },
			want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"behind a proxy that is trusted": {chain: func(i int) string { return clientNumber(i) + ", 10.0.0.2" },
			want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"Forwarded": {topology: byTrust(ForwardedHeader), header: ForwardedHeader,
			chain: func(i int) string { return "for=" + clientNumber(i) }, want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"each client twice": {chain: func(i int) string { return clientNumber(i / 2) }, want: &PeerVerdict{Requests: 39, Clients: 20}, at: 38},
		"two clients in turn": {chain: func(i int) string { return clientNumber(i % 2) },
			want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"some without a chain": {chain: func(i int) string {
			if i%2 == 0 {
				return ""
			}
			return clientNumber(i)
		}, want: &PeerVerdict{Requests: 20, Clients: 20}, at: 39},
		"some with garbage": {chain: func(i int) string {
			if i%2 == 0 {
				return "unknown"
			}
			return clientNumber(i)
		}, want: &PeerVerdict{Requests: 20, Clients: 20}, at: 39},
		"a unix socket": {peer: "@", chain: clientNumber, want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"only unix sockets are trusted": {topology: &Topology{Hops: -1, Unix: true, Headers: []string{DefaultHeader}}, chain: clientNumber,
			want: &PeerVerdict{Requests: 20, Clients: 20}, at: 19},
		"one client":                        {chain: func(int) string { return clientNumber(7) }},
		"one client with ports":             {chain: func(i int) string { return fmt.Sprintf("203.0.113.7:%d", 1000+i) }},
		"nineteen clients":                  {chain: func(i int) string { return clientNumber(min(i, 18)) }},
		"a trusted peer":                    {peer: "10.0.0.1:1", chain: clientNumber},
		"a trusted unix socket":             {topology: &Topology{Hops: -1, Unix: true, Headers: []string{DefaultHeader}}, peer: "@", chain: clientNumber},
		"no ranges":                         {topology: byHops(1, ""), chain: clientNumber},
		"no hops":                           {topology: byBoth(0), chain: clientNumber},
		"chains that are too short":         {topology: byBoth(2), chain: clientNumber},
		"chains of trusted proxies":         {chain: func(i int) string { return fmt.Sprintf("10.0.0.%d", i%250) }},
		"another header than the one to be": {header: "X-Real-Ip", chain: clientNumber},
	} {
		t.Run(name, func(t *testing.T) {
			top, peer, header := tc.topology, tc.peer, tc.header
			if top == nil {
				top = byTrust()
			}
			if peer == "" {
				peer = "198.51.100.9:1"
			}
			if header == "" {
				header = DefaultHeader
			}
			var p PeerCheck
			var got *PeerVerdict
			for i := range 200 {
				r := requestFrom(peer, nil)
				if chain := tc.chain(i); chain != "" {
					r.Header = http.Header{header: {chain}}
				}
				if verdict, ok := p.Observe(top, r, top.Client(r)); ok {
					assert.Nil(t, got, "a second verdict")
					assert.Equal(t, tc.at, i, "the request that brings it")
					got = &verdict
				}
			}
			if tc.want != nil && peer != "@" {
				tc.want.Peer = netip.MustParseAddr("198.51.100.9")
			}
			assert.Equal(t, tc.want, got)
		})
	}
}

// Several proxies are counted each for itself, and callers who come and go do not keep one from being noticed.
func TestPeerCheckAmongManyPeers(t *testing.T) {
	for peers := range checkedPeers {
		top := byTrust()
		var p PeerCheck
		found := -1
		for i := range 100 {
			r := requestFrom("198.51.100.9:1", xff(clientNumber(i)))
			if verdict, ok := p.Observe(top, r, top.Client(r)); ok {
				found = i
				assert.Equal(t, PeerVerdict{Peer: netip.MustParseAddr("198.51.100.9"), Requests: 20, Clients: 20}, verdict)
			}
			for other := range peers { // each of them is somebody else every time
				r := requestFrom(fmt.Sprintf("192.0.%d.%d:1", i, other), xff("6.6.6.6"))
				_, ok := p.Observe(top, r, top.Client(r))
				assert.False(t, ok)
			}
			assert.LessOrEqual(t, len(p.peers), checkedPeers)
		}
		assert.Equal(t, 19, found, "among %d others a round", peers)
	}
	top := byTrust()
	var late PeerCheck // the proxy comes when all places are taken
	for i := range 100 {
		r := requestFrom(fmt.Sprintf("192.0.2.%d:1", i), xff("6.6.6.6"))
		late.Observe(top, r, top.Client(r))
	}
	found := -1
	for i := range 100 {
		r := requestFrom("198.51.100.9:1", xff(clientNumber(i)))
		if _, ok := late.Observe(top, r, top.Client(r)); ok {
			found = i
		}
		for other := range checkedPeers - 1 {
			r := requestFrom(fmt.Sprintf("192.1.%d.%d:1", i, other), xff("6.6.6.6"))
			late.Observe(top, r, top.Client(r))
		}
	}
	assert.Equal(t, 19, found, "after many others, and among some")

	var p PeerCheck
	for i := range 19 * 5 {
		r := requestFrom(fmt.Sprintf("198.51.100.%d:1", i%5), xff(clientNumber(i)))
		_, ok := p.Observe(top, r, top.Client(r))
		assert.False(t, ok, "five proxies with nineteen clients each")
	}
	r := requestFrom("198.51.100.3:1", xff(clientNumber(999)))
	verdict, ok := p.Observe(top, r, top.Client(r))
	assert.True(t, ok)
	assert.Equal(t, PeerVerdict{Peer: netip.MustParseAddr("198.51.100.3"), Requests: 20, Clients: 20}, verdict)
	assert.Nil(t, p.peers, "what was seen is let go of")
}

// Of the peers that are watched, a new one takes the place of the one that has named the fewest clients.
func TestPeerCheckForgetsTheLeast(t *testing.T) {
	top := byTrust()
	var p PeerCheck
	send := func(peer, times int) {
		for i := range times {
			r := requestFrom(fmt.Sprintf("198.51.100.%d:1", peer), xff(clientNumber(i)))
			_, ok := p.Observe(top, r, top.Client(r))
			assert.False(t, ok)
		}
	}
	for peer, times := range []int{5, 4, 3, 2, 3, 4, 5, 6} {
		send(peer, times)
	}
	send(99, 1)
	var watched []string
	for _, peer := range p.peers {
		watched = append(watched, peer.addr.String())
	}
	assert.Equal(t, []string{"198.51.100.0", "198.51.100.1", "198.51.100.2", "198.51.100.99", "198.51.100.4", "198.51.100.5",
		"198.51.100.6", "198.51.100.7"}, watched)
}

// Many requests at once bring one verdict.
func TestPeerCheckParallel(t *testing.T) {
	top := byTrust()
	var p PeerCheck
	var verdicts atomic.Int64
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for i := range 100 {
				r := requestFrom("198.51.100.9:1", xff(fmt.Sprintf("203.0.%d.%d", g, i)))
				if verdict, ok := p.Observe(top, r, top.Client(r)); ok {
					verdicts.Add(1)
					assert.Equal(t, 20, verdict.Clients)
				}
			}
		})
	}
	wg.Wait()
	assert.EqualValues(t, 1, verdicts.Load())
}

// A check that has finished, and one without anything to see, cost no memory.
func TestPeerCheckAllocations(t *testing.T) {
	top := byTrust()
	trusted, bare := requestFrom("10.0.0.1:1", xff("203.0.113.7")), requestFrom("198.51.100.9:1", nil)
	chain := requestFrom("198.51.100.9:1", xff("203.0.113.7"))
	var p PeerCheck
	for _, r := range []*http.Request{trusted, bare} {
		assert.Zero(t, testing.AllocsPerRun(100, func() { p.Observe(top, r, top.Client(r)) }))
	}
	assert.Empty(t, p.peers)
	p.Observe(top, chain, top.Client(chain))
	assert.Zero(t, testing.AllocsPerRun(100, func() { p.Observe(top, chain, top.Client(chain)) }), "one that is watched")
	for i := range differingRequests {
		r := requestFrom("198.51.100.9:1", xff(clientNumber(i)))
		p.Observe(top, r, top.Client(r))
	}
	assert.True(t, p.finished.Load())
	assert.Zero(t, testing.AllocsPerRun(100, func() { p.Observe(top, chain, top.Client(chain)) }), "finished")
}
