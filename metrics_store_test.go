package tieredlimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDecisionBuckets(t *testing.T) {
	for i := range decisionBuckets {
		bound := firstDecisionBound << i
		assert.Equal(t, i, decisionBucket(bound), "at a bound")
		assert.Equal(t, i+1, decisionBucket(bound+1), "above a bound")
	}
	assert.Equal(t, 0, decisionBucket(0))
	assert.Equal(t, decisionBuckets, decisionBucket(time.Hour))
	assert.InDelta(t, 1.05, (firstDecisionBound << (decisionBuckets - 1)).Seconds(), 0.01)
}

func TestStoreMeterHistogram(t *testing.T) {
	m := newStoreMeter("test", nil)
	for _, took := range []time.Duration{-time.Second, 250, 251, time.Millisecond, time.Minute} {
		m.observe(took)
	}
	var got dto.Metric
	require.NoError(t, m.histogram().Write(&got))
	h := got.GetHistogram()
	assert.Equal(t, uint64(5), h.GetSampleCount())
	assert.InDelta(t, 60.001000501, h.GetSampleSum(), 1e-9)
	counts := make(map[float64]uint64)
	for _, b := range h.GetBucket() {
		counts[b.GetUpperBound()] = b.GetCumulativeCount()
	}
	assert.Len(t, counts, decisionBuckets)
	assert.Equal(t, uint64(2), counts[250e-9])
	assert.Equal(t, uint64(3), counts[500e-9])
	assert.Equal(t, uint64(4), counts[0.001024])
}

// Whatever a store calls its failures, the number of series is known beforehand.
func TestStoreMeterFailures(t *testing.T) {
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprint("kind", i))
	}
	for name, c := range map[string]struct {
		kinds, want []string
	}{
		"none":       {nil, []string{"canceled", "other"}},
		"some":       {[]string{"away", "timeout"}, []string{"away", "timeout", "canceled", "other"}},
		"ours too":   {[]string{"other", "canceled", "away", "away"}, []string{"canceled", "away", "other"}},
		"far enough": {many, append(append([]string(nil), many[:16]...), "canceled", "other")},
	} {
		t.Run(name, func(t *testing.T) {
			m := newStoreMeter("test", c.kinds)
			assert.Equal(t, c.want, m.kinds)
			m.failed("never heard of")
			m.failed("other")
			m.failed(c.want[0])
			assert.Equal(t, int64(2), m.failures[len(m.kinds)-1].Load())
			assert.Equal(t, int64(1), m.failures[0].Load())
		})
	}
	assert.Equal(t, "canceled", failureKind(fmt.Errorf("waiting: %w", context.Canceled)))
	assert.Equal(t, "timeout", failureKind(fmt.Errorf("asking: %w", &UnavailableError{Kind: "timeout"})))
	assert.Equal(t, "canceled", failureKind(&UnavailableError{Kind: "timeout", Err: context.Canceled}))
	assert.Equal(t, "other", failureKind(errors.New("broken")))
}

// family is what a scrape says of a metric.
func (e *edge) family(name string) *dto.MetricFamily {
	e.t.Helper()
	families, err := e.ctx.GetMetricsRegistry().Gather()
	require.NoError(e.t, err)
	for _, f := range families {
		if f.GetName() == "caddy_tiered_limit_"+name {
			return f
		}
	}
	return nil
}

// decisions is how many decisions of a store were measured.
func (e *edge) decisions(store string) uint64 {
	for _, m := range e.family("decision_seconds").GetMetric() {
		if m.GetLabel()[0].GetValue() == store {
			return m.GetHistogram().GetSampleCount()
		}
	}
	return 0
}

func TestMetricsOfTheMemoryStore(t *testing.T) {
	const site = ":8080 {\ntiered_limit held {\ntrusted_hops 1\ntier ip 1/m\ntier global 100000/m\nstore memory {\nmax_keys 10\n}\n}\nrespond ok\n}"
	e := newEdge(t, site)
	before := e.decisions("memory")
	for i := range 500 {
		e.send(from(fmt.Sprintf("%d.%d.113.1", 1+i%200, i/200)))
	}
	check := func() {
		t.Helper()
		assert.Equal(t, float64(11), e.metric(`counters{stack="held"}`), "ten clients, and one bucket for all")
		assert.Greater(t, e.metric(`overflow_total{stack="held"}`), float64(0))
		assert.Equal(t, float64(0), e.metric(`local_refusals_total{stack="held"}`))
		assert.Equal(t, float64(0), e.metric(`store_errors_total{kind="other",store="memory"}`))
		assert.Equal(t, float64(0), e.metric(`store_errors_total{kind="canceled",store="memory"}`))
	}
	check()
	overflow := e.metric(`overflow_total{stack="held"}`)
	measured := e.decisions("memory") - before
	assert.Less(t, measured, uint64(250), "a sample")

	for range 3 { // both configurations count the same while they overlap
		e.reload(site)
		check()
		assert.Equal(t, overflow, e.metric(`overflow_total{stack="held"}`))
	}
	e.handlers()[0].sampling = 0
	before = e.decisions("memory")
	e.send(from("198.51.100.1"))
	assert.Equal(t, before+1, e.decisions("memory"))
	e.clock.advance(time.Minute)
	e.send(from("198.51.100.1"))
	assert.Equal(t, float64(2), e.metric(`counters{stack="held"}`), "those of the window before are forgotten")
}

// A flood from one network leaves room for others: their clients are limited one by one, also those of a network in which
// somebody is over the limit.
func TestAFloodFromOneNetworkLeavesRoom(t *testing.T) {
	e := newEdge(t, ":8080 {\ntiered_limit one-network {\ntrusted_hops 1\ntier ip 2/m\nstore memory {\nmax_keys 4000\n}\n}\nrespond ok\n}")
	served := 0
	for i := range 8000 {
		served += e.served(1, from(fmt.Sprintf("2001:db8:%x:%x::1", i>>8, i&0xff)))
	}
	assert.Equal(t, 1000+2, served, "a quarter of the counters, and what the network has together")
	assert.Equal(t, 2, e.served(50, from("198.51.7.7")))
	for i := range 200 {
		assert.Equal(t, 2, e.served(3, from(fmt.Sprintf("198.51.100.%d", i))))
	}
}

func TestMetricsOfAStoreThatIsAway(t *testing.T) {
	site := func(name, onError string) string {
		return ":8080 {\ntiered_limit " + name + " {\ntrusted_hops 0\ntier ip 3/m\nstore redis {\naddress " + freeAddress(t) +
			"\non_error " + onError + "\n}\n}\nrespond ok\n}"
	}
	for _, c := range []struct {
		onError string
		status  int
		outcome string
	}{
		{"deny", http.StatusServiceUnavailable, "store_error"},
		{"allow", http.StatusOK, "store_error"},
		{"local", http.StatusOK, "served"},
	} {
		t.Run(c.onError, func(t *testing.T) {
			e := newEdge(t, site("meter-"+c.onError, c.onError))
			assert.Equal(t, []int{c.status, c.status, c.status}, e.statuses(3, request{}))
			sum := float64(0)
			var kinds []string
			for _, m := range e.family("store_errors_total").GetMetric() {
				labels := m.GetLabel()
				if labels[1].GetValue() == "redis" {
					kinds = append(kinds, labels[0].GetValue())
					sum += m.GetCounter().GetValue()
				}
			}
			assert.Equal(t, []string{"away", "canceled", "connect", "network", "other", "overload", "server", "timeout"}, kinds)
			assert.Equal(t, float64(3), sum, "counted even where the store decides by other means")
			assert.Equal(t, float64(3), e.metric(`requests_total{outcome="`+c.outcome+`",stack="meter-`+c.onError+`"}`))
			assert.Equal(t, uint64(3), e.decisions("redis"), "each decision is measured")
			assert.Equal(t, float64(-1), e.metric(`counters{stack="meter-`+c.onError+`"}`), "Redis cannot tell")
			e.close() // and forget the counts
			e.app.handlers = nil
		})
	}
}

// The number of series depends on the config alone.
func TestMetricSeriesAreConstant(t *testing.T) {
	e := newEdge(t, ":8080 {\ntiered_limit series {\ntrusted_hops 1\nlog_keys\nevents\ntier ip 1/m\ntier key 1/m {\nkey {http.request.header.X-Key}\n}\n}\nrespond ok\n}")
	series := func() int {
		families, err := e.ctx.GetMetricsRegistry().Gather()
		require.NoError(t, err)
		n := 0
		for _, f := range families {
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if strings.HasPrefix(f.GetName(), "caddy_tiered_limit_") && l.GetName() == "stack" && l.GetValue() == "series" {
						n++
					}
				}
			}
		}
		return n
	}
	before := series()
	assert.Equal(t, 8+5+2*4+4, before, "outcomes, fallbacks, tiers, and what the stack holds")
	for i := range 2000 {
		e.send(from(fmt.Sprintf("10.1.%d.%d", i/200, i%200), "X-Key", fmt.Sprint("key", i%1500)))
	}
	assert.Equal(t, before, series())
}

func TestCollectorDescribesWhatItCollects(t *testing.T) {
	newEdge(t, ":8080 {\ntiered_limit described {\ntrusted_hops 0\ntier ip 1/m\n}\n}")
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(collector{}))
	families, err := registry.Gather()
	require.NoError(t, err)
	assert.Len(t, families, 11)
}
