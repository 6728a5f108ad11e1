package tieredlimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// FuzzCaddyfile reads random lines as a tiered_limit block. It never panics, an error names the file, and what is
// accepted is the same after it was written as JSON and read again. If it also loads, it answers requests.
func FuzzCaddyfile(f *testing.F) {
	for _, block := range []string{
		"tier ip 5/s", "tier ip off", "trusted_hops 0\ntier ip 5/s 6/m {\nkey a {header.B}\nmatch {\nmethod GET\n}\ncharge checked\ndry_run\n}",
		"trusted_hops 2 Forwarded\nnat64_prefix 2001:db8:64::/96\nipv4_prefix 24\nipv6_prefix 48\ntier global 1/d\nexempt /a*\nexempt_clients 10.0.0.0/8 ::1",
		"charge checked\npreflight count\nheaders draft-11\nbody graphql\ncors * {\n}\njitter 5\nlog_keys\ndry_run\nstore memory {\nmax_keys 9\n}\ntier user 0/1h",
		"tier x 1/1ms {\nkey {http.request.nope}\n}", "tier x 1/s {\nkey \"\n}", "tier \"{\" {\n}\n}", "tier ip 5/s {\nmatch `path('/')`\n}",
		"cors https://a.test {\ncredentials\n}\ntier ip 1/m", "tier ip 99999999999/99999999d", "tier ip 1/s {\nmatch not path /a\n}",
	} {
		f.Add(block)
	}
	f.Fuzz(func(t *testing.T, block string) { readBlock(t, block) })
}

// readBlock reads lines as a tiered_limit block, and tells whether they were accepted, and whether they loaded.
func readBlock(t *testing.T, block string) (accepted, loaded bool) {
	t.Helper()
	tokens, err := caddyfile.Tokenize([]byte("tiered_limit {\n"+block+"\n}"), "Fuzzfile")
	if err != nil {
		return false, false
	}
	handler, err := parseDirective(httpcaddyfile.Helper{Dispenser: caddyfile.NewDispenser(tokens)})
	if err != nil {
		require.ErrorContains(t, err, "Fuzzfile:")
		return false, false
	}
	first, err := json.Marshal(handler)
	require.NoError(t, err)
	var again Handler
	require.NoError(t, caddy.StrictUnmarshalJSON(first, &again), "%s", first)
	require.NoError(t, again.check(), "%s", first)
	second, err := json.Marshal(&again)
	require.NoError(t, err)
	require.JSONEq(t, string(first), string(second))
	e, err := tryHandlerJSON(t, string(first[1:len(first)-1]))
	if err != nil {
		return true, false // for what is only known at load, such as a placeholder that does not exist
	}
	for range 3 {
		if code := e.send(request{}).Code; code != http.StatusOK && code != http.StatusTooManyRequests {
			t.Fatalf("status %d by %s", code, first)
		}
	}
	e.close()
	e.app.handlers = nil
	return true, true
}

// Blocks of random words, many of which make sense.
func TestCaddyfileOfRandomWords(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	from := func(list string) string { words := strings.Split(list, "|"); return words[r.IntN(len(words))] }
	accepted, loaded, refused := 0, 0, 0
	for range 3000 {
		var b strings.Builder
		for range r.IntN(3) {
			b.WriteString(from("trusted_hops|ipv4_prefix|nat64_prefix|charge|exempt|exempt_clients|preflight|headers|body|cors|jitter|log_keys|dry_run|store|x"))
			for range r.IntN(3) {
				b.WriteString(" " + from(`0|1|24|64|served|checked|/a|*|10.0.0.0/8|::1|count|none|text|draft-11|https://a.test|memory|""|-1|X-A|{|"{"`))
			}
			b.WriteString("\n")
		}
		for range 1 + r.IntN(2) {
			b.WriteString("tier " + from("ip|user|global|x|ip|ip|global") + " " + from("5/s|5/s 6/m|off|0/m|5/s|600/60000ms|5|/m|1e3/m"))
			if r.IntN(2) == 0 {
				b.WriteString(" {\n")
				for range r.IntN(3) {
					b.WriteString(from("key a|key {http.request.method}|key {a} b|key {http.request.nope}|match /a|match method GET|match {\nnot path /a\n}|"+
						"charge checked|charge|dry_run|x|key {|}|match `false`") + "\n")
				}
				b.WriteString("}")
			}
			b.WriteString("\n")
		}
		switch a, l := readBlock(t, b.String()); {
		case l:
			loaded++
		case a:
			accepted++
		default:
			refused++
		}
	}
	if loaded < 100 || refused < 100 || accepted == 0 {
		t.Errorf("seed %d: %d loaded, want at least 100; %d were refused at load, want some; %d in reading, want at least 100", seed,
			loaded, accepted, refused)
	}
}

// fuzzSource gives keys the values of one request.
type fuzzSource struct {
	r    *http.Request
	repl *caddy.Replacer
	addr netip.Addr
}

func (s fuzzSource) appendClient(buf []byte) []byte { return s.addr.AppendTo(buf) }
func (s fuzzSource) request() *http.Request         { return s.r }
func (s fuzzSource) replacer() *caddy.Replacer      { return s.repl }
func (s fuzzSource) unknownPlaceholder(string)      {}

// fuzzIdentity is the identity of a request with the header fields A and B, by the first usable one of the keys that a
// text defines, a line each with tabs between the parts. Beside it comes a description of what it should depend on.
func fuzzIdentity(definition, a, b string, last byte, masks clientip.Prefixes) (identity []byte, meaning string, ok bool) {
	tier := &Tier{Name: "t"}
	for line := range strings.SplitSeq(definition, "\n") {
		tier.Keys = append(tier.Keys, strings.Split(line, "\t"))
	}
	if tier.checkKeys() != nil {
		return nil, "", false
	}
	keys, err := compileKeys(tier, masks, fuzzProbe)
	if err != nil {
		return nil, "", false
	}
	r := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
	r.Header = http.Header{"A": {a}, "B": {b}}
	repl := caddy.NewEmptyReplacer()
	repl.Set("a", a)
	repl.Set("http.vars.b", b)
	src := fuzzSource{r: r, repl: repl, addr: masks.Mask(netip.AddrFrom4([4]byte{192, 0, 2, last}))}
	inA, inB := strings.Trim(a, " \t"), strings.Trim(b, " \t") // blanks around a field's value are no part of it
	values := strings.NewReplacer(`\{`, "{", `\}`, "}", "{http.request.header.A}", inA, "{http.request.header.B}", inB,
		"{http.request.header.a}", inA, "{http.request.header.b}", inB, "{a}", a, "{http.vars.b}", b,
		"{http.tiered_limit.client_ip}", src.addr.String())
	for i := range keys {
		found, used := keys[i].appendIdentity(nil, src)
		if used == absent {
			continue
		}
		texts := []string{fmt.Sprintf("%q", tier.Keys), fmt.Sprint(i)}
		for _, k := range keys {
			if k.usesClient {
				texts = append(texts, fmt.Sprint(masks))
				break
			}
		}
		if !keys[i].fixed {
			for _, part := range tier.Keys[i] {
				texts = append(texts, values.Replace(part))
			}
		}
		return found, fmt.Sprintf("%q", texts), true
	}
	return nil, "", false
}

var fuzzProbe = newPlaceholderProbe(nil)

// FuzzKeyEncoding compares the identities of two requests under two definitions of a key, or one. They are equal if and only if
// the definitions, the alternatives that were used, and the values of all parts are.
func FuzzKeyEncoding(f *testing.F) {
	const two = "{http.request.header.A}\t{http.request.header.B}"
	f.Add(two, two, "a:b", "c", "a", "b:c", byte(1), byte(1), byte(32), byte(32), true)
	f.Add(two, two, "", "ab", "ab", "", byte(1), byte(1), byte(32), byte(32), true)
	f.Add("{a}\n{http.tiered_limit.client_ip}", "{a}\n{http.tiered_limit.client_ip}", "192.0.2.1", "", "", "", byte(1), byte(1), byte(32), byte(32), true)
	f.Add("{http.tiered_limit.client_ip}", "{http.tiered_limit.client_ip}", "", "", "", "", byte(1), byte(2), byte(24), byte(24), true)
	f.Add("x{a}", "{a}", "y", "", "xy", "", byte(1), byte(1), byte(32), byte(32), false)
	f.Add("{a}\n{http.vars.b}", "{http.vars.b}\n{a}", "v", "", "", "v", byte(1), byte(1), byte(32), byte(31), false)
	f.Add(two, two, strings.Repeat("x", 256), "", strings.Repeat("x", 257), "", byte(1), byte(1), byte(32), byte(32), true)
	f.Add("{http.request.header.a}0", "", "0", "", "1", "", byte(1), byte(1), byte(32), byte(32), true)
	f.Add("static", `\{static\}`, "", "", "", "", byte(0), byte(0), byte(32), byte(32), false)
	f.Add(two, two, "\x00\x00\x00\x01a", "", "\x00", "\x00\x00\x01a", byte(1), byte(1), byte(32), byte(32), true)
	f.Fuzz(func(t *testing.T, def1, def2, a1, b1, a2, b2 string, last1, last2, bits1, bits2 byte, same bool) {
		if same {
			def2, bits2 = def1, bits1
		}
		if !utf8.ValidString(def1) || !utf8.ValidString(def2) {
			return // configurations are JSON
		}
		compareIdentities(t, [2]string{def1, def2}, [2]string{a1, a2}, [2]string{b1, b2}, [2]byte{last1, last2}, [2]byte{bits1, bits2})
	})
}

// compareIdentities compares the identities of two requests, each under its own definition of a key.
func compareIdentities(t *testing.T, def, a, b [2]string, last, bits [2]byte) (equal, valid bool) {
	t.Helper()
	one, meaning1, ok1 := fuzzIdentity(def[0], a[0], b[0], last[0], clientip.Prefixes{V4: int(bits[0] % 33), V6: 64})
	two, meaning2, ok2 := fuzzIdentity(def[1], a[1], b[1], last[1], clientip.Prefixes{V4: int(bits[1] % 33), V6: 64})
	if !ok1 || !ok2 {
		return false, false
	}
	if len(one) > 9+len(def[0])*(4+maxPart) {
		t.Fatalf("the identity of %s has %d bytes", meaning1, len(one))
	}
	got, want := bytes.Equal(one, two), meaning1 == meaning2
	if got != want {
		t.Fatalf("equal: %v, want %v\n%x of %s\n%x of %s", got, want, one, meaning1, two, meaning2)
	}
	return got, true
}

// Identities of many random pairs, made of few and short pieces so that they nearly meet.
func TestKeyEncodingOfRandomPairs(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	text := func(most int, from ...string) string {
		var b strings.Builder
		for range r.IntN(most + 1) {
			b.WriteString(from[r.IntN(len(from))])
		}
		return b.String()
	}
	definition := func() string {
		return text(3, "{http.request.header.A}", "{http.request.header.B}", "{a}", "{http.vars.b}", "x") + text(1, "\t", "\n") +
			text(3, "{http.tiered_limit.client_ip}", "{a}", "{http.vars.b}", "\t{a}", "\n{a}", "1", `\{`) + "y"
	}
	value := func() string {
		return text(3, "a", ":", ",", "\x00", "\x00\x00\x00\x01", "192.0.2.1", strings.Repeat("z", 128), "\xff")
	}
	equal, different := 0, 0
	for range 20_000 {
		def := [2]string{definition(), definition()}
		bits := [2]byte{byte(r.IntN(33)), 32}
		if r.IntN(4) > 0 {
			def[1], bits[1] = def[0], bits[0]
		}
		same, valid := compareIdentities(t, def, [2]string{value(), value()}, [2]string{value(), value()},
			[2]byte{byte(r.IntN(3)), byte(r.IntN(3))}, bits)
		switch {
		case same:
			equal++
		case valid:
			different++
		}
	}
	if equal < 100 || different < 10_000 {
		t.Errorf("seed %d: %d equal pairs, want at least 100; %d different, want at least 10000", seed, equal, different)
	}
}

// FuzzKeyValues holds the scanners of Cookie fields and queries against readers that are slow and plain: whatever one of
// them finds is found, and what is certain is what they find.
func FuzzKeyValues(f *testing.F) {
	for _, seed := range []string{
		"sid=valid", "a=b; sid=valid", `sid="valid"`, "sid=%76alid", "sid=1; sid=2", "x=1 sid=valid", "\xa0sid=valid", "SID=a", "sid[]=1", "sid=a%00",
		"a&sid=valid;x", "sid=%zz", "sid=+a&b", "[sid]=1", "sid.x=1", "?sid=valid", "a;b&sid=x", "sid==", "sid=a=b", "%73id=x", "s+id=1", "sid\v=1",
	} {
		f.Add(seed)
	}
	f.Fuzz(checkKeyValues)
}

// checkKeyValues checks a text as a Cookie field and as a query.
func checkKeyValues(t *testing.T, text string) {
	for _, kind := range []string{"cookie sid", "query sid"} {
		value, found := readKey(kind, text)
		if found != present && value != "" {
			t.Fatalf("%s: %q is read though it is not present: %q", kind, value, text)
		}
		reads := goReads(kind, text)
		separator := "&"
		if kind == "cookie sid" {
			separator = ";"
		}
		for pair := range strings.SplitSeq(text, separator) {
			if name, v, _ := strings.Cut(pair, "="); strings.Trim(name, " \t") == "sid" {
				reads = append(reads, strings.Trim(v, " \t"))
			}
		}
		for _, read := range reads {
			decoded, _ := appendDecoded(nil, read)
			if found == absent && strings.Trim(string(decoded), " \t\"") != "" {
				t.Fatalf("%s: %q is read, the tier is skipped: %q", kind, read, text)
			}
			if honest, _ := readKey(kind, "sid="+read); found == present && plainValue.MatchString(read) && honest != value {
				t.Fatalf("%s: %q is read, %q is counted: %q", kind, read, value, text)
			}
		}
		if again, same := readKey(kind, text); again != value || same != found {
			t.Fatalf("%s: read differently the second time: %q", kind, text)
		}
	}
}
