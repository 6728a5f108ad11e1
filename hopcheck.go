package tieredlimit

import (
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// hopCheckRequests is how many requests a hop check looks at.
	hopCheckRequests = 200

	// hopCheckLengths is how many different lengths of the chain a verdict names.
	hopCheckLengths = 8
)

// hopCheck notices a hop count that is stated too low, which nothing else tells: every client then has the address of
// one proxy, and all share one budget. The sign is that requests with more entries than hops all lead to one address
// while the address to its left differs.
//
// The zero value is ready. It may be used by many requests at once. A check that has finished costs one atomic load,
// and one that has not costs nothing for a chain without entries beyond the hops.
type hopCheck struct {
	finished atomic.Bool

	mu       sync.Mutex // guards what follows
	requests int
	read     netip.Addr // the address that all requests led to
	left     netip.Addr // the last address seen to its left
	differed bool       // another one was seen there
	lengths  []int      // the different lengths of the chain, as many as a verdict names
	more     bool       // there were others
}

// hopVerdict says that a hop count seems to be too low. It holds no address.
type hopVerdict struct {
	// hops is the count as stated.
	hops int

	// lengths are the different lengths that the chain had, in rising order.
	lengths []int

	// more tells that there were others.
	more bool
}

// observe takes note of a judged request and its client. Of all the calls, at most one returns a verdict and true:
// the one that brings the number of requests up to hopCheckRequests.
//
// Only requests with an entry to the left of the one that was used count. Entries to the left that are no addresses
// say nothing about where the client is.
func (h *hopCheck) observe(t *topology, r *http.Request, c client) (hopVerdict, bool) {
	if !c.longer || h.finished.Load() {
		return hopVerdict{}, false
	}
	left, ok := t.neighbour(r)
	length := t.chainLength(r)

	h.mu.Lock()
	defer h.mu.Unlock()
	if h.finished.Load() {
		return hopVerdict{}, false
	}
	h.requests++
	if h.requests == 1 {
		h.read = c.addr
	}
	if c.addr != h.read {
		h.finish() // the hops tell clients apart
		return hopVerdict{}, false
	}
	if ok {
		h.differed = h.differed || h.left.IsValid() && left != h.left
		h.left = left
	}
	h.note(length)
	if h.requests < hopCheckRequests {
		return hopVerdict{}, false
	}
	verdict := hopVerdict{hops: t.hops, lengths: h.lengths, more: h.more}
	h.finish()
	if !h.differed {
		return hopVerdict{}, false
	}
	slices.Sort(verdict.lengths)
	return verdict, true
}

// note takes note of a length of the chain.
func (h *hopCheck) note(length int) {
	switch {
	case slices.Contains(h.lengths, length):
	case len(h.lengths) < hopCheckLengths:
		h.lengths = append(h.lengths, length)
	default:
		h.more = true
	}
}

// finish ends the check and lets go of what it has seen.
func (h *hopCheck) finish() {
	h.read, h.left, h.lengths = netip.Addr{}, netip.Addr{}, nil
	h.finished.Store(true)
}
