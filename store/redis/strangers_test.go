package redis

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// strangers is what other services say, and what a server never answers to a script.
func strangers() map[string]string {
	return map[string]string{
		"a web server":            "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
		"a shell":                 "SSH-2.0-OpenSSH_9.2\r\n",
		"a mail server":           "220 mail.example ESMTP\r\n",
		"a database":              "\x4a\x00\x00\x00\x0a8.0.36\x00",
		"a TLS alert":             "\x15\x03\x03\x00\x02\x02\x46",
		"memcached":               "ERROR\r\n",
		"zeros":                   strings.Repeat("\x00", 100),
		"an empty line":           "\r\n",
		"a line with LF alone":    "+OK\n",
		"a word":                  "+OK\r\n",
		"a number":                ":1\r\n",
		"null":                    "_\r\n",
		"an old null":             "*-1\r\n",
		"an empty list":           "*0\r\n",
		"a list of numbers":       "*2\r\n:1\r\n:2\r\n",
		"an empty map":            "%0\r\n",
		"a map of nulls":          "*1\r\n%2\r\n+slots\r\n_\r\n+nodes\r\n_\r\n",
		"a short string":          "$1\r\na\r\n",
		"an error":                "-ERR unknown command\r\n",
		"a string without an end": "$2\r\nabcd\r\n",
	}
}

// TestStrangersAreAFailure answers scripts by what no server would, to several requests at a time. The process must
// survive, and each request be told that the store is not available.
func TestStrangersAreAFailure(t *testing.T) {
	for name, reply := range strangers() {
		t.Run(name, func(t *testing.T) {
			fake := redistest.StartFake(t, nil, func(w io.WriteCloser, _ []string) { _, _ = io.WriteString(w, reply) })
			c, log := observed(t, stackOf(plainTier("ip", 3, day)), faulty(fake.Addr()))
			var wait sync.WaitGroup
			for range 4 {
				wait.Go(func() {
					for range 4 {
						_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
						requireStranger(t, err)
					}
				})
			}
			wait.Wait()
			assert.False(t, c.stack.breaker.allows())
			assert.Equal(t, 1, log.Len())
		})
	}
}

// TestStrangersAtConnecting answers what is asked while connecting by what no server would.
func TestStrangersAtConnecting(t *testing.T) {
	for _, mode := range []string{"single", "sentinel", "cluster"} {
		for _, command := range []string{"HELLO", "CLUSTER", "SENTINEL", "ROLE"} {
			for name, reply := range strangers() {
				if mode == "single" && command != "HELLO" {
					continue
				}
				t.Run(mode+" "+command+" "+name, func(t *testing.T) {
					fake := redistest.StartFake(t, map[string]string{command: reply}, func(w io.WriteCloser, _ []string) { w.Close() })
					settings := and(faulty(fake.Addr()), "mode", mode)
					if mode == "sentinel" {
						settings = and(settings, "master_name", "m")
					}
					c, _ := observed(t, stackOf(plainTier("ip", 3, day)), and(settings, "timeout", "20ms"))
					_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
					requireStranger(t, err)
				})
			}
		}
	}
}

// requireStranger wants the failure that the README states for it, that of a breaker that has
// opened over it, or that of a deadline that was over first.
func requireStranger(t *testing.T, err error) {
	t.Helper()
	var away *store.UnavailableError
	if assert.ErrorAs(t, err, &away) {
		assert.Contains(t, []string{"connect", "network", "server", "timeout", "overload", "away"}, away.Kind, "%v", err)
	}
}

// TestClosesInMidAnswer cuts an answer short at every byte.
func TestClosesInMidAnswer(t *testing.T) {
	whole := strangerAnswer(1_700_000_000_000, 1)
	for length := range len(whole) {
		fake := redistest.StartFake(t, nil, func(w io.WriteCloser, _ []string) {
			_, _ = io.WriteString(w, whole[:length])
			w.Close()
		})
		c, _ := observed(t, stackOf(plainTier("ip", 3, day)), faulty(fake.Addr()))
		_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
		var away *store.UnavailableError
		require.ErrorAs(t, err, &away, "after %d bytes", length)
		assert.Equal(t, "network", away.Kind, "after %d bytes: %v", length, err)
	}
}

// strangerAnswer is an answer of the take script's.
func strangerAnswer(numbers ...float64) string {
	var text []byte
	for _, n := range numbers {
		text = binary.BigEndian.AppendUint64(text, math.Float64bits(n))
	}
	return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text)
}

// TestAnswersThatCannotBe gives answers of the right form that say what the script never says.
func TestAnswersThatCannotBe(t *testing.T) {
	const now, hour = 1_700_000_000_000, 3_600_000
	spec := stackOf(plainTier("ip", 3, time.Hour), plainTier("user", 3, time.Hour))
	spec.Tiers[1].DryRun = true
	type numbers []float64
	for name, test := range map[string]struct {
		answer numbers
		ok     bool
	}{
		"short":                        {numbers{now, 1, 1}, true},
		"long":                         {numbers{now, 1, 1, -1, 0, 5, hour, 5, 5}, true},
		"refused":                      {numbers{now, -3, 1, 0, 7, 5, 5, 5, 5}, true},
		"dry and exceeded":             {numbers{now, 1, -3, -1, 7, 5, 5, 5, 5}, true},
		"no time":                      {numbers{0, 1, 1}, false},
		"a time before 1970":           {numbers{-1, 1, 1}, false},
		"a time that is no number":     {numbers{math.NaN(), 1, 1}, false},
		"a time without end":           {numbers{math.Inf(1), 1, 1}, false},
		"no hits":                      {numbers{now, 0, 1}, false},
		"fewer than no hits":           {numbers{now, 1, -1}, false},
		"hits that are no number":      {numbers{now, math.NaN(), 1}, false},
		"hits without end":             {numbers{now, 1, math.Inf(1)}, false},
		"long hits that are no number": {numbers{now, 1, math.NaN(), -1, 0, 5, 5, 5, 5}, false},
		"refused by none that is":      {numbers{now, -3, 1, 2, 0, 5, 5, 5, 5}, false},
		"refused by minus two":         {numbers{now, -3, 1, -2, 0, 5, 5, 5, 5}, false},
		"refused by 1e300":             {numbers{now, -3, 1, 1e300, 0, 5, 5, 5, 5}, false},
		"refused by no number":         {numbers{now, -3, 1, math.NaN(), 0, 5, 5, 5, 5}, false},
		"refused and not exceeded":     {numbers{now, 1, 1, 0, 0, 5, 5, 5, 5}, false},
		"refused by a dry one":         {numbers{now, 1, -3, 1, 0, 5, 5, 5, 5}, false},
		"a generation below zero":      {numbers{now, 1, 1, -1, -7, 5, 5, 5, 5}, false},
		"nothing left":                 {numbers{now, -3, 1, 0, 0, 0, 5, 5, 5}, false},
		"less than nothing left":       {numbers{now, -3, 1, 0, 0, -5, 5, 5, 5}, false},
		"more left than a window":      {numbers{now, -3, 1, 0, 0, hour + 1, 5, 5, 5}, false},
		"left that is no number":       {numbers{now, 1, 1, -1, 0, 5, math.NaN(), 5, 5}, false},
		"too few numbers":              {numbers{now, 1}, false},
		"too many numbers":             {numbers{now, 1, 1, -1, 0, 5, 5, 5, 5, 5}, false},
		"a window below zero":          {numbers{now, 1, 1, -1, 0, 5, 5, -5, 5}, false},
		"a window that is no number":   {numbers{now, 1, 1, -1, 0, 5, 5, 5, math.NaN()}, false},
		"no numbers":                   {numbers{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			fake := redistest.StartFake(t, nil, func(w io.WriteCloser, command []string) {
				_, _ = io.WriteString(w, strangerAnswer(test.answer...))
			})
			c, _ := observed(t, spec, faulty(fake.Addr()))
			_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "b"))
			if test.ok {
				assert.NoError(t, err)
				return
			}
			requireStranger(t, err)
		})
	}
}
