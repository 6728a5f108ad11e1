package e2e

import (
	"encoding/json"
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// example reads a file of the examples, with other ports in the place of those that it names.
func example(t *testing.T, file string, ports map[string]int) string {
	t.Helper()
	text, err := os.ReadFile("../examples/" + file)
	require.NoError(t, err)
	config := string(text)
	for old, port := range ports {
		require.Contains(t, config, old, "%s names no such port", file)
		config = strings.ReplaceAll(config, old, ":"+strconv.Itoa(port))
	}
	return config
}

// The quick start's configuration serves five requests in a minute, from each client, and says why it refuses the sixth.
func TestQuickstart(t *testing.T) {
	port := ports.Free(t)
	c := startCaddy(t, example(t, "quickstart/Caddyfile", map[string]int{":8080": port, ":9080": ports.Free(t)}))
	url := fmt.Sprintf("http://127.0.0.1:%d/", port)

	seen := inOneMinute(t, func(attempt int) []answer {
		client := clientFrom(t, fmt.Sprintf("127.0.0.%d", 10+attempt))
		var answers []answer
		for range 6 {
			answers = append(answers, get(t, client, url))
		}
		return answers
	})
	for i, a := range seen[:5] {
		assert.Equal(t, 200, a.status, "request %d", i+1)
		assert.Equal(t, "hello from the API", a.body, "request %d", i+1)
		assert.Equal(t, "5", a.field(t, "X-Ratelimit-Limit"), "request %d", i+1)
		assert.Equal(t, strconv.Itoa(4-i), a.field(t, "X-Ratelimit-Remaining"), "request %d", i+1)
		assert.Equal(t, "ip", a.field(t, "X-Ratelimit-Resource"), "request %d", i+1)
		assert.Empty(t, a.field(t, "Retry-After"), "request %d", i+1)
	}
	checkQuickstartRefusal(t, seen[5])
	status, err := c.command(t, "status")
	require.NoError(t, err)
	assert.Contains(t, status, "limits by ip, global")
	assert.Equal(t, 200, get(t, clientFrom(t, "127.0.0.99"), url).status, "another client")
}

func checkQuickstartRefusal(t *testing.T, a answer) {
	t.Helper()
	require.Equal(t, 429, a.status)
	assert.Equal(t, "0", a.field(t, "X-Ratelimit-Remaining"))
	assert.Equal(t, "no-store", a.field(t, "Cache-Control"))
	assert.Equal(t, "application/problem+json", a.field(t, "Content-Type"))
	retry, err := strconv.Atoi(a.field(t, "Retry-After"))
	require.NoError(t, err)
	assert.GreaterOrEqual(t, retry, 1)
	assert.LessOrEqual(t, retry, 60)
	reset, err := strconv.Atoi(a.field(t, "X-Ratelimit-Reset"))
	require.NoError(t, err)
	assert.Zero(t, reset%60, "a minute ends at %d", reset)

	var problem struct {
		Type     string   `json:"type"`
		Status   int      `json:"status"`
		Violated []string `json:"violated-policies"`
		Retry    int      `json:"retry-after"`
	}
	require.NoError(t, json.Unmarshal([]byte(a.body), &problem), "body %q", a.body)
	assert.Equal(t, "https://iana.org/assignments/http-problem-types#quota-exceeded", problem.Type)
	assert.Equal(t, 429, problem.Status)
	assert.Equal(t, []string{"ip"}, problem.Violated)
	assert.Equal(t, retry, problem.Retry)
}
