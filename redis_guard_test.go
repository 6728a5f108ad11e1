package tieredlimit

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// redisNonsense is what a server would never answer to a script.
func redisNonsense() map[string]string {
	return map[string]string{
		"two replies":                "+OK\r\n+OK\r\n",
		"many replies":               strings.Repeat("+OK\r\n", 1000),
		"negative string":            "$-5\r\n",
		"huge string":                "$999999999999999\r\n",
		"length that overflows":      "$18446744073709551617\r\n",
		"long length":                "$" + strings.Repeat("0", 100) + "1\r\nx\r\n",
		"huge array":                 "*99999999999\r\n",
		"negative array":             "*-2\r\n",
		"negative map":               "%-1\r\n",
		"map of minus one":           "%-1\r\n",
		"huge map":                   "%9223372036854775807\r\n",
		"arrays without end":         strings.Repeat("*1\r\n", 100_000),
		"arrays of arrays":           strings.Repeat("*500000\r\n", 8),
		"streamed string":            "$?\r\n;-5\r\n",
		"streamed array":             "*?\r\n",
		"a push":                     ">3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n",
		"an empty push":              ">0\r\n",
		"an attribute":               "|1\r\n+a\r\n+b\r\n",
		"a line without end":         "+" + strings.Repeat("x", 1<<20),
		"a line with LF alone":       "+OK\n",
		"a null that is longer":      "_x\r\n",
		"a boolean that is longer":   "#true\r\n",
		"another protocol":           "HTTP/1.1 400 Bad Request\r\n\r\n",
		"an empty line":              "\r\n",
		"zeros":                      strings.Repeat("\x00", 100),
		"a string without an end":    "$2\r\nabcd\r\n",
		"nothing but a long message": "*500000\r\n" + strings.Repeat("$30\r\n"+strings.Repeat("x", 30)+"\r\n", 300_000),
	}
}

// TestRedisNonsenseIsAFailure answers scripts by what no server would, to several requests at a time. The process must
// survive, and each request be told that the store is not available.
func TestRedisNonsenseIsAFailure(t *testing.T) {
	for name, reply := range redisNonsense() {
		t.Run(name, func(t *testing.T) {
			fake := redistest.StartFake(t, nil, func(w io.WriteCloser, _ []string) { _, _ = io.WriteString(w, reply) })
			c, log := observed(t, stackOf(plainTier("ip", 3, day)), faulty(fake.Addr()))
			var wait sync.WaitGroup
			for range 4 {
				wait.Go(func() {
					for range 4 {
						_, err := c.Take(context.Background(), time.Now(), claimsOf("a"), make([]State, 1))
						var away *UnavailableError
						assert.ErrorAs(t, err, &away)
					}
				})
			}
			wait.Wait()
			assert.False(t, c.stack.breaker.allows())
			assert.Equal(t, 1, log.Len())
		})
	}
}

// TestRedisNonsenseAtConnecting answers what is asked while connecting by what no server would.
func TestRedisNonsenseAtConnecting(t *testing.T) {
	nonsense := redisNonsense()
	for name, reply := range map[string]string{
		"a list of numbers": "*2\r\n:1\r\n:2\r\n", "empty lists": "*2\r\n*0\r\n*0\r\n", "an empty map": "%0\r\n", "a number": ":1\r\n",
		"null": "_\r\n", "an old null": "*-1\r\n", "a map of nulls": "*1\r\n%2\r\n+slots\r\n_\r\n+nodes\r\n_\r\n",
		"slots that are none": "*1\r\n%2\r\n+slots\r\n*1\r\n:7\r\n+nodes\r\n*1\r\n%0\r\n", "a text": "+OK\r\n",
		"slots out of range": "*1\r\n*3\r\n:-5\r\n:99999\r\n*2\r\n+127.0.0.1\r\n:1\r\n", "short slots": "*1\r\n*1\r\n:0\r\n",
	} {
		nonsense[name] = reply
	}
	unasked := map[string]bool{"a push": true, "an empty push": true, "two replies": true, "many replies": true}
	for _, mode := range []string{"single", "sentinel", "cluster"} {
		for _, command := range []string{"HELLO", "CLUSTER", "SENTINEL", "PSUBSCRIBE", "ROLE"} {
			for name, reply := range nonsense {
				if mode == "single" && command != "HELLO" || len(reply) > 1<<20 {
					continue
				}
				if mode == "sentinel" && unasked[name] {
					continue // a sentinel's subscribers are told what they did not ask
				}
				t.Run(mode+" "+command+" "+name, func(t *testing.T) {
					fake := redistest.StartFake(t, map[string]string{command: reply}, func(w io.WriteCloser, _ []string) { w.Close() })
					settings := and(faulty(fake.Addr()), "mode", mode)
					if mode == "sentinel" {
						settings = and(settings, "master_name", "m")
					}
					c, _ := observed(t, stackOf(plainTier("ip", 3, day)), and(settings, "timeout", "20ms"))
					_, err := c.Take(context.Background(), time.Now(), claimsOf("a"), make([]State, 1))
					var away *UnavailableError
					assert.ErrorAs(t, err, &away)
				})
			}
		}
	}
}

// TestRedisClosesInMidAnswer cuts an answer short at every byte.
func TestRedisClosesInMidAnswer(t *testing.T) {
	whole := redisAnswer(1_700_000_000_000, 1)
	for length := range len(whole) {
		fake := redistest.StartFake(t, nil, func(w io.WriteCloser, _ []string) {
			_, _ = io.WriteString(w, whole[:length])
			w.Close()
		})
		c, _ := observed(t, stackOf(plainTier("ip", 3, day)), faulty(fake.Addr()))
		_, err := c.Take(context.Background(), time.Now(), claimsOf("a"), make([]State, 1))
		var away *UnavailableError
		require.ErrorAs(t, err, &away, "after %d bytes", length)
		assert.Equal(t, "network", away.Kind, "after %d bytes: %v", length, err)
	}
}

// redisAnswer is an answer of the take script's.
func redisAnswer(numbers ...float64) string {
	var text []byte
	for _, n := range numbers {
		text = binary.BigEndian.AppendUint64(text, math.Float64bits(n))
	}
	return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text)
}

// TestRedisAnswersThatCannotBe gives answers of the right form that say what the script never says.
func TestRedisAnswersThatCannotBe(t *testing.T) {
	const now, hour = 1_700_000_000_000, 3_600_000
	spec := stackOf(plainTier("ip", 3, time.Hour), plainTier("user", 3, time.Hour))
	spec.Tiers[1].DryRun = true
	type numbers []float64
	for name, test := range map[string]struct {
		answer numbers
		ok     bool
	}{
		"short":                        {numbers{now, 1, 1}, true},
		"long":                         {numbers{now, 1, 1, -1, 0, 5, hour}, true},
		"refused":                      {numbers{now, -3, 1, 0, 7, 5, 5}, true},
		"dry and exceeded":             {numbers{now, 1, -3, -1, 7, 5, 5}, true},
		"no time":                      {numbers{0, 1, 1}, false},
		"a time before 1970":           {numbers{-1, 1, 1}, false},
		"a time that is no number":     {numbers{math.NaN(), 1, 1}, false},
		"a time without end":           {numbers{math.Inf(1), 1, 1}, false},
		"no hits":                      {numbers{now, 0, 1}, false},
		"fewer than no hits":           {numbers{now, 1, -1}, false},
		"hits that are no number":      {numbers{now, math.NaN(), 1}, false},
		"hits without end":             {numbers{now, 1, math.Inf(1)}, false},
		"long hits that are no number": {numbers{now, 1, math.NaN(), -1, 0, 5, 5}, false},
		"refused by none that is":      {numbers{now, -3, 1, 2, 0, 5, 5}, false},
		"refused by minus two":         {numbers{now, -3, 1, -2, 0, 5, 5}, false},
		"refused by 1e300":             {numbers{now, -3, 1, 1e300, 0, 5, 5}, false},
		"refused by no number":         {numbers{now, -3, 1, math.NaN(), 0, 5, 5}, false},
		"refused and not exceeded":     {numbers{now, 1, 1, 0, 0, 5, 5}, false},
		"refused by a dry one":         {numbers{now, 1, -3, 1, 0, 5, 5}, false},
		"a generation below zero":      {numbers{now, 1, 1, -1, -7, 5, 5}, false},
		"nothing left":                 {numbers{now, -3, 1, 0, 0, 0, 5}, false},
		"less than nothing left":       {numbers{now, -3, 1, 0, 0, -5, 5}, false},
		"more left than a window":      {numbers{now, -3, 1, 0, 0, hour + 1, 5}, false},
		"left that is no number":       {numbers{now, 1, 1, -1, 0, 5, math.NaN()}, false},
		"too few numbers":              {numbers{now, 1}, false},
		"too many numbers":             {numbers{now, 1, 1, -1, 0, 5, 5, 5}, false},
		"no numbers":                   {numbers{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			fake := redistest.StartFake(t, nil, func(w io.WriteCloser, command []string) {
				_, _ = io.WriteString(w, redisAnswer(test.answer...))
			})
			c, _ := observed(t, spec, faulty(fake.Addr()))
			_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "b"), make([]State, 2))
			if test.ok {
				assert.NoError(t, err)
				return
			}
			var away *UnavailableError
			assert.ErrorAs(t, err, &away)
		})
	}
}

// scriptedConn reads what it is given, so many bytes at a time, and writes to nowhere.
type scriptedConn struct {
	net.Conn
	text  bytes.Buffer
	piece int
}

func (c *scriptedConn) Read(p []byte) (int, error)  { return c.text.Read(p[:min(len(p), c.piece)]) }
func (c *scriptedConn) Write(p []byte) (int, error) { return len(p), nil }

// readGuarded sends so many commands and reads all that comes, in pieces.
func readGuarded(commands int, stream string, piece int, subscribe bool) (string, error) {
	conn := &scriptedConn{piece: piece}
	conn.text.WriteString(stream)
	g := &redisGuard{Conn: conn, subscribes: true}
	for range commands {
		word := "PING"
		if subscribe {
			word = "PSUBSCRIBE"
		}
		if _, err := fmt.Fprintf(g, "*1\r\n$%d\r\n%s\r\n", len(word), word); err != nil {
			return "", err
		}
	}
	text, err := io.ReadAll(g)
	return string(text), err
}

func TestRedisGuardLetsRepliesThrough(t *testing.T) {
	stream := "+OK\r\n-ERR no\r\n:-12\r\n$0\r\n\r\n$3\r\na\r\n\r\n$-1\r\n*-1\r\n*0\r\n*2\r\n*1\r\n_\r\n%1\r\n#t\r\n,1.5\r\n" +
		"~2\r\n(123\r\n=5\r\ntxt:a\r\n!3\r\nERR\r\n+" + strings.Repeat("x", 1000) + "\r\n*2\r\n*0\r\n*0\r\n+last\r\n"
	const replies = 14
	for piece := 1; piece < 40; piece++ {
		text, err := readGuarded(replies, stream, piece, false)
		require.NoError(t, err, "in pieces of %d", piece)
		assert.Equal(t, stream, text, "in pieces of %d", piece)
		_, err = readGuarded(replies-1, stream, piece, false)
		assert.ErrorIs(t, err, errRedisUnasked, "one more reply than commands, in pieces of %d", piece)
		text, err = readGuarded(1, stream, piece, true)
		assert.NoError(t, err, "to a subscriber, in pieces of %d", piece)
		assert.Equal(t, stream, text)
	}
	text, err := readGuarded(0, ">2\r\n+a\r\n*1\r\n:1\r\n", 3, false)
	assert.ErrorIs(t, err, errRedisUnasked, "a push to nobody: %q", text)
	_, err = readGuarded(1, ">2\r\n+a\r\n*1\r\n:1\r\n", 3, true)
	assert.NoError(t, err, "a push to a subscriber")
}

// FuzzRedisGuard looks for streams that are judged by how they are cut, and for ones that are let through although they
// announce more than may be allocated.
func FuzzRedisGuard(f *testing.F) {
	for _, reply := range redisNonsense() {
		if len(reply) < 1000 {
			f.Add([]byte(reply), uint8(3))
		}
	}
	f.Add([]byte(redisAnswer(1, 2)), uint8(7))
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		whole, cut := new(redisScan), new(redisScan)
		first := whole.feed(stream)
		var second error
		for rest := stream; len(rest) > 0 && second == nil; {
			n := min(int(piece)+1, len(rest))
			second = cut.feed(rest[:n])
			rest = rest[n:]
		}
		if (first == nil) != (second == nil) {
			t.Fatalf("whole: %v, in pieces of %d: %v", first, int(piece)+1, second)
		}
		if first == nil && *whole != *cut {
			t.Fatalf("whole: %+v, in pieces: %+v", whole, cut)
		}
		if first != nil && !errors.Is(first, errRedisForm) {
			t.Fatalf("unexpected error: %v", first)
		}
		if whole.depth > redisDepth || whole.parts > 3*redisMostParts || whole.skip > redisMostText {
			t.Fatalf("beyond the bounds: %+v", whole)
		}
	})
}
