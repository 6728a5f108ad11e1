package tieredlimit

import (
	"net/url"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What people take for one text is one budget where a key is folded: in any case, with blanks around it or doubled inside. In a
// query, a header field or a cookie, and anything else that a key may hold. Other texts have budgets of their own.
func TestAFoldedKeyIsOneBudget(t *testing.T) {
	t.Parallel()
	spellings := []string{
		"max mustermann@example.com", "Max Mustermann@example.com", "MAX MUSTERMANN@EXAMPLE.COM", " max mustermann@example.com",
		"max mustermann@example.com  ", "max  mustermann@Example.com", "max\u00a0mustermann@example.com", "\u00a0max mustermann@example.com\u2003",
		"\ufeffmax mustermann@example.com",
	}
	in := map[string]func(text string) request{
		"key fold {query.email}":  func(text string) request { return request{url: "http://localhost/?email=" + url.QueryEscape(text)} },
		"key fold {header.X-Who}": func(text string) request { return request{}.with("X-Who", text) },
		"key fold {cookie.who}":   func(text string) request { return request{}.with("Cookie", "who="+url.PathEscape(text)) },
	}
	for key, q := range in {
		e := newEdge(t, freshListen()+" {\ntiered_limit {\ntier mail 3/h {\n"+key+"\n}\n}\nrespond ok\n}\n")
		served := 0
		for _, text := range spellings {
			if strings.Contains(key, "cookie") && strings.ContainsAny(text, "\u00a0\u2003\ufeff") && text != spellings[6] {
				continue // blanks of that kind around a cookie are uncertain as ever
			}
			served += e.served(1, q(text))
		}
		assert.Equal(t, 3, served, key)
		assert.Equal(t, 1, e.served(1, q("moritz@example.com")), key)
		assert.Equal(t, 1, e.served(1, q("maxmustermann@example.com")), key)
		e.close()
	}
}

// Without the word, each spelling is a text of its own. With it, what is uncertain stays so, and a key is absent only if it is
// empty.
func TestWhatFoldingLeaves(t *testing.T) {
	t.Parallel()
	site := func(key string) *edge {
		return newEdge(t, freshListen()+" {\ntiered_limit fold-leaves {\ntrusted_hops 0\ntier mail 1/h {\n"+key+"\n}\n}\nrespond ok\n}\n")
	}
	query := func(text string) request { return request{url: "http://localhost/?" + text} }
	e := site("key {query.email}")
	assert.Equal(t, 2, e.served(1, query("email=a"))+e.served(1, query("email=A")))
	e.close()
	e = site("key fold {query.email}")
	assert.Equal(t, 5, e.served(5, query("x=1")), "absent")
	assert.Equal(t, 1, e.served(1, query("email=a&email=b")), "uncertain")
	assert.Equal(t, 0, e.served(1, query("email=%ff")), "and so the same")
	assert.Equal(t, 1, e.served(1, query("email=a")))
	e.close()
	e = site("key fold {query.email} {http.tiered_limit.client_ip}\nkey fold Form-{query.form}")
	assert.Equal(t, 1, e.served(1, query("email=a"))+e.served(1, query("email=A")))
	assert.Equal(t, 1, e.served(1, request{url: "http://localhost/?email=a", peer: "[2001:db8::a]:1"}), "another client")
	assert.Equal(t, 0, e.served(1, request{url: "http://localhost/?email=a", peer: "[2001:db8::b]:1"}), "of one network")
	e.close()
	for key, want := range map[string]string{
		"key fold a": `key "a" has nothing to fold`, "key fold fold": `key "fold" has nothing to fold`,
		"key fold x{http.tiered_limit.client_ip}": `key part "x{http.tiered_limit.client_ip}": the client's address cannot be folded`,
	} {
		_, err := tryLoad(t, freshListen()+" {\ntiered_limit {\ntrusted_hops 0\ntier mail 1/h {\n"+key+"\n}\n}\n}\n")
		assert.ErrorContains(t, err, want)
	}
	e = site("key fold")
	assert.Equal(t, 1, e.served(2, query("email=a")), "the word alone is a text as any other")
}

// An operator finds a folded counter by any of its spellings.
func TestAFoldedCounterIsFoundBySpelling(t *testing.T) {
	t.Parallel()
	e := newEdge(t, freshListen()+" {\ntiered_limit fold-found {\ntier mail 9/h {\nkey fold {query.email}\n}\n}\nrespond ok\n}\n")
	for _, spelling := range []string{"a b", "A  B", " a B "} {
		c := counter{h: e.handlers()[0], tier: e.handlers()[0].tiers[0]}
		require.NoError(t, c.identify(&counterQuestion{Key: []string{spelling}}))
		assert.True(t, strings.HasSuffix(string(c.claim.Identity), "\x00\x00\x00\x03A B"), "%q", c.claim.Identity)
	}
}

// Folding is Unicode's: two characters are one if, and only if, simple case folding takes them for one. Nothing gets longer.
func TestFoldingIsUnicodes(t *testing.T) {
	t.Parallel()
	for r := rune(0); r <= unicode.MaxRune; r++ {
		if r >= 0xd800 && r < 0xe000 || isBlank(r) {
			continue
		}
		folded := foldRune(r)
		require.LessOrEqual(t, utf8.RuneLen(folded), utf8.RuneLen(r), "%U", r)
		require.Equal(t, folded, foldRune(folded), "%U", r)
		require.True(t, strings.EqualFold(string(r), string(folded)), "%U", r)
		for other := unicode.SimpleFold(r); other != r; other = unicode.SimpleFold(other) {
			require.Equal(t, folded, foldRune(other), "%U and %U", r, other)
		}
	}
	for text, want := range map[string]string{
		"": "", " ": "", "a": "A", " a ": "A", "a \t\u3000b": "A B", "\xff \xfe": "\xff \xfe", "straße": "STRAßE", "ſK": "SK", "a\xc3": "A\xc3",
	} {
		assert.Equal(t, "x"+want, string(foldText([]byte("x"+text), 1)), "%q", text)
	}
}
