package tieredlimit

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/logging"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

// filteredRecording writes access lines through Caddy's own log filters, by field.
func filteredRecording(t *testing.T, filters map[string]string) *recording {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	encoder := &logging.FilterEncoder{WrappedRaw: json.RawMessage(`{"format":"json"}`), FieldsRaw: make(map[string]json.RawMessage)}
	for field, filter := range filters {
		encoder.FieldsRaw[field] = json.RawMessage(filter)
	}
	require.NoError(t, encoder.Provision(ctx))
	return &recording{encoder, true}
}

// What a log filter has altered of the fields that a stack needs is said, with the tiers that it concerns; nothing is suggested for
// these, and no hop count is told from it. Other tiers, and filters of fields that nobody needs, are left alone.
func TestAReplayKnowsWhatLogFiltersHaveAltered(t *testing.T) {
	const (
		xffField = "request>headers>X-Forwarded-For"
		peer     = "request>remote_ip"
		hash     = `{"filter":"hash"}`
		mask     = `{"filter":"ip_mask","ipv4_cidr":16,"ipv6_cidr":32}`
		replaced = `{"filter":"replace","value":"xxx"}`
		deleted  = `{"filter":"delete"}`
		renamed  = `{"filter":"rename","name":"other"}`
	)
	config := "{\nauto_https off\n}\n" + `:8080 {
	tiered_limit altered {
		trusted_hops 1
		tier ip 50/m
		tier key 50/m {
			key {header.X-Api-Key}
		}
		tier session 50/m {
			key {cookie.sid}
		}
		tier search 50/m {
			key {query.token}
		}
		tier global 1000000/m
	}
	respond ok
}
`
	var requests []recorded
	for i := range 3000 {
		q := recorded{at: testStart.Add(time.Duration(i) * 10 * time.Millisecond)}
		q.url = fmt.Sprintf("http://localhost/?token=t%d", i%90)
		q.peer = fmt.Sprintf("10.0.0.%d:1", 1+i%5)
		q.header = http.Header{"X-Forwarded-For": {fmt.Sprintf("203.0.%d.%d", i%3, 1+i%97)}, "X-Api-Key": {fmt.Sprint("k", i%80)}, "Cookie": {fmt.Sprint("sid=s", i%70)}}
		requests = append(requests, q)
	}
	all := []string{"ip", "key", "session", "search", "global"}
	for name, c := range map[string]struct {
		filters map[string]string
		altered map[string]string // by tier: what is said
		hops    string            // why none can be told; empty: they can
	}{
		"nothing":             {nil, nil, ""},
		"a field of no use":   {map[string]string{"request>headers>User-Agent": deleted, "resp_headers": deleted}, nil, ""},
		"hashed chain":        {map[string]string{xffField: hash}, map[string]string{"ip": "X-Forwarded-For holds no addresses"}, "X-Forwarded-For holds no addresses"},
		"masked chain":        {map[string]string{xffField: mask}, map[string]string{"ip": "X-Forwarded-For holds addresses that all end in zero bits"}, "X-Forwarded-For holds addresses that all end in zero bits"},
		"replaced chain":      {map[string]string{xffField: replaced}, map[string]string{"ip": "X-Forwarded-For holds no addresses"}, "X-Forwarded-For holds no addresses"},
		"hashed peer":         {map[string]string{peer: hash}, nil, "request.remote_ip holds no addresses"},
		"masked peer":         {map[string]string{peer: `{"filter":"ip_mask","ipv4_cidr":24}`}, nil, "request.remote_ip holds addresses that all end in zero bits"},
		"hashed key":          {map[string]string{"request>headers>X-Api-Key": hash}, nil, ""}, // keys stay apart
		"replaced key":        {map[string]string{"request>headers>X-Api-Key": replaced}, map[string]string{"key": "{http.request.header.X-Api-Key} has one value in all requests"}, ""},
		"deleted key":         {map[string]string{"request>headers>X-Api-Key": deleted}, map[string]string{"key": "{http.request.header.X-Api-Key} is in none of the requests"}, ""},
		"renamed key":         {map[string]string{"request>headers>X-Api-Key": renamed}, map[string]string{"key": "{http.request.header.X-Api-Key} is in none of the requests"}, ""},
		"replaced cookie":     {map[string]string{"request>headers>Cookie": `{"filter":"cookie","actions":[{"type":"replace","name":"sid","value":"x"}]}`}, map[string]string{"session": "{http.request.cookie.sid} has one value in all requests"}, ""},
		"deleted cookie":      {map[string]string{"request>headers>Cookie": `{"filter":"cookie","actions":[{"type":"delete","name":"sid"}]}`}, map[string]string{"session": "{http.request.cookie.sid} is in none of the requests"}, ""},
		"replaced parameter":  {map[string]string{"request>uri": `{"filter":"query","actions":[{"type":"replace","parameter":"token","value":"x"}]}`}, map[string]string{"search": "{http.request.uri.query.token} has one value in all requests"}, ""},
		"deleted parameter":   {map[string]string{"request>uri": `{"filter":"query","actions":[{"type":"delete","parameter":"token"}]}`}, map[string]string{"search": "{http.request.uri.query.token} is in none of the requests"}, ""},
		"several, of several": {map[string]string{xffField: hash, "request>headers>X-Api-Key": replaced}, map[string]string{"ip": "X-Forwarded-For holds no addresses", "key": "has one value"}, "X-Forwarded-For holds no addresses"},
	} {
		log, _ := filteredRecording(t, c.filters).log(t, requests)
		rep := replayLog(t, config, log, replay.Options{})
		require.Equal(t, int64(3000), rep.Log.Requests, name)
		notes := strings.Join(rep.Notes, "\n")
		require.Len(t, rep.Stacks[0].Tiers, len(all))
		for i, tier := range all {
			said, got := c.altered[tier], rep.Stacks[0].Tiers[i]
			if said == "" {
				assert.Empty(t, got.Altered, "%s, %s", name, tier)
				assert.NotContains(t, notes, fmt.Sprintf("tier %q of stack", tier), name)
				continue
			}
			assert.Contains(t, got.Altered, said, "%s, %s", name, tier)
			assert.Zero(t, got.Limits[0].Suggested, "%s, %s", name, tier)
			assert.Empty(t, got.Limits[0].Candidates, "%s, %s", name, tier)
			assert.Contains(t, notes, fmt.Sprintf("tier %q of stack \"altered\": in this log ", tier), name)
			assert.Contains(t, notes, said, name)
		}
		top := rep.Topology[0]
		if c.hops == "" {
			if assert.NotNil(t, top.Hops, "%s: %s", name, top.Reason) {
				assert.Equal(t, 1, *top.Hops, name)
			}
		} else {
			assert.Nil(t, top.Hops, name)
			assert.Contains(t, top.Reason, "in this log "+c.hops, name)
		}
	}
}
