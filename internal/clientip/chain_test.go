package clientip

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A chain is walked from the right over all field lines, entry by entry as the plain reading splits them, and always tells
// how many are left.
func TestChainWalk(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	pick := func(from ...string) string { return from[rnd.IntN(len(from))] }
	var f Forwarded // used again and again
	for range 20_000 {
		name := pick(DefaultHeader, ForwardedHeader, "X-Real-Ip")
		var lines []string
		for range rnd.IntN(4) {
			var entries []string
			for range rnd.IntN(5) {
				entry := pick("203.0.113.7", " 10.0.0.1\t", "unknown", "", "[::1]:443", `"a`)
				if name == ForwardedHeader {
					entry = pick("for=203.0.113.7", ` for="[::1]:443";proto=http`, "proto=http", "", `for="a\"b,c"`, "by=x ; for=_y")
				}
				entries = append(entries, entry)
			}
			lines = append(lines, strings.Join(entries, ","))
		}
		want, ok := plainEntries(name, lines)
		chain, parsed := f.Open(name, lines)
		assert.Equal(t, ok, parsed, "%s: %q", name, lines)
		if !ok {
			continue
		}
		var got []string
		for left := len(want); ; left-- {
			assert.Equal(t, left, chain.Len(), "%q", lines)
			entry, more := chain.Next()
			if !more {
				assert.Zero(t, left, "%q", lines)
				break
			}
			got = append(got, entry)
		}
		_, more := chain.Next()
		assert.False(t, more, "the end is the end")
		assert.Zero(t, chain.Len())
		slices.Reverse(got)
		assert.ElementsMatch(t, want, got, "%s: %q", name, lines)
		assert.Equal(t, strings.Join(want, "|"), strings.Join(got, "|"), "%s: %q", name, lines)
	}
}

// Of a long Forwarded header the rightmost elements can be walked, and all are counted.
func TestChainWalkOfManyElements(t *testing.T) {
	for _, count := range []int{MaxHops, MaxHops + 1, MaxHops + 2, 1000} {
		var elements []string
		for i := range count {
			elements = append(elements, fmt.Sprintf("for=_%d", i))
		}
		var f Forwarded
		chain, ok := f.Open(ForwardedHeader, []string{strings.Join(elements, ",")})
		assert.True(t, ok)
		walked := 0
		for {
			assert.Equal(t, count-walked, chain.Len())
			entry, more := chain.Next()
			if !more {
				break
			}
			walked++
			assert.Equal(t, fmt.Sprintf("_%d", count-walked), entry)
		}
		assert.Equal(t, min(count, MaxHops+1), walked)
	}
}

// A Forwarded header that does not parse leaves nothing behind that a later one could be mistaken for.
func TestForwardedIsUsedAgain(t *testing.T) {
	var f Forwarded
	_, ok := f.Open(ForwardedHeader, []string{"for=1.1.1.1, for=2.2.2.2", `for="`})
	assert.False(t, ok)
	chain, ok := f.Open(ForwardedHeader, []string{"for=3.3.3.3"})
	assert.True(t, ok)
	assert.Equal(t, 1, chain.Len())
	chain, ok = f.Open(ForwardedHeader, nil)
	assert.True(t, ok)
	assert.Zero(t, chain.Len())
	_, more := chain.Next()
	assert.False(t, more)
}
