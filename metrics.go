package tieredlimit

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// outcome is what became of a request at a stack.
type outcome uint8

const (
	outcomeServed outcome = iota
	outcomeRefused
	outcomeDryRefused
	outcomeExempt
	outcomePreflight
	outcomeInert
	outcomeStoreError
	outcomeTooEarly
	outcomes
)

var outcomeNames = [outcomes]string{
	"served", "refused", "dry_refused", "exempt", "preflight", "inert", "store_error", "too_early",
}

// String is the outcome as metrics and access logs name it.
func (o outcome) String() string { return outcomeNames[o] }

// counted tells whether the tiers were asked about the request.
func (o outcome) counted() bool {
	return o == outcomeServed || o == outcomeRefused || o == outcomeDryRefused
}

// gravity ranks outcomes by how much they tell about a request that met several stacks.
func (o outcome) gravity() int {
	return [outcomes]int{
		outcomeInert: 0, outcomeExempt: 1, outcomePreflight: 1, outcomeServed: 2, outcomeDryRefused: 3,
		outcomeTooEarly: 4, outcomeStoreError: 5, outcomeRefused: 6,
	}[o]
}

// meters are the counts of all stacks of the process, by label. They outlive a reload that keeps the stack.
var meters = caddy.NewUsagePool()

// stackMeter counts what became of the requests of one stack. Its size depends on the configuration alone.
type stackMeter struct {
	label     string
	requests  [outcomes]atomic.Int64
	fallbacks [clientip.Reasons]atomic.Int64

	mu       sync.Mutex
	counting map[string][]*Handler // that have opened counters, by the name of their store
}

// tierMeter counts the refusals and skips of one tier.
type tierMeter struct {
	stack, tier string
	refusals    [2]atomic.Int64 // real, dry
	skipped     atomic.Int64
	uncertain   atomic.Int64
	worst       sketch
	announced   announcements
}

func (m *stackMeter) count(o outcome) { m.requests[o].Add(1) }

func (m *stackMeter) fallback(reason clientip.Reason) { m.fallbacks[reason].Add(1) }

// attach makes known that a handler of the stack has opened counters.
func (m *stackMeter) attach(store string, h *Handler) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.counting == nil {
		m.counting = make(map[string][]*Handler)
	}
	m.counting[store] = append(m.counting[store], h)
}

// detach makes known that they are about to be closed.
func (m *stackMeter) detach(store string, h *Handler) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := slices.Index(m.counting[store], h); i >= 0 {
		m.counting[store] = slices.Delete(m.counting[store], i, i+1)
	}
}

// latest are the counters that the stack has opened last, of each store. Those before them are the same ones, or those
// of a configuration that is on its way out.
func (m *stackMeter) latest() []Counters {
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []Counters
	for _, handlers := range m.counting {
		if n := len(handlers); n > 0 {
			list = append(list, handlers[n-1].counters)
		}
	}
	return list
}

// held sums up what the stack's counters tell of themselves.
type held struct {
	tracked, overflowed, remembered int64
	tracks                          bool // the first two are known
	away                            bool // a store cannot be reached
}

func (m *stackMeter) held() held {
	var sum held
	for _, c := range m.latest() {
		if t, ok := c.(Tracker); ok {
			sum.tracks = true
			sum.tracked += t.Tracked()
			sum.overflowed += t.Overflowed()
		}
		if r, ok := c.(Rememberer); ok {
			sum.remembered += r.Remembered()
		}
		if c, ok := c.(Connector); ok {
			sum.away = sum.away || c.Away() != nil
		}
	}
	return sum
}

func (m *tierMeter) refused(dry bool) {
	if dry {
		m.refusals[1].Add(1)
	} else {
		m.refusals[0].Add(1)
	}
}

func (m *tierMeter) skip() { m.skipped.Add(1) }

// openMeters takes the meters of the handler's stack and tiers, and makes them known to Caddy's registry.
func (h *Handler) openMeters(ctx caddy.Context) error {
	loaded, _ := meters.LoadOrStore(h.stackLabel, &stackMeter{label: h.stackLabel})
	h.meter = loaded.(*stackMeter)
	for _, t := range h.tiers {
		key := stackTier{h.stackLabel, t.name}
		loaded, _ := meters.LoadOrStore(key, &tierMeter{stack: h.stackLabel, tier: t.name})
		t.meter = loaded.(*tierMeter)
	}
	if registry := ctx.GetMetricsRegistry(); registry != nil {
		return registerOnce(registry, collector{})
	}
	return nil
}

// closeMeters returns what openMeters took.
func (h *Handler) closeMeters() error {
	if h.meter == nil {
		return nil
	}
	if _, err := meters.Delete(h.stackLabel); err != nil {
		return err
	}
	for _, t := range h.tiers {
		if _, err := meters.Delete(stackTier{h.stackLabel, t.name}); err != nil {
			return err
		}
	}
	return nil
}

// registerOnce registers a collector that another handler of the configuration may have registered before.
func registerOnce(registry *prometheus.Registry, c prometheus.Collector) error {
	err := registry.Register(c)
	if _, already := err.(prometheus.AlreadyRegisteredError); already {
		return nil
	}
	return err
}

// collector reports all meters to Prometheus.
type collector struct{}

var (
	requestsDesc = prometheus.NewDesc("caddy_tiered_limit_requests_total",
		"Requests that met a stack, by what became of them.", []string{"stack", "outcome"}, nil)
	refusalsDesc = prometheus.NewDesc("caddy_tiered_limit_refusals_total",
		"Requests that a tier refused, or would have refused in a dry run.", []string{"stack", "tier", "dry_run"}, nil)
	skippedDesc = prometheus.NewDesc("caddy_tiered_limit_skipped_total",
		"Requests that a tier did not limit because every key was empty.", []string{"stack", "tier"}, nil)
	uncertainDesc = prometheus.NewDesc("caddy_tiered_limit_uncertain_total",
		"Requests that a tier counted together because servers would not agree on their key.", []string{"stack", "tier"}, nil)
	fallbackDesc = prometheus.NewDesc("caddy_tiered_limit_client_fallback_total",
		"Requests counted for the peer because the forwarding chain could not be used, or the peer is not trusted.", []string{"stack", "reason"}, nil)
	countersDesc = prometheus.NewDesc("caddy_tiered_limit_counters",
		"Counters held in the current windows, where the store can tell.", []string{"stack"}, nil)
	overflowDesc = prometheus.NewDesc("caddy_tiered_limit_overflow_total",
		"Hits counted together with others of their network for want of room, where the store can tell.", []string{"stack"}, nil)
	decisionDesc = prometheus.NewDesc("caddy_tiered_limit_decision_seconds",
		"How long the store took to decide: each decision of a remote store, a sample of one in 64 of another.",
		[]string{"store"}, nil)
	storeErrorsDesc = prometheus.NewDesc("caddy_tiered_limit_store_errors_total",
		"Decisions that the store could not make, by the kind of failure.", []string{"store", "kind"}, nil)
	storeAwayDesc = prometheus.NewDesc("caddy_tiered_limit_store_away",
		"Whether the stack's store is not asked at present since it cannot be reached: 1 or 0.", []string{"stack"}, nil)
	localRefusalsDesc = prometheus.NewDesc("caddy_tiered_limit_local_refusals_total",
		"Requests refused again from memory, without asking the remote store.", []string{"stack"}, nil)
)

// Describe sends the descriptions of all metrics.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		requestsDesc, refusalsDesc, skippedDesc, uncertainDesc, fallbackDesc, countersDesc, overflowDesc, decisionDesc,
		storeErrorsDesc, storeAwayDesc, localRefusalsDesc,
	} {
		ch <- desc
	}
}

// Collect sends the current counts.
func (collector) Collect(ch chan<- prometheus.Metric) {
	send := func(desc *prometheus.Desc, value int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), labels...)
	}
	meters.Range(func(_, value any) bool {
		switch m := value.(type) {
		case *stackMeter:
			m.collect(ch, send)
		case *storeMeter:
			ch <- m.histogram()
			for i, kind := range m.kinds {
				send(storeErrorsDesc, m.failures[i].Load(), m.store, kind)
			}
		case *tierMeter:
			send(refusalsDesc, m.refusals[0].Load(), m.stack, m.tier, "false")
			send(refusalsDesc, m.refusals[1].Load(), m.stack, m.tier, "true")
			send(skippedDesc, m.skipped.Load(), m.stack, m.tier)
			send(uncertainDesc, m.uncertain.Load(), m.stack, m.tier)
		}
		return true
	})
}

// collect sends the counts of one stack.
func (m *stackMeter) collect(ch chan<- prometheus.Metric, send func(*prometheus.Desc, int64, ...string)) {
	for o := range outcomes {
		send(requestsDesc, m.requests[o].Load(), m.label, o.String())
	}
	for reason := clientip.None + 1; reason < clientip.Reasons; reason++ {
		send(fallbackDesc, m.fallbacks[reason].Load(), m.label, reason.String())
	}
	sum := m.held()
	send(localRefusalsDesc, sum.remembered, m.label)
	away := 0.0
	if sum.away {
		away = 1
	}
	ch <- prometheus.MustNewConstMetric(storeAwayDesc, prometheus.GaugeValue, away, m.label)
	if sum.tracks {
		ch <- prometheus.MustNewConstMetric(countersDesc, prometheus.GaugeValue, float64(sum.tracked), m.label)
		send(overflowDesc, sum.overflowed, m.label)
	}
}

// Interface guards
var _ prometheus.Collector = collector{}
