package tieredlimit

import (
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
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
	fallbacks [fallbackReasons]atomic.Int64
}

// tierMeter counts the refusals and skips of one tier.
type tierMeter struct {
	stack, tier string
	refusals    [2]atomic.Int64 // real, dry
	skipped     atomic.Int64
}

func (m *stackMeter) count(o outcome) { m.requests[o].Add(1) }

func (m *stackMeter) fallback(reason fallbackReason) { m.fallbacks[reason].Add(1) }

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
	fallbackDesc = prometheus.NewDesc("caddy_tiered_limit_client_fallback_total",
		"Requests counted for the peer because the forwarding chain could not be used.", []string{"stack", "reason"}, nil)
)

// Describe sends the descriptions of all metrics.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- requestsDesc
	ch <- refusalsDesc
	ch <- skippedDesc
	ch <- fallbackDesc
}

// Collect sends the current counts.
func (collector) Collect(ch chan<- prometheus.Metric) {
	send := func(desc *prometheus.Desc, value int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), labels...)
	}
	meters.Range(func(_, value any) bool {
		switch m := value.(type) {
		case *stackMeter:
			for o := range outcomes {
				send(requestsDesc, m.requests[o].Load(), m.label, o.String())
			}
			for reason := fallbackNone + 1; reason < fallbackReasons; reason++ {
				send(fallbackDesc, m.fallbacks[reason].Load(), m.label, reason.String())
			}
		case *tierMeter:
			send(refusalsDesc, m.refusals[0].Load(), m.stack, m.tier, "false")
			send(refusalsDesc, m.refusals[1].Load(), m.stack, m.tier, "true")
			send(skippedDesc, m.skipped.Load(), m.stack, m.tier)
		}
		return true
	})
}

// Interface guards
var _ prometheus.Collector = collector{}
