package tieredlimit

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestDryRunHeader(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-RateLimit-Dry-Run", "upstream")
		w.Header().Set("Access-Control-Expose-Headers", "X-Theirs")
	}))
	t.Cleanup(upstream.Close)
	const cross = "https://app.example.com"
	for name, c := range map[string]struct {
		block      string
		want       []string // the field on three requests
		remaining  string   // on the last one
		exposed    string
		lastStatus int
	}{
		"not asked for": {"tier ip 1/m\ndry_run", []string{"", "", ""}, "", "", 200},
		"a stack":       {"tier ip 1/m\ndry_run header", []string{"", "refused", "refused"}, "", "X-RateLimit-Dry-Run", 200},
		"a tier": {
			"tier ip 1/m {\ndry_run header\n}\ntier global 100/m", []string{"", "refused", "refused"}, "97",
			"X-RateLimit-Dry-Run, X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, X-RateLimit-Resource", 200,
		},
		"a tier in a dry stack": {"tier ip 1/m {\ndry_run header\n}\ndry_run", []string{"", "refused", "refused"}, "", "X-RateLimit-Dry-Run", 200},
		"the second of two": {
			"tier ip 2/m {\ndry_run\n}\ntier all 1/m {\nkey a\ndry_run header\n}", []string{"", "refused", "refused"}, "", "X-RateLimit-Dry-Run", 200,
		},
		"behind it a refusal": {
			"tier ip 1/m {\ndry_run header\n}\ntier global 2/m", []string{"", "refused", ""}, "0",
			"X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, X-RateLimit-Resource, Retry-After", 429,
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, next := range []string{"respond ok", "reverse_proxy " + upstream.Listener.Addr().String()} {
				e := newEdge(t, ":8080 {\ntiered_limit {\ntrusted_hops 0\n"+c.block+"\n}\n"+next+"\n}")
				var got []string
				var last *httptest.ResponseRecorder
				for range 3 {
					last = e.send(request{header: http.Header{"Origin": {cross}}})
					values := last.Header().Values("X-RateLimit-Dry-Run")
					if len(values) == 0 || values[0] == "upstream" {
						values = []string{""}
					}
					assert.Len(t, values, 1)
					got = append(got, values[0])
				}
				assert.Equal(t, c.want, got, next)
				assert.Equal(t, c.lastStatus, last.Code)
				assert.Equal(t, c.remaining, last.Header().Get("X-RateLimit-Remaining"))
				if next == "respond ok" {
					assert.Equal(t, c.exposed, last.Header().Get("Access-Control-Expose-Headers"))
				}
				e.close() // and forget the counters
				e.app.handlers = nil
			}
		})
	}
}

func TestDryRunHeaderInJSONNeedsADryRun(t *testing.T) {
	h := &Handler{DryRunHeader: true, Tiers: []*Tier{{Name: "ip", Limits: []TierLimit{}}}}
	assert.EqualError(t, h.check(), "dry_run_header needs dry_run")
	h = &Handler{Tiers: []*Tier{{Name: "ip", Limits: []TierLimit{}, DryRunHeader: true}}}
	assert.EqualError(t, h.check(), `tier "ip": dry_run_header needs dry_run`)
}

func TestDryRunHeaderMustAgreeInASharedTier(t *testing.T) {
	_, err := tryLoad(t, ":8081 {\ntiered_limit dry-shared {\ntier global 1/m {\ndry_run\n}\n}\n}\n"+
		":8082 {\ntiered_limit dry-shared {\ntier global 1/m {\ndry_run header\n}\n}\n}")
	assert.ErrorContains(t, err, `tier "global" is defined twice, with a different dry_run`)
}

func TestDryRunSyntax(t *testing.T) {
	for block, message := range map[string]string{
		"dry_run yes":                           `unexpected "yes": dry_run takes no argument but header, at Caddyfile:3`,
		"dry_run header header":                 `unexpected "header": dry_run takes no argument but header`,
		"dry_run header {\n}":                   "dry_run takes no block",
		"tier ip 1/m {\ndry_run x\n}":           `unexpected "x": dry_run takes no argument but header`,
		"tier ip 1/m {\ndry_run header {\n}\n}": "dry_run takes no block",
		"events on":                             `unexpected "on": events takes no argument`,
		"events\nevents":                        "events is given twice",
	} {
		_, err := tryAdapt(":8080 {\ntiered_limit {\n" + block + "\ntier user 1/m\n}\n}")
		assert.ErrorContains(t, err, message)
	}
}
