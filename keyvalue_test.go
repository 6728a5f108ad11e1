package tieredlimit

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// victimCookie is a request with the cookie that is guarded.
var victimCookie = request{}.with("Cookie", "sid=valid")

// cookies are requests with a Cookie field each.
func cookies(fields ...string) []request {
	var list []request
	for _, field := range fields {
		list = append(list, request{}.with("Cookie", field))
	}
	return list
}

// queries are requests with a query each.
func queries(texts ...string) []request {
	var list []request
	for _, text := range texts {
		list = append(list, request{url: "http://localhost/?" + text})
	}
	return list
}

// guarded is a site whose only tier admits three requests a minute by a key.
func guarded(t *testing.T, key string) *edge {
	t.Helper()
	name := regexp.MustCompile("[^a-z0-9]+").ReplaceAllString(strings.ToLower(t.Name()), "-")
	return newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit %s {\n trusted_hops 0\n tier x 3/m {\n key %s\n }\n }\n respond ok\n}",
		name[max(0, len(name)-60):], key))
}

// sameAs checks that requests are counted with one that is used up, and are not skipped.
func sameAs(t *testing.T, key string, victim request, others []request) {
	t.Helper()
	e := guarded(t, key)
	require.Equal(t, 3, e.served(4, victim))
	for _, q := range others {
		assert.Equal(t, 0, e.served(1, q), "%.80q %.80q", q.header, q.url)
	}
}

// uncertainAll checks that requests share one budget that is neither the victim's nor new for each of them.
func uncertainAll(t *testing.T, key string, victim request, others []request) {
	t.Helper()
	e := guarded(t, key)
	require.Equal(t, 3, e.served(4, victim))
	served := 0
	for _, q := range others {
		served += e.served(20, q)
	}
	assert.Equal(t, 3, served, "of all together")
	assert.Equal(t, float64(20*len(others)), e.metric(`uncertain_total{stack="`+e.handlers()[0].Name+`",tier="x"}`))
	warnings := e.logs.lines("warn", "cannot be read with certainty")
	require.Len(t, warnings, 1)
	assert.NotContains(t, e.logs.text(), "valid\"")
}

// Whatever stands around a cookie that servers find is no way to have the tier skipped.
func TestACookieIsFoundWhereServersFindIt(t *testing.T) {
	t.Parallel()
	sameAs(t, "{cookie.sid}", victimCookie, append(cookies(
		"sid=valid"+strings.Repeat(";", 3000),
		strings.Repeat(";", 3000)+"sid=valid",
		strings.Repeat("a=b;", 3001)+"sid=valid",
		"sid=valid; broken\x01; also=\"broken",
		" sid = valid ",
		"sid=valid; sid=valid",
		"other=1;sid=valid;SIDE=2; my_sid=3; sid2=4",
	), request{header: http.Header{"Cookie": {"a=b", "sid=valid"}}}))
}

// Spellings that some server decodes are the value that it reads.
func TestSpellingsOfACookieAreOneValue(t *testing.T) {
	t.Parallel()
	spellings := []string{`"valid"`, " valid", "valid\t", "%2576alid", "valid%20", "+valid"}
	for i := 1; i < 1<<5; i++ { // every letter as it is or encoded
		spelling := ""
		for j, c := range "valid" {
			if i>>j&1 == 1 {
				spelling += fmt.Sprintf("%%%02x", c)
			} else {
				spelling += string(c)
			}
		}
		spellings = append(spellings, spelling, strings.ReplaceAll(spelling, "%6c", "%6C"))
	}
	var list []request
	for _, s := range spellings {
		list = append(list, request{}.with("Cookie", "sid="+s))
	}
	sameAs(t, "{cookie.sid}", victimCookie, list)
}

// What servers read differently is one identity: quotes and escapes, bytes around a name, several values, other names
// that some of them take for this one.
func TestUncertainCookiesShareOneBudget(t *testing.T) {
	t.Parallel()
	uncertainAll(t, "{cookie.sid}", victimCookie, cookies(
		`sid="\166alid"`, `sid=" valid"`, `sid="va\lid"`, `sid="valid`, `sid=valid"`, `sid=va"lid`, `sid=va\lid`,
		"\xa0sid=valid", "sid\xa0=valid", "sid=\xa0valid", "sid=valid\xa0", "\x85sid=valid", "\x1csid=valid", "\x00sid=valid", "sid\x00x=valid",
		"x=1 sid=valid", "x=1,sid=valid", "x=1\tsid=valid", "x sid=valid", "x,sid=valid", `x="1"sid=valid`,
		"sid=1; sid=valid", "sid=valid; sid=2", "sid=; sid=valid", "sid=valid; x=\" sid=3\"",
		"SID=valid", "Sid=valid; sid=valid", "%73id=valid", "sid[]=valid", "sid[a]=valid", "sid=valid x",
		"sid=%00valid", "sid=valid%00", "sid=%u0076alid", "sid=%25252525252576alid", "sid=%ff",
		strings.Repeat("a=b;", 17<<10)+"sid=valid",
	))
}

// Names that servers fold are no way around a key with an underscore.
func TestNamesThatServersFold(t *testing.T) {
	t.Parallel()
	uncertainAll(t, "{cookie.api_key}", request{}.with("Cookie", "api_key=valid"), cookies(
		"api.key=valid", "api key=valid", "api[key=valid", "Api_Key=valid", "api_key[]=valid", "api%2ekey=valid",
		"api_key=valid; api.key=2",
	))
}

func TestUncertainParametersShareOneBudget(t *testing.T) {
	t.Parallel()
	uncertainAll(t, "{query.api_key}", queries("api_key=valid")[0], queries(
		"api_key=valid"+strings.Repeat("&", 10_000), strings.Repeat("&", 10_000)+"api_key=valid",
		strings.Repeat("a=b&", 1000)+"api_key=valid",
		"api_key=valid#1", "api_key=valid&x=1#", "x=1#&api_key=valid", "api_key=valid;x=1", "x=1;api_key=valid", "x;api_key=valid", "api_key=valid%", "api_key=%zzvalid", "api_key=valid%2",
		"api.key=valid", "api%20key=valid", "api+key=valid", "+api_key=valid", "%20api_key=valid", "api[key=valid",
		"api_key[]=valid", "api_key[0]=valid", "api_key%00=valid", "api_key%5b%5d=valid", "API_KEY=valid", "api-key=valid",
		"api_key=1&api_key=valid", "api_key=valid&api_key=2", "api_key=&api_key=valid", "api_key=valid&api.key=1",
		"api_key=%00valid", "api_key=%ff", "api_key=%u0076alid", "api_key=valid&"+strings.Repeat("x", 65<<10),
	))
}

func TestSpellingsOfAParameterAreOneValue(t *testing.T) {
	t.Parallel()
	sameAs(t, "{query.api_key}", queries("api_key=valid")[0], queries(
		"api_key=%76alid", "api_key=%76%61%6c%69%64", "%61pi_key=valid", "api%5Fkey=valid", "api_key=valid&api_key=valid", "api_key=%2576alid",
		"api_key=+valid", "api_key=valid%20", "a=b&api_key=valid&c=%&d;e", "x%zz&api_key=valid", "a;b&api_key=valid",
	))
}

// An absent or empty key is absent, and other names are other names.
func TestAbsentKeysFallToTheNext(t *testing.T) {
	t.Parallel()
	for key, list := range map[string][]request{
		"{cookie.sid}": cookies("", "sid", "sid=", `sid=""`, "sid=; sid=", "sidx=1", "xsid=1", "x-sid=1", "my_sid=1; x=sid", "sid2=1", "x=sid=1", "insid=1"),
		"{query.api_key}": queries("", "api_key", "api_key=", "api_key=&api_key", "xapi_key=1", "api_keys=1", "x=api_key", "x=1&y=api_key=3",
			"a;b", "%", "a=%zz"),
		"{header.X-Key}":         {{}, request{}.with("X-Key", ""), request{}.with("X-Key", " "), request{}.with("X-Key", "", "\t")},
		"{header.Authorization}": {{}, request{}.with("Authorization", ""), request{}.with("Authorization", "  ")},
	} {
		t.Run(key, func(t *testing.T) {
			e := guarded(t, key+"\n key {http.tiered_limit.client_ip}")
			require.Equal(t, 3, e.served(4, request{}))
			for _, q := range list {
				assert.Equal(t, 0, e.served(1, q), "%q %q", q.header, q.url)
			}
			assert.Zero(t, e.metric(`uncertain_total{stack="`+e.handlers()[0].Name+`",tier="x"}`))
		})
	}
}

// An uncertain key never falls to an alternative, and the parts beside it and the line it stands on mint nothing.
func TestWhatStandsBesideAnUncertainKeyMintsNothing(t *testing.T) {
	t.Parallel()
	e := guarded(t, "{cookie.sid} {header.X-User}\n key {query.k}\n key {http.tiered_limit.client_ip}")
	served := 0
	for i := range 20 {
		q := request{}.with("Cookie", "sid=1; sid=valid").with("X-User", fmt.Sprint(i)).from(fmt.Sprintf("198.51.100.%d:1", i))
		served += e.served(1, q)
		served += e.served(1, request{url: "http://localhost/?k=1&k=2"}.from(fmt.Sprintf("203.0.113.%d:1", i)))
	}
	assert.Equal(t, 3, served)
}

func TestCredentialsAreComparedAsServersDo(t *testing.T) {
	t.Parallel()
	basic := base64.StdEncoding.EncodeToString([]byte("alice:pass1"))
	of := func(values ...string) []request {
		var list []request
		for _, v := range values {
			list = append(list, request{}.with("Authorization", v))
		}
		return list
	}
	t.Run("the scheme is of no account", func(t *testing.T) {
		sameAs(t, "{header.Authorization}", of("Bearer tOken")[0], of("bearer tOken", "BEARER  tOken", "Bearer\ttOken ", " bEarer \t tOken",
			"Token tOken", "tOken", "X1 tOken", "X2 tOken"))
	})
	t.Run("another", func(t *testing.T) {
		e := guarded(t, "{header.Authorization}")
		for _, q := range of("Bearer tOken", "Bearer token", "1|tOken:x", "Basic "+basic) {
			assert.Equal(t, 3, e.served(4, q), q.header)
		}
	})
	t.Run("basic", func(t *testing.T) {
		sameAs(t, "{header.Authorization}", of("Basic " + basic)[0], of("basic "+basic, "BASIC \t"+basic))
	})
	t.Run("uncertain", func(t *testing.T) {
		list := of("Basic "+basic[:3]+"!"+basic[3:], "Basic "+basic+"====", "Basic "+strings.TrimRight(basic, "="), "Basic "+basic[:len(basic)-2]+"F=",
			"Basic "+basic+" x", "Basic "+basic[:4]+"-"+basic[5:], "Basic "+basic+"\r\n", "Basic"+basic)
		list = append(list, request{}.with("Authorization", "Bearer 1", "Bearer 2"), request{}.with("Authorization", "", "Bearer 2"))
		uncertainAll(t, "{header.Authorization}", of("Basic " + basic)[0], list)
	})
	t.Run("more than one word", func(t *testing.T) {
		uncertainAll(t, "{header.Authorization}", of("Bearer valid")[0], of("Bearer valid 1", "Bearer 1 valid", "Bearer Bearer valid", "Bearer valid, a=1",
			"Bearer valid,", "Bearer a=1,valid", "Bearer valid;1", `Bearer "valid"`, "Bearer 'valid'", `Bearer va\lid`, `Token token="valid", nonce="1"`,
			"Bearervalid", "BEARERvalid", "Bearer", "Bearer valid\xa0", "Bearer\xa0valid", "Bearer valid\x85", "Bearer \xa0valid", "Bearer valid\u00a0",
			"Bearer\u2003valid", "Bearer valid\ufeff", "\x85Bearer valid"))
	})
}

// Blanks outside of ASCII around a value are taken off by some servers, however they are encoded; such a value is no new one.
func TestBlanksOfEveryKindAroundAValue(t *testing.T) {
	t.Parallel()
	blanks := []string{"\u0085", "\u00a0", "\u1680", "\u180e", "\u2000", "\u2003", "\u200b", "\u200d", "\u2028", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff"}
	var fields, texts []string
	for _, blank := range blanks {
		for _, value := range []string{"valid" + blank, blank + "valid", " " + blank + " valid", "valid" + blank + blank + " "} {
			fields = append(fields, value)
			texts = append(texts, strings.ReplaceAll(url.QueryEscape(value), "+", "%20"))
		}
	}
	var headers, sent, params []request
	for _, field := range append(fields, "valid\xa0", "\xa0valid", "valid\x85", "\x85valid", "valid\xa0 ") {
		headers = append(headers, request{}.with("X-Key", field))
	}
	for _, text := range texts {
		sent = append(sent, request{}.with("Cookie", "sid="+text))
		params = append(params, queries("api_key=" + text)[0])
	}
	t.Run("header", func(t *testing.T) { uncertainAll(t, "{header.X-Key}", request{}.with("X-Key", "valid"), headers) })
	t.Run("cookie", func(t *testing.T) { uncertainAll(t, "{cookie.sid}", victimCookie, sent) })
	t.Run("query", func(t *testing.T) { uncertainAll(t, "{query.api_key}", queries("api_key=valid")[0], params) })
	t.Run("letters are none", func(t *testing.T) {
		e := guarded(t, "{header.X-Key}")
		for _, name := range []string{"\u00e0", "voil\u00e0", "\u00c5sa", "Lule\u00c5", "\u5f20\u4e09", "na\u00efve", "a\u00a0b"} {
			assert.Equal(t, 3, e.served(4, request{}.with("X-Key", name)), name)
		}
	})
}

// Fields that servers fold into the key's do not get past Caddy.
func TestFieldsThatServersFoldDoNotReachThem(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\n tiered_limit folded-fields {\n trusted_hops 0\n tier x 3/m {\n key {header.X-Api-Key}\n }\n }\n"+
		" respond {http.request.header.X_Api_Key}{http.request.header.X-Api_Key}{http.request.header.X-Api.Key}\n}")
	for _, name := range []string{"X_Api_Key", "X-Api_Key", "X_Api-Key", "X-Api.Key"} {
		assert.Empty(t, e.send(request{}.with(name, "valid")).Body.String(), name)
	}
}

// An operator finds the counter of uncertain keys, and values in any spelling.
func TestUncertainKeysCanBeInspectedAndReset(t *testing.T) {
	t.Parallel()
	e := guarded(t, "{cookie.sid}")
	stack := e.handlers()[0].Name
	bad := request{}.with("Cookie", "sid=1; sid=2")
	require.Equal(t, 3, e.served(4, bad))
	require.Equal(t, 3, e.served(4, victimCookie))
	admin := &Admin{running: func() *App { return e.app }}
	read := func(q *counterQuestion) *counterAnswer {
		q.Stack, q.Tier = stack, "x"
		a, err := admin.inspect(probeRequest("192.0.2.1:1"), q)
		require.NoError(t, err)
		return a
	}
	got := read(&counterQuestion{Uncertain: true})
	assert.Equal(t, int64(3), got.Limits[0].Used)
	assert.Equal(t, []string{uncertainKey}, got.Key)
	got = read(&counterQuestion{Key: texts{`"%76alid"`}})
	assert.Equal(t, int64(3), got.Limits[0].Used)
	assert.Equal(t, []string{"valid"}, got.Key)
	_, err := admin.inspect(probeRequest("192.0.2.1:1"), &counterQuestion{Stack: stack, Tier: "x", Key: texts{`"`}})
	assert.ErrorContains(t, err, "cannot be read with certainty")
	_, err = admin.reset(probeRequest("192.0.2.1:1"), &counterQuestion{Stack: stack, Tier: "x", Uncertain: true})
	require.NoError(t, err)
	assert.Equal(t, 3, e.served(4, bad))
}
