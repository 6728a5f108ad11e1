package tieredlimit

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// eventSink is an event handler that collects what it is told.
type eventSink struct {
	Sink string `json:"sink"`
}

var eventSinks sync.Map // of *eventList by name

type eventList struct {
	mu   sync.Mutex
	data []map[string]any
}

func init() { caddy.RegisterModule(eventSink{}) }

func (eventSink) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.tiered_limit_test", New: func() caddy.Module { return new(eventSink) }}
}

func (s eventSink) Handle(_ context.Context, event caddy.Event) error {
	list, _ := eventSinks.Load(s.Sink)
	l := list.(*eventList)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.data = append(l.data, event.Data)
	return nil
}

func (l *eventList) take() []map[string]any {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := l.data
	l.data = nil
	return taken
}

// newEventEdge provisions a site with a stack, and a subscription of its module to its event.
func newEventEdge(t *testing.T, block string) (*edge, *eventList) {
	t.Helper()
	list := new(eventList)
	eventSinks.Store(t.Name(), list)
	config := adapt(t, ":8080 {\ntiered_limit "+block+"\nrespond ok\n}")
	config = append(config[:len(config)-2], fmt.Sprintf(`,"events":{"subscriptions":[{"events":["tiered_limit_refused"],`+
		`"modules":["http.handlers.tiered_limit"],"handlers":[{"handler":"tiered_limit_test","sink":%q}]}]}}}`, t.Name())...)
	e := newEdgeJSON(t, config)
	app, err := e.ctx.App("events")
	require.NoError(t, err)
	require.NoError(t, app.(caddy.App).Start())
	return e, list
}

func TestEventOncePerIdentityAndWindow(t *testing.T) {
	e, events := newEventEdge(t, "ev {\ntrusted_hops 1\nevents\ntier ip 2/s 5/m\ntier dry 1/m {\nkey {http.tiered_limit.client_ip}\ndry_run\n}\n}")
	e.clock.advance(500 * time.Millisecond)
	e.served(10, from("203.0.113.7"))
	assert.Equal(t, []map[string]any{{"stack": "ev", "tier": "ip", "retry_after": int64(1)}}, events.take())
	e.served(10, from("203.0.113.8"))
	assert.Len(t, events.take(), 1, "another client")
	e.clock.advance(time.Second)
	e.served(10, from("203.0.113.7"))
	assert.Len(t, events.take(), 1, "another window")
	e.clock.advance(time.Second)
	e.served(10, from("203.0.113.7"))
	assert.Equal(t, []map[string]any{{"stack": "ev", "tier": "ip", "retry_after": int64(58)}}, events.take(), "the other limit")
	for range 20 {
		e.clock.advance(time.Second)
		e.served(10, from("203.0.113.7"))
	}
	assert.Empty(t, events.take(), "its window has not ended")
	assert.Positive(t, e.metric(`refusals_total{dry_run="true",stack="ev",tier="dry"}`))
}

func TestEventNamesNobodyUnlessAllowed(t *testing.T) {
	block := func(more string) string {
		return "ev-keys {\ntrusted_hops 0\nevents\n" + more + "\ntier ip 1/m\ntier who 1/m {\nkey {http.request.header.X-Key}\n}\n}"
	}
	t.Run("allowed", func(t *testing.T) {
		e, events := newEventEdge(t, block("log_keys"))
		e.served(2, request{})
		assert.Equal(t, []map[string]any{{
			"stack": "ev-keys", "tier": "ip", "retry_after": int64(60), "key": []string{"203.0.113.1"}, "client_ip": "203.0.113.1",
		}}, events.take())
		e.close()
		e.app.handlers = nil
	})
	t.Run("not", func(t *testing.T) {
		e, events := newEventEdge(t, block(""))
		e.served(2, request{})
		assert.Equal(t, []map[string]any{{"stack": "ev-keys", "tier": "ip", "retry_after": int64(60)}}, events.take())
	})
}

func TestNoEventUnlessAskedFor(t *testing.T) {
	e, events := newEventEdge(t, "ev-off {\ntrusted_hops 0\ntier ip 1/m\n}")
	e.served(5, request{})
	assert.Empty(t, events.take())
	e, events = newEventEdge(t, "ev-dry {\ntrusted_hops 0\nevents\ndry_run\ntier ip 1/m\n}")
	assert.Equal(t, 5, e.served(5, request{}))
	assert.Empty(t, events.take(), "nobody was refused")
}

func TestEventOnceAcrossAReload(t *testing.T) {
	const block = "ev-reload {\ntrusted_hops 0\nevents\ntier ip 1/m\n}"
	e, events := newEventEdge(t, block)
	e.served(3, request{})
	require.Len(t, events.take(), 1)
	again, events := newEventEdge(t, block)
	again.clock.set(e.clock.now())
	assert.Equal(t, 0, again.served(3, request{}))
	assert.Empty(t, events.take())
}

func TestAnnouncementsAreBounded(t *testing.T) {
	var a announcements
	now := testStart.UnixMilli()
	end := now + 60_000
	identity := func(i int) []byte { return []byte(fmt.Sprint("client", i)) }
	for i := range 2 * maxAnnouncements {
		got := a.add(identity(i), time.Minute, now, end)
		want := announceNow
		if i >= maxAnnouncements {
			want = announceFull
		}
		require.Equal(t, want, got, i)
	}
	assert.Equal(t, announceNot, a.add(identity(0), time.Minute, now, end))
	assert.Equal(t, announceFull, a.add(identity(0), time.Second, now, now+1000), "a window of another length")
	assert.Equal(t, announceNow, a.add(identity(0), time.Minute, end, end+60_000), "its window has ended")
	assert.Equal(t, announceNow, a.add(identity(maxAnnouncements), time.Minute, end, end+60_000), "the others are forgotten")
	assert.Len(t, a.ends, 2)
}

func TestEventsThatHaveNoRoomAreReportedOnce(t *testing.T) {
	e, events := newEventEdge(t, "ev-full {\ntrusted_hops 1\nevents\ntier ip 1/m\n}")
	for i := range maxAnnouncements + 50 {
		e.served(2, from(fmt.Sprintf("10.1.%d.%d", i>>8, i&255)))
	}
	assert.Len(t, events.take(), maxAnnouncements)
	lines := e.logs.lines("warn", "more clients are refused within one window than events are emitted for")
	require.Len(t, lines, 1)
	assert.NotContains(t, e.logs.text(), "10.1.")
}

func TestEventsAreConcurrent(t *testing.T) {
	e, events := newEventEdge(t, "ev-many {\ntrusted_hops 1\nevents\ntier ip 1/m\n}")
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for i := range 40 {
				e.served(3, from(fmt.Sprintf("10.2.0.%d", i)))
			}
		})
	}
	group.Wait()
	assert.Len(t, events.take(), 40)
}
