package redis

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// sharedStack is what all handles of one stack share in this process.
type sharedStack struct {
	link    *link
	prefix  string // of its keys
	breaker *breaker
	handles int // guarded by the link's mutex

	generation atomic.Int64 // the latest reset generation that was seen
	epoch      atomic.Int64 // grows when the generation changes
	refusals   atomic.Int64 // from memory
	ahead      atomic.Int64 // milliseconds that the server's clock is ahead of this process's, at the latest reply
}

// stack returns the stack whose keys have a prefix, and counts the caller as a user of it.
func (l *link) stack(prefix string) *sharedStack {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stacks[prefix]
	if s == nil {
		s = &sharedStack{link: l, prefix: prefix}
		if s.breaker = l.breaker; s.breaker == nil {
			s.breaker = newBreaker(l.ctx, func(ctx context.Context) error { return l.probe(ctx, prefix) })
			s.breaker.opened, s.breaker.healed = l.logOpened, l.logHealed
			if l.setup.mode != modeCluster {
				l.breaker = s.breaker
			}
		}
		l.stacks[prefix] = s
	}
	s.handles++
	return s
}

// leave takes back one use.
func (s *sharedStack) leave() {
	s.link.mu.Lock()
	defer s.link.mu.Unlock()
	if s.handles--; s.handles == 0 {
		delete(s.link.stacks, s.prefix)
		if s.link.setup.mode == modeCluster {
			s.breaker.stop()
		}
	}
}

// heard takes note of the generation in a reply. None is no news: it is forgotten after a while.
func (s *sharedStack) heard(generation int64) {
	if generation == 0 || s.generation.Load() == generation {
		return
	}
	s.generation.Store(generation)
	s.epoch.Add(1)
}

// probe decides a request of nobody's: it tells whether the script is there and the server can be written to.
func (l *link) probe(ctx context.Context, prefix string) error {
	err := l.tryProbe(ctx, prefix)
	if err == nil || !demoted(err) || l.setup.mode != modeSingle {
		return err
	}
	client, err := newClient(l.setup)
	if err != nil {
		return &dialError{err: err}
	}
	l.mu.Lock()
	l.install(client)
	l.mu.Unlock()
	return l.tryProbe(ctx, prefix)
}

// probe is what a probe asks the script.
var probe = modeTake + func() string {
	var t counterTier
	t.set("", store.TierSpec{Name: "probe", Limits: []store.Limit{{Count: math.MaxInt32, Window: time.Second}}})
	return t.spec
}()

// tryProbe asks twice: connecting anew and sending the script may take long, but an answer may take no longer than that
// to a decision. A server that is merely reached would have the breaker open again at once.
func (l *link) tryProbe(ctx context.Context, prefix string) error {
	connecting, cancel := context.WithTimeout(ctx, max(dialTimeout, l.setup.timeout))
	defer cancel()
	if err := l.askProbe(connecting, prefix); err != nil {
		return err
	}
	answering, cancel := context.WithTimeout(ctx, l.setup.timeout)
	defer cancel()
	return l.askProbe(answering, prefix)
}

func (l *link) askProbe(ctx context.Context, prefix string) error {
	keys := []string{prefix + "reset", prefix + "probe"}
	result, err := l.run(ctx, takeScript, keys, probe)
	if err != nil {
		return err
	}
	_, err = parseReply(result, 1)
	return err
}
