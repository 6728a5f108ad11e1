package servers

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/tieredlimit/caddy-tieredlimit"
)

func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       time.Duration
		fails      bool
	}{
		{"plain", "12 (caddy) S 1 1 1 0 -1 4 5 0 1 0 250 50 0 0 20 0 9", 3 * time.Second, false},
		{"blanks and brackets in the name", "12 (a ) b) S 1 1 1 0 -1 4 5 0 1 0 1 2 0 0", 30 * time.Millisecond, false},
		{"short", "12 (caddy) S 1", 0, true},
		{"no number", "12 (caddy) S 1 1 1 0 -1 4 5 0 1 0 x 50 0", 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseStat(c.text)
			assert.Equal(t, c.fails, err != nil, "error: %v", err)
			assert.Equal(t, c.want, got)
		})
	}
	own, err := os.ReadFile("/proc/self/stat")
	require.NoError(t, err)
	_, err = parseStat(string(own))
	assert.NoError(t, err, "this process's own")
}

func TestParseStatus(t *testing.T) {
	got, err := parseStatus("Name:\tcaddy\nVmRSS:\t   64 kB\nThreads: 3\n")
	require.NoError(t, err)
	assert.Equal(t, 65536, got)
	for _, text := range []string{"", "Name: caddy\n", "VmRSS:", "VmRSS: much kB"} {
		_, err := parseStatus(text)
		assert.Error(t, err, "%q", text)
	}
}

func TestParseLoad(t *testing.T) {
	got, err := parseLoad("Running 2s test\nresult: {\"Requests\":10,\"Seconds\":2.5,\"Statuses\":3,\"Broken\":1}\n")
	require.NoError(t, err)
	assert.Equal(t, load{Requests: 10, Seconds: 2.5, Statuses: 3, Broken: 1}, got)
	assert.InDelta(t, 4, got.perSecond(), 1e-9)
	for _, out := range []string{"", "result: {", `result: {"Requests":0,"Seconds":1}`, `result: {"Requests":5}`} {
		_, err := parseLoad(out)
		assert.Error(t, err, "%q", out)
	}
}

func TestParseTarget(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	got, err := parseTarget("mine=" + file)
	require.NoError(t, err)
	assert.Equal(t, Target{Name: "mine", Config: file}, got)
	got, err = parseTarget("mine=" + file + ":" + file)
	require.NoError(t, err)
	assert.Equal(t, Target{Name: "mine", Binary: file, Config: file}, got)
	for _, arg := range []string{"", "mine", "=" + file, "mine=", "mine=/nowhere", "mine=/nowhere:" + file, "mine=" + file + ":"} {
		_, err := parseTarget(arg)
		assert.Error(t, err, "%q", arg)
	}
}

func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		arg, value string
	}{
		{"-rounds", "0"}, {"-fresh", "0"}, {"-fresh", "21"}, {"-time", "1500ms"}, {"-time", "0s"}, {"-clients", "0"},
		{"-clients", "16777217"}, {"-connections", "0"}, {"-run", "("},
	} {
		t.Run(c.arg+" "+c.value, func(t *testing.T) {
			var log bytes.Buffer
			assert.Equal(t, 1, Main([]string{c.arg, c.value}, io.Discard, &log))
			assert.Contains(t, log.String(), c.arg)
		})
	}
}

// TestCaddyfiles checks that Caddy takes what is measured, with the limits of every case.
func TestCaddyfiles(t *testing.T) {
	files, err := filepath.Glob("*.Caddyfile")
	require.NoError(t, err)
	require.Len(t, files, 3)
	for _, file := range files {
		for _, c := range Cases {
			t.Run(file+" "+c.Name, func(t *testing.T) {
				count, window := c.limit()
				t.Setenv("BENCH_PORT", "8080")
				t.Setenv("BENCH_COUNT", strconv.Itoa(count))
				t.Setenv("BENCH_WINDOW", window.String())
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt(text, map[string]any{"filename": file})
				require.NoError(t, err)
				assert.Empty(t, warnings)
				var parsed caddy.Config
				require.NoError(t, caddy.StrictUnmarshalJSON(config, &parsed))
				assert.NoError(t, caddy.Validate(&parsed))
			})
		}
	}
}

func TestTable(t *testing.T) {
	o := &Options{Clients: 7}
	targets := []Target{{Name: bareName, Base: bareName, Static: true}, {Name: "other", Base: bareName}}
	seen := []measured{
		{rate: []float64{100, 200}, cpu: []float64{10, 20}, memory: []float64{1 << 20}, requests: 300},
		{rate: []float64{50, 100}, cpu: []float64{12, 22}, memory: []float64{3 << 20}, requests: 150, statuses: 75},
	}
	got := o.table(Case{Many: true, Refused: true}, targets, seen)
	assert.Equal(t, "7 clients.", got.Note)
	assert.Equal(t, [][]string{
		{"bare", "1.00 (1.00..1.00)", "1.00 (1.00..1.00)", "0.000 (0.000..0.000)", "1.00"},
		{"other (50.0 % refused)", "0.500 (0.500..0.500)", "1.15 (1.10..1.20)", "2.00 (2.00..2.00)", "3.00"},
	}, got.Rows)
}
