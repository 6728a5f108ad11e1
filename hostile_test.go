package tieredlimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// Whoever has one valid value of a key cannot have a new budget for each value that is put beside it, in front of it
// or behind it, or for each way to write it that means the same.
func TestAKeyCannotBeVariedBesideAValidValue(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		key  string
		vary func(n int) request
		want int // of 20 requests: one for the valid value, one for all that give several
	}{
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("X-Api-Key", "valid", fmt.Sprint(n)) }, 1},
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("X-Api-Key", fmt.Sprint(n), "valid") }, 1},
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("x-api-key", "valid", "", fmt.Sprint(n)) }, 1},
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("X-Api-Key", make([]string, n+1)...) }, 20},
		{"{header.X-Api-Key}", func(n int) request {
			values := make([]string, n+1)
			for i := range values {
				values[i] = "valid"
			}
			return request{}.with("X-Api-Key", values...)
		}, 1},
		{"k-{header.Authorization}", func(n int) request {
			return request{}.with("Authorization", "Bearer valid", fmt.Sprintf("Bearer %d", n))
		}, 1},
		{"{query.key}", func(n int) request { return request{url: fmt.Sprintf("http://h/?key=valid&key=%d", n)} }, 1},
		{"{query.key}", func(n int) request { return request{url: fmt.Sprintf("http://h/?key=%d&key=valid", n)} }, 1},
		{"{query.key}", func(n int) request { return request{url: fmt.Sprintf("http://h/?n=%d&key=valid&k%%65y=valid", n)} }, 1},
		{"{cookie.sid}", func(n int) request { return request{}.with("Cookie", fmt.Sprintf("SID=%d; sid=valid", n)) }, 1},
		{"{cookie.sid}", func(n int) request { return request{}.with("Cookie", fmt.Sprintf("Sid=%d", n), "sid=valid") }, 1},
		{"{cookie.sid}", func(n int) request { return request{}.with("Cookie", fmt.Sprintf("sid=valid; sid=%d", n)) }, 1},
		{"{host}", func(n int) request { return request{url: "http://" + inCase("shop.example", n) + "/"} }, 1},
		{"{host}", func(n int) request { return request{url: fmt.Sprintf("http://shop.example:%d/", 80+n)} }, 1},
	} {
		e := newEdge(t, keyedSite(fmt.Sprintf("vary-%d", i), "key "+c.key))
		got := 0
		for n := range 20 {
			got += e.served(1, c.vary(n))
		}
		assert.Equal(t, c.want, got, "%s, row %d: served of 20", c.key, i)
	}
}

// inCase writes a text with the letters whose bit in n is set in upper case.
func inCase(s string, n int) string {
	b := []byte(s)
	for i := range b {
		if n>>(i%8)&1 == 1 && 'a' <= b[i] && b[i] <= 'z' {
			b[i] -= 'a' - 'A'
		}
	}
	return string(b)
}

// Requests that give several values share one budget, which is nobody's who gives one.
func TestSeveralValuesAreNobodysValue(t *testing.T) {
	t.Parallel()
	e := newEdge(t, keyedSite("several", "key {header.X-A} {header.X-B}"))
	assert.Equal(t, 1, e.served(2, request{}.with("X-A", "a", "b").with("X-B", "x")), "several of the first part")
	assert.Equal(t, 0, e.served(1, request{}.with("X-A", "c", "d").with("X-B", "x")), "others")
	assert.Equal(t, 1, e.served(2, request{}.with("X-A", "a", "b").with("X-B", "y")), "the other part still counts")
	assert.Equal(t, 1, e.served(2, request{}.with("X-A", "x").with("X-B", "a", "b")), "several of the second part")
	for _, one := range []string{"a", "b", "a,b", "a, b"} {
		assert.Equal(t, 1, e.served(2, request{}.with("X-A", one).with("X-B", "x")), "%q alone", one)
	}
}

// A9: refusals that are not noted in the order in which they came write one line a second all the same.
func TestA9RefusalsOutOfOrderAreOneLineASecond(t *testing.T) {
	t.Parallel()
	start := time.Unix(1_700_000_000, 0)
	for _, c := range []struct {
		name  string
		times []time.Duration
		want  []int64 // what each line stands for
	}{
		{"around the turn of a second", []time.Duration{0, 1, 0, 1, 0, 1, 0, 1}, []int64{1, 1}},
		{"late by some seconds", []time.Duration{5, 3, 6, 1, 5, 0, 7}, []int64{1, 2, 4}},
		{"in order", []time.Duration{0, 0, 1, 1, 2}, []int64{1, 2, 2}},
		{"the clock set back", []time.Duration{3600, 0, 0, 1, 0, 1}, []int64{1, 1, 2}},
	} {
		var l refusalLog
		var got []int64
		for _, at := range c.times {
			if count, write := l.next(start.Add(at * time.Second)); write {
				got = append(got, count)
			}
		}
		assert.Equal(t, c.want, got, c.name)
	}
}
