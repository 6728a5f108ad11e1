package tieredlimit

import (
	"context"
	"errors"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
)

// storeMeter counts, for all stacks of the process that use one kind of store, how long its decisions take and why it
// could not make some. Its size is fixed.
type storeMeter struct {
	store    string
	kinds    []string // of failures; the last one is for those that have no name here
	failures []atomic.Int64
	buckets  [decisionBuckets + 1]atomic.Int64 // the last one is for what took longer than all bounds
	nanos    atomic.Int64
}

// The upper bounds of the buckets are this one, doubled time and again: 250 ns, 500 ns, ... about 1 s.
const (
	firstDecisionBound = 250 * time.Nanosecond
	decisionBuckets    = 23
)

// sampleMask makes one in 64 decisions of a store in this process a measured one. Looking at the clock twice would be a
// tenth of such a decision. A store that connects is measured each time.
const sampleMask = 1<<6 - 1

const (
	failureCanceled = "canceled" // the client went away meanwhile
	failureOther    = "other"

	// maxFailureKinds is how many kinds of failure a store can have of its own.
	maxFailureKinds = 16
)

func newStoreMeter(store string, kinds []string) *storeMeter {
	m := &storeMeter{store: store}
	kinds = kinds[:min(len(kinds), maxFailureKinds)]
	for _, kind := range append(slices.Clone(kinds), failureCanceled) {
		if kind != failureOther && !slices.Contains(m.kinds, kind) {
			m.kinds = append(m.kinds, kind)
		}
	}
	m.kinds = append(m.kinds, failureOther)
	m.failures = make([]atomic.Int64, len(m.kinds))
	return m
}

// observe counts a decision by how long it took.
func (m *storeMeter) observe(took time.Duration) {
	took = max(took, 0)
	m.buckets[decisionBucket(took)].Add(1)
	m.nanos.Add(int64(took))
}

// decisionBucket is the first bucket whose bound is not below a duration.
func decisionBucket(took time.Duration) int {
	if took <= firstDecisionBound {
		return 0
	}
	return min(bits.Len64(uint64((took-1)/firstDecisionBound)), decisionBuckets)
}

// failed counts a decision that the store could not make. Kinds that it has not named beforehand count as other.
func (m *storeMeter) failed(kind string) {
	i := slices.Index(m.kinds, kind)
	if i < 0 {
		i = len(m.kinds) - 1
	}
	m.failures[i].Add(1)
}

// histogram is the durations as Prometheus wants them.
func (m *storeMeter) histogram() prometheus.Metric {
	var count uint64
	buckets := make(map[float64]uint64, decisionBuckets)
	for i := range m.buckets {
		count += uint64(m.buckets[i].Load())
		if i < decisionBuckets {
			buckets[(firstDecisionBound << i).Seconds()] = count
		}
	}
	return prometheus.MustNewConstHistogram(decisionDesc, count, time.Duration(m.nanos.Load()).Seconds(), buckets, m.store)
}

// storeLabel is the key of a store's meter among the meters.
type storeLabel string

// storeName is how metrics name a store: the last part of its module's ID.
func storeName(s Store) string {
	if m, ok := s.(caddy.Module); ok {
		return m.CaddyModule().ID.Name()
	}
	return "unknown"
}

// openStoreMeter takes the meter of the handler's store.
func (h *Handler) openStoreMeter(store Store) {
	var kinds []string
	if f, ok := h.counters.(Fallible); ok {
		kinds = f.FailureKinds()
	}
	name := storeName(store)
	loaded, _ := meters.LoadOrStore(storeLabel(name), newStoreMeter(name, kinds))
	h.storeMeter = loaded.(*storeMeter)
	h.sampling = sampleMask
	if _, remote := h.counters.(Connector); remote {
		h.sampling = 0
	}
	h.meter.attach(name, h)
}

// closeStoreMeter returns what openStoreMeter took.
func (h *Handler) closeStoreMeter() error {
	if h.storeMeter == nil {
		return nil
	}
	h.meter.detach(h.storeMeter.store, h)
	_, err := meters.Delete(storeLabel(h.storeMeter.store))
	return err
}

// take lets the store charge claims. It measures how long that takes, at each decision or at a random sample of them.
func (h *Handler) take(ctx context.Context, now time.Time, sc *scratch) (Decision, error) {
	measured := h.sampling == 0 || rand.Uint32()&h.sampling == 0
	var start time.Time
	if measured {
		start = time.Now()
	}
	decision, err := h.counters.Take(ctx, now, sc.claims)
	if measured {
		h.storeMeter.observe(time.Since(start))
	}
	if decision.Degraded != "" {
		h.storeMeter.failed(decision.Degraded)
	}
	return decision, err
}

// peek asks the store about claims, and charges nothing.
func (h *Handler) peek(ctx context.Context, now time.Time, sc *scratch) (Decision, error) {
	return h.counters.Peek(ctx, now, sc.claims)
}

// failureKind sorts the errors of a store.
func failureKind(err error) string {
	var away *UnavailableError
	switch {
	case errors.Is(err, context.Canceled):
		return failureCanceled
	case errors.As(err, &away):
		return away.Kind
	}
	return failureOther
}
