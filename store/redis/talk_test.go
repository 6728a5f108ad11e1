package redis

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// tape is a connection that reads what it is given, so many bytes at a time, and writes to nowhere.
type tape struct {
	net.Conn
	text   bytes.Buffer
	piece  int
	closed bool
}

func (c *tape) Read(p []byte) (int, error)  { return c.text.Read(p[:min(len(p), c.piece)]) }
func (c *tape) Write(p []byte) (int, error) { return len(p), nil }
func (c *tape) Close() error                { c.closed = true; return nil }

// say sends commands over a guard, a line each, and reads what comes.
func say(mode, commands, stream string, piece int) (read string, closed bool, err error) {
	conn := &tape{piece: piece}
	conn.text.WriteString(stream)
	g := newGuard(conn, mode, nil)
	for _, line := range strings.Split(commands, "\n") {
		if line == "" {
			continue
		}
		if _, err := g.Write([]byte(command(strings.Fields(line)...))); err != nil {
			return "", conn.closed, err
		}
	}
	all, err := io.ReadAll(g)
	if again, failure := g.Read(make([]byte, 10)); err != nil && (again != 0 || failure != err) {
		return "", conn.closed, failure
	}
	return string(all), conn.closed, err
}

// command is a command as it is sent.
func command(words ...string) string {
	var b strings.Builder
	b.WriteString("*" + strconv.Itoa(len(words)) + "\r\n")
	for _, word := range words {
		b.WriteString("$" + strconv.Itoa(len(word)) + "\r\n" + word + "\r\n")
	}
	return b.String()
}

// TestRepliesAreCounted closes a connection that says more than it was asked for.
func TestRepliesAreCounted(t *testing.T) {
	const push, confirmed = ">2\r\n+news\r\n:1\r\n", ">3\r\n+subscribe\r\n+c\r\n:1\r\n"
	for _, mode := range []string{modeSingle, modeSentinel, modeCluster} {
		for _, test := range []struct {
			commands, stream string
			want             error
		}{
			{"", "", nil},
			{"", "+OK\r\n", errUnasked},
			{"PING", "+PONG\r\n", nil},
			{"PING\nPING", "+PONG\r\n+PONG\r\n", nil},
			{"PING", "+PONG\r\n+PONG\r\n", errUnasked},
			{"PING", "|1\r\n+a\r\n+b\r\n+PONG\r\n+PONG\r\n", errUnasked},
			{"PING", push + "+PONG\r\n" + push, nil},
			{"PING", push + "+PONG\r\n" + push + "+PONG\r\n", errUnasked},
			{"PING", confirmed, errUnasked},
			{"", strings.Replace(confirmed, "sub", "psub", 1), errUnasked},
			{"", strings.Replace(confirmed, "sub", "ssub", 1), errUnasked},
			{"", strings.Replace(confirmed, "sub", "unsub", 1), nil},
		} {
			for _, piece := range []int{1, 7, 1000} {
				read, closed, err := say(mode, test.commands, test.stream, piece)
				assert.ErrorIs(t, err, test.want, "%s %q %q", mode, test.commands, test.stream)
				assert.Equal(t, test.want != nil, closed, "%s %q %q", mode, test.commands, test.stream)
				if test.want == nil {
					assert.Equal(t, test.stream, read)
				}
			}
		}
	}
}

// TestTalkWithSentinels lets through what a sentinel answers, in both versions of the protocol, and closes over what the
// client would read beyond its end or end the process for.
func TestTalkWithSentinels(t *testing.T) {
	const (
		hello      = "HELLO 3"
		subscribe  = "SUBSCRIBE +sentinel +switch-master"
		leave      = "UNSUBSCRIBE +sentinel +switch-master\nPING" // the client always sends them together
		address    = "SENTINEL GET-MASTER-ADDR-BY-NAME m"
		ok         = "%1\r\n+proto\r\n:3\r\n"
		one, two   = ">3\r\n+subscribe\r\n+sentinel\r\n:1\r\n", ">3\r\n+subscribe\r\n+switch-master\r\n:2\r\n"
		left       = ">3\r\n+unsubscribe\r\n_\r\n:0\r\n"
		noperm     = "-NOPERM no permissions to run the 'unsubscribe' command\r\n"
		nopermPing = "-NOPERM no permissions to run the 'ping' command\r\n"
	)
	message := func(channel, text string) string { return ">3\r\n+message\r\n+" + channel + "\r\n+" + text + "\r\n" }
	array := func(pushes string) string { return strings.ReplaceAll(pushes, ">", "*") }
	for name, test := range map[string]struct {
		commands, stream string
		want             error
	}{
		"subscribing":                        {hello + "\n" + subscribe, ok + one + two, nil},
		"a confirmation too many":            {hello + "\n" + subscribe, ok + one + two + one, errUnasked},
		"a confirmation instead of a reply":  {hello + "\nPING\n" + subscribe, ok + one, errUnasked},
		"a confirmation in its turn":         {hello + "\nPING\n" + subscribe, ok + "+PONG\r\n" + one + two, nil},
		"an end among confirmations":         {hello + "\n" + subscribe, ok + one + left + two, errUnasked},
		"a refused subscription":             {hello + "\n" + subscribe, ok + "-NOPERM no\r\n", nil},
		"a queued subscription":              {hello + "\n" + subscribe, ok + "+QUEUED\r\n", errUnusable},
		"a queued subscription, as error":    {hello + "\n" + subscribe, ok + "-QUEUED\r\n", errUnusable},
		"a queued subscription, in chunks":   {hello + "\n" + subscribe, ok + "$?\r\n;3\r\nQUE\r\n;3\r\nUED\r\n;0\r\n", errUnusable},
		"a subscription that is a number":    {hello + "\n" + subscribe, ok + ":1\r\n", errUnusable},
		"leaving":                            {hello + "\n" + leave, ok + left + "+PONG\r\n", nil},
		"leaving twice":                      {hello + "\n" + leave + "\n" + leave, ok + left + "+PONG\r\n" + left + "+PONG\r\n", nil},
		"leaving with a reply too many":      {hello + "\n" + leave, ok + left + "+PONG\r\n+PONG\r\n", errUnasked},
		"a refused end":                      {hello + "\n" + leave, ok + noperm + "+PONG\r\n", nil},
		"a refused end and ping":             {hello + "\n" + leave, ok + noperm + nopermPing, nil},
		"a refused end, and no ping":         {hello + "\n" + leave, ok + noperm + "+OK\r\n", errUnusable},
		"a refused end, and too many pings":  {hello + "\n" + leave, ok + noperm + "+PONG\r\n+PONG\r\n", errUnasked},
		"a queued end":                       {hello + "\n" + leave, ok + "+QUEUED\r\n", errUnusable},
		"an end that is a number":            {hello + "\n" + leave, ok + ":1\r\n", errUnusable},
		"a confirmation of an end":           {hello + "\n" + leave, ok + one, errUnasked},
		"a new sentinel":                     {hello, ok + message("+sentinel", "sentinel id 127.0.0.1 1 @ m 127.0.0.1 2"), nil},
		"a new sentinel without a port":      {hello, ok + message("+sentinel", "sentinel id 127.0.0.1"), errUnusable},
		"a new master":                       {hello, ok + message("+switch-master", "m 127.0.0.1 1 127.0.0.1 2"), nil},
		"a new master without a port":        {hello, ok + message("+switch-master", "m 127.0.0.1 1 127.0.0.1"), errUnusable},
		"a message that is a number":         {hello, ok + ">3\r\n+message\r\n+reboot\r\n:1\r\n", errUnusable},
		"a message in an attribute's shade":  {hello, ok + "|1\r\n+a\r\n+b c d e f\r\n" + message("+reboot", "x"), errUnusable},
		"half a message":                     {hello, ok + ">2\r\n+message\r\n+reboot\r\n", nil},
		"a role":                             {"ROLE", "*3\r\n+master\r\n:0\r\n*0\r\n", nil},
		"no role":                            {"ROLE", "*0\r\n", errUnusable},
		"no role, streamed":                  {"ROLE", "*?\r\n.\r\n", errUnusable},
		"a null role":                        {"ROLE", "*-1\r\n", nil},
		"a refused role":                     {"ROLE", "-NOPERM no\r\n", nil},
		"an empty list for something else":   {"SENTINEL SENTINELS m\nROLE", "*0\r\n*1\r\n+master\r\n", nil},
		"an address":                         {address, "*2\r\n+127.0.0.1\r\n+1\r\n", nil},
		"half an address":                    {address, "*1\r\n+127.0.0.1\r\n", errUnusable},
		"no address":                         {address, "*0\r\n", errUnusable},
		"a null address":                     {address, "_\r\n", nil},
		"half an address behind a list":      {"SENTINEL SENTINELS m\n" + address, "*0\r\n*1\r\n+127.0.0.1\r\n", errUnusable},
		"version 2: leaving, subscribing":    {leave + "\n" + subscribe, array(left) + "+PONG\r\n" + array(one+two), nil},
		"version 2: a ping of a subscriber":  {subscribe + "\nPING", array(one+two) + "*2\r\n+pong\r\n+\r\n", nil},
		"version 2: a confirmation too many": {subscribe, array(one + two + one), errUnasked},
		"version 2: a new master without a port": {subscribe,
			array(one + two + message("+switch-master", "m 1")), errUnusable},
	} {
		for _, piece := range []int{1, 5, 1000} {
			read, closed, err := say(modeSentinel, test.commands, test.stream, piece)
			assert.ErrorIs(t, err, test.want, "%s, in pieces of %d", name, piece)
			assert.Equal(t, test.want != nil, closed, "%s, in pieces of %d", name, piece)
			if test.want == nil {
				assert.Equal(t, test.stream, read, "%s, in pieces of %d", name, piece)
			}
		}
	}
	pending := strings.Repeat("ROLE\n", mostPending)
	_, _, err := say(modeSentinel, pending, "", 1)
	assert.NoError(t, err)
	_, _, err = say(modeSentinel, pending+"ROLE", "", 1)
	assert.ErrorIs(t, err, errPending, "rather than reply to a command that was forgotten")
}

// feeder is a server that answers the first commands of a connection as one should, if so asked, and whatever comes then
// by the bytes of a fuzz test.
func feeder(conn net.Conn, polite bool, stream []byte) {
	defer conn.Close()
	buffer := make([]byte, 4096)
	for n := 0; ; n++ {
		if _, err := conn.Read(buffer); err != nil {
			return
		}
		answer := stream
		if polite && n == 0 {
			answer = []byte("%2\r\n$7\r\nversion\r\n$5\r\n6.2.0\r\n$5\r\nproto\r\n:3\r\n")
		}
		if _, err := conn.Write(answer); err != nil {
			return
		}
	}
}

// FuzzGuardAndClient feeds bytes to the client through a guard, in the modes single and sentinel. It must not panic in
// any goroutine, return in time, and end.
func FuzzGuardAndClient(f *testing.F) {
	for _, reply := range impossible() {
		if !strings.HasPrefix(reply, "repeated ") {
			f.Add([]byte(reply), uint8(len(reply)))
		}
	}
	f.Add([]byte("*1\r\n>2\r\n+subscribe\r\n+x\r\n"), uint8(1))
	f.Add([]byte("*0\r\n"), uint8(3))
	f.Add([]byte("*3\r\n+master\r\n:0\r\n*0\r\n"), uint8(3))
	f.Add([]byte(">3\r\n+message\r\n+sentinel\r\n+a b\r\n"), uint8(3))
	f.Fuzz(func(t *testing.T, stream []byte, how uint8) {
		s := &setup{mode: modeSingle, timeout: 50 * time.Millisecond}
		r := &Redis{Mode: modeSingle, MasterName: "m"}
		if how&2 != 0 {
			s.mode = modeSentinel
		}
		s.fill(r, endpoint{}, nil)
		s.option.InitAddress = []string{"server:1"}
		s.option.ConnWriteTimeout = 20 * time.Millisecond
		s.option.Dialer.KeepAlive = 10 * time.Millisecond // without an answer, a connection is soon lost
		s.option.Sentinel.Dialer = s.option.Dialer
		s.option.ReadBufferEachConn, s.option.WriteBufferEachConn, s.option.RingScaleEachConn = 1<<12, 1<<12, 4
		s.option.DialCtxFn = func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go feeder(theirs, how&1 != 0, stream)
			return ours, nil
		}
		within(t, "the client", func() { feed(t, s) })
	})
}

// feed makes a client, asks it a few times, and closes it.
func feed(t *testing.T, s *setup) {
	var broken *brokenError
	c, err := newClient(s)
	if errors.As(err, &broken) {
		t.Errorf("the client panics: %v", err)
	}
	if err != nil {
		return
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	for range 3 {
		if err := shielded(func() { _ = takeScript.run(ctx, c, []string{"k"}, "").Error() }); err != nil {
			t.Errorf("the client panics: %v", err)
		}
	}
}
