package redis

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/rueidis"
	"go.uber.org/zap"
)

// link is the connection that all stacks with one setup share. It connects at the first decision.
type link struct {
	setup  *setup
	logger atomic.Pointer[zap.Logger] // of the latest configuration
	client atomic.Pointer[rueidis.Client]
	turns  chan struct{} // holds one for each command under way
	limit  atomic.Pointer[deadline]

	ctx  context.Context // ends with the link
	stop context.CancelFunc

	mu      sync.Mutex
	dialing *dialing
	closed  bool
	stacks  map[string]*sharedStack
	breaker *breaker // shared by all stacks, but for a cluster, whose nodes fail one by one
}

// dialing is an attempt to connect. The error may be read when done is closed.
type dialing struct {
	done chan struct{}
	err  error
}

var (
	errRedisClosed   = errors.New("the connection is closed")
	errRedisOverload = errors.New("too many decisions are waiting for the server")
	errRedisAway     = errors.New("not tried, after repeated failures")
)

// mostTurns keeps the queue of a connection from filling up, which would block beyond any deadline. The rest of
// the queue is for commands that were given up and are not yet answered.
const mostTurns = 3 << (queueScale - 2)

// links are the links in use, by the digest of their setup.
var links = caddy.NewUsagePool()

// takeLink returns the link with a setup, and counts the caller as a user of it.
func takeLink(setup *setup, logger *zap.Logger) (*link, error) {
	value, _, err := links.LoadOrNew(setup.digest, func() (caddy.Destructor, error) {
		l := &link{setup: setup, stacks: make(map[string]*sharedStack), turns: make(chan struct{}, mostTurns)}
		l.ctx, l.stop = context.WithCancel(context.Background())
		return l, nil
	})
	if err != nil {
		return nil, err
	}
	l := value.(*link)
	l.logger.Store(logger)
	return l, nil
}

// leave takes back one use. The last one closes the connection.
func (l *link) leave() error {
	_, err := links.Delete(l.setup.digest)
	return err
}

// Destruct closes the connection.
func (l *link) Destruct() error {
	l.stop()
	l.mu.Lock()
	l.closed = true
	client := l.client.Swap(nil)
	l.mu.Unlock()
	if client != nil {
		(*client).Close()
	}
	return nil
}

// deadline ends what was begun within a short time. To make one for each decision would cost more than all else
// that a decision costs here.
type deadline struct {
	context.Context
	cancel context.CancelFunc
	from   time.Duration // on the monotonic clock of this process
}

// deadlines is how many deadlines are made within a timeout, so that a decision has at most one part less.
const deadlines = 16

// deadline returns a deadline that is no later than the timeout from now. It does not end with the request: its client
// may be gone, but the decision is under way and says something about the server.
func (l *link) deadline() context.Context {
	now := monotonic()
	known := l.limit.Load()
	if known != nil && now-known.from < l.setup.timeout/deadlines {
		return known
	}
	next := &deadline{from: now}
	next.Context, next.cancel = context.WithTimeout(l.ctx, l.setup.timeout)
	if l.limit.CompareAndSwap(known, next) {
		return next
	}
	next.cancel()
	if known = l.limit.Load(); now-known.from < l.setup.timeout/deadlines {
		return known
	}
	return l.deadline()
}

// run runs a script, within the deadline.
func (l *link) run(ctx context.Context, s script, keys []string, arg string) (rueidis.RedisResult, error) {
	client, err := l.ready(ctx)
	if err != nil {
		return rueidis.RedisResult{}, err
	}
	select {
	case l.turns <- struct{}{}:
	case <-ctx.Done():
		return rueidis.RedisResult{}, errRedisOverload
	}
	if l.setup.mode == modeSingle {
		return l.runHere(ctx, client, s, keys, arg)
	}
	return l.runApart(ctx, client, s, keys, arg)
}

// runHere runs a script and gives back the turn, whatever becomes of it.
func (l *link) runHere(ctx context.Context, client rueidis.Client, s script, keys []string, arg string) (
	result rueidis.RedisResult, err error,
) {
	defer func() {
		<-l.turns
		if cause := recover(); cause != nil {
			err = &brokenError{cause: cause}
			l.discard(client)
		}
	}()
	result = s.run(ctx, client, keys, arg)
	return result, result.Error()
}

// discard lets go of a client that is of no use any more.
func (l *link) discard(client rueidis.Client) {
	if known := l.client.Load(); known != nil && *known == client && l.client.CompareAndSwap(known, nil) {
		go client.Close()
	}
}

// runApart is run for clients that look for another server when theirs is lost: a command may have to wait for that,
// and does not mind its deadline then.
func (l *link) runApart(ctx context.Context, client rueidis.Client, s script, keys []string, arg string) (
	rueidis.RedisResult, error,
) {
	type outcome struct {
		result rueidis.RedisResult
		err    error
	}
	answer := make(chan outcome, 1)
	go func() {
		var o outcome
		o.result, o.err = l.runHere(ctx, client, s, keys, arg)
		answer <- o
	}()
	select {
	case o := <-answer:
		return o.result, o.err
	case <-ctx.Done():
		return rueidis.RedisResult{}, ctx.Err()
	}
}

// ready returns the client, and waits for it up to the deadline if there is none yet.
func (l *link) ready(ctx context.Context) (rueidis.Client, error) {
	if client := l.client.Load(); client != nil {
		return *client, nil
	}
	d, err := l.dial()
	if err != nil {
		return nil, err
	}
	select {
	case <-d.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if d.err != nil {
		return nil, &dialError{err: d.err}
	}
	if client := l.client.Load(); client != nil {
		return *client, nil
	}
	return nil, errRedisClosed
}

// connected is an attempt to connect that has succeeded.
var connected = func() *dialing {
	d := &dialing{done: make(chan struct{})}
	close(d.done)
	return d
}()

// dial begins to connect, or joins the attempt that is under way. The attempt does not end with its first caller. One
// that has succeeded since the caller looked for a client is not repeated: a second client would end the first one under
// those whose commands it carries.
func (l *link) dial() (*dialing, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, errRedisClosed
	case l.client.Load() != nil:
		return connected, nil
	case l.dialing != nil:
		return l.dialing, nil
	}
	d := &dialing{done: make(chan struct{})}
	l.dialing = d
	go func() {
		client, err := newClient(l.setup)
		l.mu.Lock()
		defer l.mu.Unlock()
		d.err = err
		if err == nil {
			l.install(client)
		}
		l.dialing = nil
		close(d.done)
	}()
	return d, nil
}

// install replaces the client. The mutex must be held.
func (l *link) install(client rueidis.Client) {
	if l.closed {
		go client.Close()
		return
	}
	if old := l.client.Swap(&client); old != nil {
		go (*old).Close()
	}
}

// dialError is a failure to connect, after which others need not try at once.
type dialError struct{ err error }

func (e *dialError) Error() string { return "connecting: " + e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// demoted tells whether an error comes from a server that is no longer the one to write to. The name in a
// configuration may lead to another one by now.
func demoted(err error) bool {
	failure, ok := rueidis.IsRedisErr(err)
	return ok && strings.HasPrefix(failure.Error(), "READONLY")
}

// Interface guards
var (
	_ caddy.Destructor = (*link)(nil)
	_ error            = (*dialError)(nil)
)
