package clientip

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestHopCheck(t *testing.T) {
	client := func(i int) string { return fmt.Sprintf("203.0.113.%d", i%250) }
	for name, tc := range map[string]struct {
		topology *Topology
		requests int
		peer     string
		chain    func(i int) string
		want     *HopVerdict // nil: none
		at       int         // the request that brings it
	}{
		"one hop too few": {
			requests: 250, chain: func(i int) string { return client(i) + ", 198.51.100.1" },
			want: &HopVerdict{Hops: 1, Lengths: []int{2}}, at: 199},
		"two hops too few": {
			requests: 250,
			chain:    func(i int) string { return client(i) + ", 198.51.100.1, 10.0.0.2" }, topology: byHops(1, ""),
			want: nil}, // one hop further there is still a proxy, so nothing varies
		"one of three too few": {
			requests: 250, topology: byHops(2, ""),
			chain: func(i int) string { return client(i) + ", 198.51.100.1, 10.0.0.2" },
			want:  &HopVerdict{Hops: 2, Lengths: []int{3}}, at: 199},
		"callers with headers of their own": {
			requests: 250,
			chain:    func(i int) string { return strings.Repeat("6.6.6.6,", i%3) + client(i) + ",198.51.100.1" },
			want:     &HopVerdict{Hops: 1, Lengths: []int{2, 3, 4}}, at: 199},
		"more lengths than are named": {
			requests: 250,
			chain:    func(i int) string { return strings.Repeat("6.6.6.6,", 19-i%20) + client(i) + ",198.51.100.1" },
			want:     &HopVerdict{Hops: 1, Lengths: []int{14, 15, 16, 17, 18, 19, 20, 21}, More: true}, at: 199},
		"Forwarded": {
			requests: 250, topology: byHops(1, ForwardedHeader),
			chain: func(i int) string { return "for=" + client(i) + ", for=198.51.100.1" },
			want:  &HopVerdict{Hops: 1, Lengths: []int{2}}, at: 199},
		"behind a trusted proxy": {
			requests: 250, topology: byBoth(1), chain: func(i int) string { return client(i) + ", 198.51.100.1" },
			want: &HopVerdict{Hops: 1, Lengths: []int{2}}, at: 199},
		"64 hops": {
			requests: 250, topology: byHops(64, ""),
			chain: func(i int) string { return client(i) + strings.Repeat(",10.0.0.2", 64) },
			want:  &HopVerdict{Hops: 64, Lengths: []int{65}}, at: 199},
		"64 hops, Forwarded": {
			requests: 250, topology: byHops(64, ForwardedHeader),
			chain: func(i int) string { return "for=" + client(i) + strings.Repeat(",for=10.0.0.2", 64) },
			want:  &HopVerdict{Hops: 64, Lengths: []int{65}}, at: 199},
		"short chains between do not count": {
			requests: 450, chain: func(i int) string {
				if i%2 == 0 {
					return client(i)
				}
				return client(i) + ", 198.51.100.1"
			}, want: &HopVerdict{Hops: 1, Lengths: []int{2}}, at: 399},
		"garbage at the place does not count": {
			requests: 450, chain: func(i int) string {
				if i%2 == 0 {
					return client(i) + ", unknown"
				}
				return client(i) + ", 198.51.100.1"
			}, want: &HopVerdict{Hops: 1, Lengths: []int{2}}, at: 399},
		"199 requests are too few": {
			requests: 199, chain: func(i int) string { return client(i) + ", 198.51.100.1" }},
		"the last one differs": {
			requests: 200, chain: func(i int) string { return client(i/199) + ", 198.51.100.1" },
			want: &HopVerdict{Hops: 1, Lengths: []int{2}}, at: 199},
		"only the second one differs": {
			requests: 250, chain: func(i int) string { return client(min(i, 1)) + ", 198.51.100.1" },
			want: &HopVerdict{Hops: 1, Lengths: []int{2}}, at: 199},
		"two addresses are read": {
			requests: 500, chain: func(i int) string { return client(i) + ", 198.51.100." + fmt.Sprint(i/199) }},
		"the count is right": {
			requests: 500, topology: byHops(2, ""),
			chain: func(i int) string { return "6.6.6.6," + client(i) + ", 198.51.100.1" }},
		"the neighbour is always the same": {
			requests: 500, chain: func(int) string { return client(1) + ", 198.51.100.1" }},
		"the neighbour only changes its port": {
			requests: 500, chain: func(i int) string { return client(1) + fmt.Sprintf(":%d, 198.51.100.1", i+1) }},
		"the neighbour is no address": {
			requests: 500, chain: func(i int) string { return fmt.Sprintf("_%d, 198.51.100.1", i) }},
		"no neighbour": {requests: 500, chain: client},
		"peers are judged": {
			requests: 500, topology: byHops(0, ""),
			chain: func(i int) string { return client(i) + ", 198.51.100.1" },
		},
		"trusted proxies": {
			requests: 500, topology: byTrust(),
			chain: func(i int) string { return client(i) + ", 198.51.100.1" },
		},
		"a direct caller": {
			requests: 500, topology: byBoth(1), peer: "198.51.100.9:1",
			chain: func(i int) string { return client(i) + ", 6.6.6.6" },
		},
	} {
		t.Run(name, func(t *testing.T) {
			top, peer := tc.topology, tc.peer
			if top == nil {
				top = byHops(1, "")
			}
			if peer == "" {
				peer = "10.0.0.1:1"
			}
			header := top.Header
			if header == "" {
				header = DefaultHeader
			}
			var h HopCheck
			var got *HopVerdict
			for i := range tc.requests {
				r := requestFrom(peer, http.Header{header: {tc.chain(i)}})
				verdict, ok := h.Observe(top, r, top.Client(r))
				if ok {
					assert.Nil(t, got, "a second verdict")
					assert.Equal(t, tc.at, i, "the request that brings it")
					got = &verdict
				}
			}
			assert.Equal(t, tc.want, got)
		})
	}
}

// TestHopCheckParallel has many requests at once: there is one verdict.
func TestHopCheckParallel(t *testing.T) {
	top := byHops(1, "")
	var h HopCheck
	var verdicts atomic.Int64
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for i := range 100 {
				r := requestFrom("10.0.0.1:1", xff(fmt.Sprintf("203.0.%d.%d, 198.51.100.1", g, i)))
				if verdict, ok := h.Observe(top, r, top.Client(r)); ok {
					verdicts.Add(1)
					assert.Equal(t, HopVerdict{Hops: 1, Lengths: []int{2}}, verdict)
				}
			}
		})
	}
	wg.Wait()
	assert.EqualValues(t, 1, verdicts.Load())
	assert.True(t, h.finished.Load())
}

// TestHopCheckAllocations holds a finished check, and one without anything to see, to no allocation.
func TestHopCheckAllocations(t *testing.T) {
	top := byHops(1, "")
	long := requestFrom("10.0.0.1:1", xff("203.0.113.7, 198.51.100.1"))
	exact := requestFrom("10.0.0.1:1", xff("198.51.100.1"))
	var h HopCheck
	assert.Zero(t, testing.AllocsPerRun(100, func() { h.Observe(top, exact, top.Client(exact)) }), "nothing to see")
	assert.Zero(t, h.requests, "requests seen")
	for range checkRequests {
		h.Observe(top, long, top.Client(long))
	}
	assert.True(t, h.finished.Load())
	assert.Zero(t, testing.AllocsPerRun(100, func() { h.Observe(top, long, top.Client(long)) }), "finished")
}

func BenchmarkHopCheck(b *testing.B) {
	top := byHops(1, "")
	r := requestFrom("10.0.0.1:1", xff("203.0.113.7, 198.51.100.1"))
	c := top.Client(r)
	var h HopCheck
	h.finish()
	b.ReportAllocs()
	for b.Loop() {
		h.Observe(top, r, c)
	}
}
