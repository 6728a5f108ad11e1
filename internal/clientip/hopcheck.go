package clientip

import (
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// checkRequests is how many requests a hop check looks at.
	checkRequests = 200

	// checkLengths is how many different lengths of the chain a verdict names.
	checkLengths = 8
)

// HopCheck notices a hop count that is stated too low, which nothing else tells: every client then has the address of
// one proxy, and all share one budget. The sign is that requests with more entries than hops all lead to one address
// while the address to its left differs.
//
// The zero value is ready. It may be used by many requests at once. A check that has finished costs one atomic load,
// and one that has not costs nothing for a chain without entries beyond the hops.
type HopCheck struct {
	finished atomic.Bool

	mu       sync.Mutex // guards what follows
	requests int
	read     netip.Addr // the address that all requests led to
	left     netip.Addr // the last address seen to its left
	differed bool       // another one was seen there
	lengths  []int      // the different lengths of the chain, as many as a verdict names
	more     bool       // there were others
}

// HopVerdict says that a hop count seems to be too low. It holds no address.
type HopVerdict struct {
	// Hops is the count as stated.
	Hops int

	// Lengths are the different lengths that the chain had, in rising order.
	Lengths []int

	// More tells that there were others.
	More bool
}

// Observe takes note of a judged request and its client. Of all the calls, at most one returns a verdict and true:
// the one that brings the number of requests up to checkRequests.
//
// Only requests with an entry to the left of the one that was used count. Entries to the left that are no addresses
// say nothing about where the client is.
func (h *HopCheck) Observe(t *Topology, r *http.Request, c Client) (HopVerdict, bool) {
	if !c.Longer || h.finished.Load() {
		return HopVerdict{}, false
	}
	left, ok := t.neighbour(r)
	length := t.ChainLength(r)

	h.mu.Lock()
	defer h.mu.Unlock()
	if h.finished.Load() {
		return HopVerdict{}, false
	}
	h.requests++
	if h.requests == 1 {
		h.read = c.Addr
	}
	if c.Addr != h.read {
		h.finish() // the hops tell clients apart
		return HopVerdict{}, false
	}
	if ok {
		h.differed = h.differed || h.left.IsValid() && left != h.left
		h.left = left
	}
	h.note(length)
	if h.requests < checkRequests {
		return HopVerdict{}, false
	}
	verdict := HopVerdict{Hops: t.Hops, Lengths: h.lengths, More: h.more}
	h.finish()
	if !h.differed {
		return HopVerdict{}, false
	}
	slices.Sort(verdict.Lengths)
	return verdict, true
}

// note takes note of a length of the chain.
func (h *HopCheck) note(length int) {
	switch {
	case slices.Contains(h.lengths, length):
	case len(h.lengths) < checkLengths:
		h.lengths = append(h.lengths, length)
	default:
		h.more = true
	}
}

// finish ends the check and lets go of what it has seen.
func (h *HopCheck) finish() {
	h.read, h.left, h.lengths = netip.Addr{}, netip.Addr{}, nil
	h.finished.Store(true)
}
