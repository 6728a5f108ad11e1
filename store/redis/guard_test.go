package redis

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// impossible are replies that no Redis sends, each of which would end the client, or make it wait or grow without end.
// What begins with a kind of its own is repeated: see send.
func impossible() []string {
	list := []string{
		"$?\r\n;-4\r\n", "$?\r\n;4\r\nab", "$?\r\n;99999999999\r\n", "*?\r\n:1\r\n", "%?\r\n+a\r\n", "=-1\r\n", "=99999999999\r\n", "!-5\r\n", "!1099511627776\r\n",
		"$5\r\nabcdefg", "$-01\r\n", "$+1\r\na\r\n", "$ 1\r\na\r\n", "$0x1\r\na\r\n", "$\r\n", "*\r\n", "*1e3\r\n", "*--1\r\n", "%9223372036854775807\r\n", "%4611686018427387904\r\n",
		"|1\r\n", "|-1\r\n", "|1\r\n+a\r\n+b\r\n|1\r\n+a\r\n+b\r\n", ">0\r\n", ">1\r\n*-9\r\n", ">3\r\n+subscribe\r\n+c\r\n:1\r\n", "*2\r\n*1\r\n$-5\r\n:1\r\n", "*1025\r\n:1\r\n",
		"$65537\r\na", ".\r\n", ",\r\n", "(99999999999999999999999999\r\n(1\r\n", "#x\r\n", "_\r\n_\r\n", "+OK\r\n+OK\r\n+OK\r\n+OK\r\n", ":1\r\n:2\r\n", "$-1\r\n$-1\r\n", "\r\n\r\n",
		"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n", "-MOVED\r\n-MOVED\r\n", "\x00\x00\x00\x00", "HTTP/1.1 200 OK\r\n\r\n",
	}
	for _, kind := range "$*%~>=!" {
		for _, length := range []string{"-5", "-7", "9223372036854775807", "1099511627776", "1000000000000"} {
			list = append(list, string(kind)+length+"\r\n")
		}
	}
	for _, opened := range []string{"*1\r\n", "%1\r\n", ">1\r\n", "~1\r\n", "|1\r\n", "%1\r\n+a\r\n", "+endless", "$?\r\n"} {
		list = append(list, "repeated "+opened)
	}
	return list
}

// send writes a reply. One that is repeated goes on for 64 MB, or until nobody listens.
func send(w io.Writer, reply string) {
	piece, repeated := strings.CutPrefix(reply, "repeated ")
	if !repeated {
		_, _ = io.WriteString(w, reply)
		return
	}
	chunk := strings.Repeat(piece, 1<<20/len(piece))
	if piece == "+endless" {
		chunk = "+" + strings.Repeat("e", 1<<20)
	}
	for range 64 {
		if _, err := io.WriteString(w, chunk); err != nil {
			return
		}
		chunk = strings.TrimPrefix(chunk, "+")
	}
}

// within fails the test if something takes longer than a watchdog's patience.
func within(t *testing.T, what string, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Errorf("%s hangs", what)
	}
}

// hostile is a server that says something impossible in the place of a command's reply, behind an address at which a real
// one can take its place.
type hostile struct {
	proxy    *redistest.Proxy
	settings map[string]any
}

func newHostile(t *testing.T, mode, command, reply string) *hostile {
	h := &hostile{proxy: redistest.StartProxy(t, "")}
	host, port, err := net.SplitHostPort(h.proxy.Addr())
	require.NoError(t, err)
	said := reply
	if strings.HasPrefix(reply, "repeated ") {
		said = strings.Repeat(strings.TrimPrefix(reply, "repeated "), 100_000)
	}
	says := map[string]string{
		"SENTINEL": fmt.Sprintf("*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(host), host, len(port), port),
		"ROLE":     "*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n",
		"CLUSTER":  fmt.Sprintf("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$%d\r\n%s\r\n:%s\r\n$1\r\nn\r\n", len(host), host, port),
	}
	if command != "EVAL" {
		says[command] = said
	}
	fake := redistest.StartFake(t, says, func(w io.WriteCloser, _ []string) { send(w, reply) })
	h.proxy.Target(fake.Addr())
	h.settings = and(faulty(h.proxy.Addr()), "mode", mode)
	if mode == modeSentinel {
		h.settings = and(h.settings, "master_name", redistest.MasterName)
	}
	return h
}

// A reply that no Redis sends fails the decision and nothing else: the process lives, nobody waits longer than the
// deadline, the breaker opens, all heals when a real Redis is back, and closing takes no longer than it may.
func TestImpossibleRepliesEndNothingButTheConnection(t *testing.T) {
	single := redistest.Start(t)
	cluster := redistest.Cluster(t, 3)
	sentinel := redistest.StartSentinel(t, redistest.Conn{})
	real := map[string]string{modeSingle: single.Addr(), modeCluster: cluster[0].Addr(), modeSentinel: sentinel.Sentinels[0].Addr()}
	places := []struct{ mode, command string }{
		{modeSingle, "EVAL"}, {modeSingle, "HELLO"}, {modeCluster, "EVAL"}, {modeCluster, "HELLO"}, {modeCluster, "CLUSTER"},
		{modeSentinel, "EVAL"}, {modeSentinel, "HELLO"}, {modeSentinel, "SENTINEL"}, {modeSentinel, "ROLE"},
	}
	replies := impossible()
	require.Greater(t, len(replies), 60)
	var wait sync.WaitGroup
	room := make(chan struct{}, 8) // replies that are tried at a time: most of it is waiting
	for i, reply := range replies {
		if i%raceFactor != 0 {
			continue
		}
		room <- struct{}{}
		var all sync.WaitGroup
		for _, place := range places {
			h := newHostile(t, place.mode, place.command, reply)
			spec := named(stackOf(plainTier("ip", 3, day)), fmt.Sprint("hostile", i))
			all.Go(func() {
				h.check(t, fmt.Sprintf("%s %s %.40q", place.mode, place.command, reply), spec, real[place.mode])
			})
		}
		wait.Go(func() {
			all.Wait()
			<-room
		})
	}
	wait.Wait()
}

// check decides by the server until its breaker is open, and again when a real one is in its place.
func (h *hostile) check(t *testing.T, place string, spec store.StackSpec, real string) {
	s := newStore(t, h.settings)
	s.setup.digest += " hostile " + h.proxy.Addr()
	opened, err := s.Open(spec)
	if !assert.NoError(t, err, place) {
		return
	}
	c := opened.(*counters)
	within(t, place+": deciding", func() {
		for range mostFailures {
			_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
			requireStranger(t, err)
		}
	})
	h.proxy.Target(real)
	h.proxy.Reset()
	within(t, place+": healing", func() {
		assert.True(t, redistest.Await(func() bool {
			_, err := c.Take(context.Background(), time.Now(), claimsOf("b"))
			return err == nil
		}), "%s: a real one is back", place)
	})
	within(t, place+": closing", func() { assert.NoError(t, c.Close(), place) })
}
