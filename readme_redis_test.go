package tieredlimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/readmetest"
	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// claimFile checks that a block is a file of this repository, byte for byte. That has tests of its own.
func claimFile(file string) func(t *testing.T, b readmetest.Block) {
	return func(t *testing.T, b readmetest.Block) {
		assert.Equal(t, readText(t, file), b.Text)
	}
}

// claimElsewhere says that the tests of a package execute a block, which they find by its name.
func claimElsewhere(dir string) func(t *testing.T, b readmetest.Block) {
	return func(t *testing.T, b readmetest.Block) {
		assert.Contains(t, readText(t, filepath.Join(dir, "readme_test.go")), fmt.Sprintf("BlockOf(t, readme, %q)", b.Name))
	}
}

// claimShared checks that two instances with the block admit the limit together.
func claimShared(t *testing.T, b readmetest.Block) {
	server := redistest.New(t, "--requirepass", "pass").With(redistest.Conn{Password: "pass"})
	server.Run()
	t.Setenv("REDIS_PASSWORD", "pass")
	t.Setenv("LIMIT_KEY_SECRET", "secret")
	loadBlock(t, b)
	var instances []*edge
	for _, address := range []string{server.Addr(), redistest.StartProxy(t, server.Addr()).Addr()} {
		text := strings.Replace(b.Text, "10.0.0.5:6379", address, 1)
		instances = append(instances, newEdge(t, unhurried(siteConfig(text))))
	}
	q := request{header: forwarded("X-Forwarded-For", "203.0.113.7")}
	assert.Equal(t, 600, servedByAll(t, 700, q, instances...))
	for _, e := range instances {
		assert.Equal(t, "ip", refusedBy(t, e, q))
	}
	_, err := tryLoad(t, siteConfig(strings.Replace(b.Text, "tiered_limit api", "tiered_limit", 1)))
	assert.ErrorContains(t, err, "the stack needs a name")
}

// claimRedisMode checks that a block loads, without a server, and is of a mode.
func claimRedisMode(mode string) func(t *testing.T, b readmetest.Block) {
	return func(t *testing.T, b readmetest.Block) {
		e := loadBlock(t, b)
		var settings struct {
			Mode    string   `json:"mode"`
			Address []string `json:"address"`
		}
		require.NoError(t, json.Unmarshal([]byte(e.handlers()[0].storeText), &settings))
		assert.Equal(t, mode, settings.Mode)
		assert.Len(t, settings.Address, 3)
	}
}

// Each answer of the table of on_error is what a client gets, with Redis away from the start and after it has counted.
func TestReadmeRedisOnError(t *testing.T) {
	want := map[string]func(t *testing.T, e *edge, used int, q request){
		"deny": func(t *testing.T, e *edge, _ int, q request) {
			for range 10 {
				w := e.send(q)
				assert.Equal(t, http.StatusServiceUnavailable, w.Code)
				assert.Regexp(t, "^[12]$", w.Header().Get("Retry-After"))
			}
		},
		"allow": func(t *testing.T, e *edge, _ int, q request) {
			for range 10 {
				w := e.send(q)
				assert.Equal(t, http.StatusOK, w.Code)
				assert.Empty(t, w.Header().Get("X-RateLimit-Limit"))
			}
		},
		"local": func(t *testing.T, e *edge, used int, q request) {
			assert.Equal(t, 5-used, e.served(10, q))
			assert.Equal(t, "ip", refusedBy(t, e, q))
		},
	}
	rows := readmetest.Rows(t, readme, "| `on_error` ")
	require.Len(t, rows, len(want))
	for _, row := range rows {
		word := readmetest.Spans(row[0])[0]
		require.NotNil(t, want[word], word)
		t.Run(word, func(t *testing.T) {
			server := redistest.New(t)
			e := newEdge(t, unhurried(":8080 {\ntiered_limit onerror {\ntrusted_hops 0\ntier ip 5/m\nstore redis {\n"+
				"address "+server.Addr()+"\non_error "+word+"\n}\n}\nrespond ok\n}"))
			want[word](t, e, 0, request{})
			server.Run()
			require.True(t, redistest.Await(e.handlers()[0].connected))
			other := request{peer: "198.51.100.1:1"}
			assert.Equal(t, 2, e.served(2, other))
			spent := request{peer: "198.51.100.2:1"}
			assert.Equal(t, 5, e.served(6, spent))
			server.Kill()
			assert.Equal(t, http.StatusTooManyRequests, e.send(spent).Code, "whom the instance remembers as refused")
			want[word](t, e, 2, other)
		})
	}
}
