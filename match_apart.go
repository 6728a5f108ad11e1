package tieredlimit

import (
	"reflect"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// apart reports whether it is certain that no request is matched by both: they name other methods, hosts or paths, or one
// is what the other is not.
func apart(a, b caddyhttp.MatcherSets) bool {
	if len(a) == 0 || len(b) == 0 {
		return false
	}
	for _, mine := range a {
		for _, theirs := range b {
			if !setsApart(mine, theirs) && !negates(mine, theirs) && !negates(theirs, mine) {
				return false
			}
		}
	}
	return true
}

// setsApart reports whether one matcher of each set are apart, so that the sets are.
func setsApart(a, b caddyhttp.MatcherSet) bool {
	for _, mine := range a {
		for _, theirs := range b {
			if matchersApart(mine, theirs) {
				return true
			}
		}
	}
	return false
}

// matchersApart compares matchers of one kind.
func matchersApart(a, b any) bool {
	switch a := plainMatcher(a).(type) {
	case caddyhttp.MatchMethod:
		b, same := plainMatcher(b).(caddyhttp.MatchMethod)
		return same && allApart(a, b, func(x, y string) bool { return !strings.EqualFold(x, y) })
	case caddyhttp.MatchHost:
		b, same := plainMatcher(b).(caddyhttp.MatchHost)
		return same && allApart(a, b, patternsApart)
	case caddyhttp.MatchPath:
		b, same := plainMatcher(b).(caddyhttp.MatchPath)
		return same && allApart(a, b, patternsApart)
	}
	return false
}

// plainMatcher is a matcher that may have been given by its address.
func plainMatcher(m any) any {
	switch m := m.(type) {
	case *caddyhttp.MatchMethod:
		return *m
	case *caddyhttp.MatchHost:
		return *m
	case *caddyhttp.MatchPath:
		return *m
	}
	return m
}

func allApart(a, b []string, apart func(x, y string) bool) bool {
	for _, x := range a {
		for _, y := range b {
			if !apart(x, y) {
				return false
			}
		}
	}
	return true
}

// patternsApart reports whether no text is matched by both patterns. What stands in front of the first wildcard or
// placeholder of each decides; there may be more that are apart.
func patternsApart(a, b string) bool {
	a, openA := literalStart(a)
	b, openB := literalStart(b)
	switch {
	case openA && openB:
		return !strings.HasPrefix(a, b) && !strings.HasPrefix(b, a)
	case openA:
		return !strings.HasPrefix(b, a)
	case openB:
		return !strings.HasPrefix(a, b)
	}
	return a != b
}

// literalStart is the text in front of a pattern's first wildcard or placeholder, in lower case, and whether there is one.
// An escaped byte may be matched as it is written or decoded.
func literalStart(pattern string) (start string, open bool) {
	if i := strings.IndexAny(pattern, "*{%"); i >= 0 {
		return strings.ToLower(pattern[:i]), true
	}
	return strings.ToLower(pattern), false
}

// negates reports whether one set has a not with a set inside that matches whatever the other set does.
func negates(a, b caddyhttp.MatcherSet) bool {
	for _, m := range a {
		not, ok := m.(*caddyhttp.MatchNot)
		if ok && slices.ContainsFunc(not.MatcherSets, func(inside caddyhttp.MatcherSet) bool { return wider(inside, b) }) {
			return true
		}
	}
	return false
}

// wider reports whether each matcher of a set is also in the other.
func wider(a, b caddyhttp.MatcherSet) bool {
	for _, m := range a {
		if !slices.ContainsFunc(b, func(other any) bool { return reflect.DeepEqual(plainMatcher(m), plainMatcher(other)) }) {
			return false
		}
	}
	return true
}
