package redis

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"github.com/tieredlimit/caddy-tieredlimit/internal/resp"
)

// guard is a connection that ends when the other side sends what no server does: what is not RESP, a reply beyond
// bounds, one that nobody asked for, or one that the client cannot read.
//
// The client trusts what it is sent. It allocates whatever length it is told, follows any nesting, waits for the end of
// any line, and ends the process over a reply too many. Whatever listens at the address, or sits in between, must not be
// able to do that. So a guard judges all bytes before the client sees them, and passes on none of a read that
// it objects to. It stands above TLS.
//
// It knows the form of replies, not their truth: what a script returned is judged by who asked, and a server that names
// other servers is believed.
type guard struct {
	net.Conn
	asked    atomic.Int64  // commands that were sent, or are about to be
	out      resp.Commands // of the writer
	in       resp.Scanner  // of the reader, as is all below
	answered int64
	failure  error
	talk     *talk        // nil where nobody subscribes
	release  func(*guard) // called when it is closed
}

// Bounds of replies. The answers of scripts are below 200 bytes, and that to HELLO is below 1000 without modules.
var (
	replyBounds = resp.Bounds{Text: 64 << 10, Elements: 1024, Depth: 8, Total: 4096, Size: 256 << 10}

	// topologyBounds are enough for 16384 slots that are all apart, with three servers each.
	topologyBounds = resp.Bounds{Text: 64 << 10, Elements: 1 << 14, Depth: 8, Total: 1 << 19, Size: 16 << 20}
)

var (
	errUnasked  = errors.New("a reply that nobody asked for")
	errUnusable = errors.New("a reply that its command does not have")
	errPending  = errors.New("too many commands wait for a sentinel")
)

// newGuard guards a connection of a mode.
func newGuard(conn net.Conn, mode string, release func(*guard)) *guard {
	g := &guard{Conn: conn, release: release}
	g.in.Bounds = replyBounds
	if mode != modeSingle {
		g.in.Bounds = topologyBounds
	}
	if mode == modeSentinel {
		g.talk = new(talk)
	}
	return g
}

// Write counts the commands before it sends them.
func (g *guard) Write(p []byte) (int, error) {
	commands := int64(0)
	for rest := p; len(rest) > 0; {
		n, ended, err := g.out.Next(rest)
		if err != nil {
			return 0, fmt.Errorf("sending: %w", err)
		}
		own := ended
		if ended && g.talk != nil {
			if own, err = g.talk.sent(&g.out.Command); err != nil {
				return 0, err
			}
		}
		if own {
			commands++
		}
		rest = rest[n:]
	}
	g.asked.Add(commands)
	return g.Conn.Write(p)
}

// Read judges what has come before it passes it on. Having objected, it reads no more.
func (g *guard) Read(p []byte) (int, error) {
	if g.failure != nil {
		return 0, g.failure
	}
	n, err := g.Conn.Read(p)
	if failure := g.judge(p[:n]); failure != nil {
		g.failure = fmt.Errorf("the server sends what no Redis does: %w", failure)
		g.Close()
		return 0, g.failure
	}
	return n, err
}

// Close implements [net.Conn].
func (g *guard) Close() error {
	if g.release != nil {
		g.release(g)
	}
	return g.Conn.Close()
}

// judge looks at the replies in what has come.
func (g *guard) judge(p []byte) error {
	asked := g.asked.Load()
	for len(p) > 0 {
		n, ended, err := g.in.Next(p)
		if err != nil {
			return err
		}
		if p = p[n:]; !ended {
			break
		}
		if g.talk != nil {
			err = g.talk.heard(g, &g.in.Message, asked)
		} else if g.in.Message.Kind != '>' {
			err = g.answer(asked)
		} else if confirms(&g.in.Message) {
			err = errUnasked
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// answer counts a reply.
func (g *guard) answer(asked int64) error {
	if g.answered++; g.answered > asked {
		return errUnasked
	}
	return nil
}

// confirms reports whether a push says that a subscription has begun, which the client takes for a command's reply.
func confirms(m *resp.Message) bool {
	switch string(m.First()) {
	case "subscribe", "psubscribe", "ssubscribe":
		return m.Elements >= 2
	}
	return false
}

// ends reports whether a push says that a subscription has ended.
func ends(m *resp.Message) bool {
	switch string(m.First()) {
	case "unsubscribe", "punsubscribe", "sunsubscribe":
		return m.Elements >= 2
	}
	return false
}

// talk follows what the client and a sentinel or its master say to each other, as far as the client cannot cope with
// every reply: it reads elements that may not be there, and mistakes the replies to subscriptions for others.
type talk struct {
	mu      sync.Mutex
	next    [mostPending]pending // in the order sent
	first   int
	count   int
	sends   int64 // commands so far
	ping    bool  // the next command is the PING that follows an UNSUBSCRIBE, and they have one reply together
	resp3   bool  // HELLO 3 was sent
	listens bool  // something about subscriptions was sent
	more    int   // confirmations that may still come for the latest SUBSCRIBE
	pong    bool  // that of a refused UNSUBSCRIBE is still to come
}

// pending is a command whose reply is not any one.
type pending struct {
	number int64 // among the commands of the connection, from 1
	kind   pendingKind
	topics int
}

type pendingKind uint8

const (
	pendingRole pendingKind = iota + 1
	pendingAddress
	pendingSubscribe
	pendingUnsubscribe

	// mostPending is far more than are ever sent before the first is answered.
	mostPending = 64
)

// sent takes note of a command, and reports whether it has a reply of its own.
func (t *talk) sent(c *resp.Command) (own bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ping {
		t.ping = false
		return false, nil
	}
	t.sends++
	kind := pendingKind(0)
	switch string(c.Name()) {
	case "HELLO":
		t.resp3 = t.resp3 || string(c.Word()) == "3"
	case "ROLE":
		kind = pendingRole
	case "SENTINEL":
		if string(c.Word()) == "GET-MASTER-ADDR-BY-NAME" {
			kind = pendingAddress
		}
	case "SUBSCRIBE":
		kind, t.listens = pendingSubscribe, true
	case "UNSUBSCRIBE":
		kind, t.listens, t.ping = pendingUnsubscribe, true, true
	}
	if kind != 0 {
		if t.count == mostPending {
			return false, errPending
		}
		t.next[(t.first+t.count)%mostPending] = pending{number: t.sends, kind: kind, topics: c.Args - 1}
		t.count++
	}
	return true, nil
}

// heard judges a message.
func (t *talk) heard(g *guard, m *resp.Message, asked int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	// To subscribers that speak RESP 2 all arrays are pushes, but for the answer to a PING.
	if m.Kind == '>' || t.listens && !t.resp3 && m.Aggregate && m.Elements > 0 && string(m.First()) != "pong" {
		return t.pushed(g, m)
	}
	if t.pong {
		if t.pong = false; !isPong(m) {
			return errUnusable
		}
		return nil
	}
	switch kind := t.head(g.answered + 1).kind; kind {
	case pendingRole:
		if m.Aggregate && m.Elements < 1 {
			return errUnusable
		}
	case pendingAddress:
		if m.Aggregate && m.Elements < 2 {
			return errUnusable
		}
	case pendingSubscribe, pendingUnsubscribe:
		if kind == pendingUnsubscribe && isPong(m) {
			break
		}
		if m.Kind != '-' && m.Kind != '!' || string(m.First()) == "QUEUED" {
			return errUnusable
		}
		t.pong = kind == pendingUnsubscribe
	}
	t.drop(g.answered + 1)
	return g.answer(asked)
}

// pushed judges a message out of band.
func (t *talk) pushed(g *guard, m *resp.Message) error {
	switch {
	case ends(m):
		t.more = max(0, t.more-1)
	case confirms(m) && t.more > 0:
		t.more--
	case confirms(m):
		head := t.head(g.answered + 1)
		if head.kind != pendingSubscribe || t.pong {
			return errUnasked
		}
		t.more = head.topics - 1
		g.answered++
		t.drop(g.answered)
	case string(m.First()) == "message" && m.Elements >= 3:
		// The client takes what sentinels tell apart by blanks.
		least := 4
		if string(m.Second()) == "+switch-master" {
			least = 5
		}
		if m.Words < least {
			return errUnusable
		}
	}
	return nil
}

// head is the command with a number, if not every reply will do for it.
func (t *talk) head(number int64) pending {
	if t.count > 0 && t.next[t.first].number == number {
		return t.next[t.first]
	}
	return pending{}
}

// drop forgets the command with a number.
func (t *talk) drop(number int64) {
	if t.count > 0 && t.next[t.first].number == number {
		t.first = (t.first + 1) % mostPending
		t.count--
	}
}

// isPong reports whether the client takes a message for the reply to a PING.
func isPong(m *resp.Message) bool {
	first := m.First()
	if m.Kind == '-' {
		return bytes.HasPrefix(first, []byte("LOADING")) || bytes.HasPrefix(first, []byte("BUSY")) ||
			bytes.Contains(first, []byte("'ping'"))
	}
	if m.Aggregate {
		return m.Elements > 0 && string(first) == "pong"
	}
	return string(first) == "PONG"
}

// Interface guard
var _ net.Conn = (*guard)(nil)
