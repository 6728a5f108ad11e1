package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// client is the client of a link, with hold of its connections: where it cannot end by itself, or has failed in a way
// that it was not made for, they are closed under it.
type client struct {
	rueidis.Client
	conns *connections
}

// closePatience is how long a client may take to end by itself.
const closePatience = 2 * time.Second

var errNotConnected = errors.New("connecting took too long")

// newClient makes a client, which connects at once. However that ends, it does so within the time for each address
// and one more.
func newClient(s *setup) (rueidis.Client, error) {
	conns := &connections{open: make(map[*guard]struct{})}
	option := s.option
	option.DialCtxFn = conns.dial(s)
	limit := time.AfterFunc(time.Duration(len(option.InitAddress)+1)*dialTimeout, conns.close)
	c := &client{conns: conns}
	var err error
	if failure := shielded(func() { c.Client, err = rueidis.NewClient(option) }); failure != nil {
		err = failure
	}
	if !limit.Stop() && err == nil {
		err = errNotConnected
	}
	if err == nil {
		return c, nil
	}
	if c.Client != nil {
		c.Close()
	}
	conns.close()
	return nil, err
}

// Close ends the client, soon.
func (c *client) Close() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = shielded(c.Client.Close)
	}()
	patience := time.NewTimer(closePatience)
	defer patience.Stop()
	select {
	case <-done:
	case <-patience.C:
	}
	c.conns.close()
}

// shielded calls a function of the client's, which takes what servers say of themselves for well-formed, and panics if
// it is not.
func shielded(call func()) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = &brokenError{cause: cause}
		}
	}()
	call()
	return nil
}

// brokenError tells that the client has failed in a way that it was not made for, and may be of no use any more.
type brokenError struct{ cause any }

func (e *brokenError) Error() string {
	return fmt.Sprintf("the server's answer cannot be understood: %v", e.cause)
}

// connections are those of one client.
type connections struct {
	mu     sync.Mutex
	open   map[*guard]struct{}
	closed bool
}

// dial connects as the setup says, and guards the connection.
func (c *connections) dial(s *setup) func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) {
	return func(ctx context.Context, target string, dialer *net.Dialer, config *tls.Config) (net.Conn, error) {
		if c.over() {
			return nil, errRedisClosed
		}
		conn, err := s.option.DialCtxFn(ctx, target, dialer, config)
		if err != nil {
			return nil, err
		}
		g := newGuard(conn, s.mode, c.forget)
		if !c.keep(g) {
			g.Close()
			return nil, errRedisClosed
		}
		return g, nil
	}
}

func (c *connections) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// keep takes hold of a connection, unless all have been closed.
func (c *connections) keep(g *guard) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.open[g] = struct{}{}
	}
	return !c.closed
}

// forget lets go of a connection.
func (c *connections) forget(g *guard) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, g)
}

// close closes all connections, and all that are still to come.
func (c *connections) close() {
	c.mu.Lock()
	open := c.open
	c.open, c.closed = nil, true
	c.mu.Unlock()
	for g := range open {
		g.Close()
	}
}

// Interface guards
var (
	_ rueidis.Client = (*client)(nil)
	_ error          = (*brokenError)(nil)
)
