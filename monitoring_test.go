package tieredlimit

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// dashboardQueries are the queries of the Grafana dashboard.
func dashboardQueries(t *testing.T) []string {
	t.Helper()
	var dashboard struct {
		Title      string
		Templating struct {
			List []struct{ Name, Definition string }
		}
		Panels []struct {
			ID                       int
			Title, Description, Type string
			GridPos                  struct{ X, Y, W, H int }
			Targets                  []struct{ Expr, RefID string }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(readText(t, "examples/grafana/dashboard.json")), &dashboard))
	var queries []string
	taken := make(map[[2]int]string)
	for i, p := range dashboard.Panels {
		assert.Equal(t, i+1, p.ID)
		assert.NotEmpty(t, p.Description, p.Title)
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				assert.Empty(t, taken[[2]int{x, y}], "%s lies on another panel", p.Title)
				taken[[2]int{x, y}] = p.Title
			}
		}
		refs := make(map[string]bool)
		for _, target := range p.Targets {
			assert.False(t, refs[target.RefID], p.Title)
			refs[target.RefID] = true
			queries = append(queries, target.Expr)
		}
	}
	for _, v := range dashboard.Templating.List {
		if v.Definition != "" {
			queries = append(queries, v.Definition)
		}
	}
	return queries
}

var (
	metricPattern   = regexp.MustCompile(`caddy_tiered_limit_[a-z_]+`)
	selectorPattern = regexp.MustCompile(`(caddy_tiered_limit_[a-z_]+)\{([^}]*)\}`)
	labelPattern    = regexp.MustCompile(`([a-z_]+)[=!]~?"`)
	groupPattern    = regexp.MustCompile(`by \(([^)]*)\) \([^c]*(caddy_tiered_limit_[a-z_]+)`)
)

// The dashboard and the alert rules use metrics and labels that there are, and the dashboard shows all of them.
func TestMonitoringUsesWhatIsThere(t *testing.T) {
	e := newEdge(t, ":8080 {\ntiered_limit monitored {\ntrusted_hops 0\ntier ip 1/m\n}\nrespond ok\n}")
	e.served(2, request{})
	families, err := e.ctx.GetMetricsRegistry().Gather()
	require.NoError(t, err)
	labels := make(map[string][]string)
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "caddy_tiered_limit_") {
			continue
		}
		var names []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			names = append(names, l.GetName())
		}
		labels[f.GetName()] = append(names, "le", "job", "instance")
	}
	require.Len(t, labels, 11)
	base := func(name string) string {
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if family, cut := strings.CutSuffix(name, suffix); cut && labels[family] != nil {
				return family
			}
		}
		return name
	}
	shown := make(map[string]bool)
	queries := dashboardQueries(t)
	for i, text := range append(slices.Clone(queries), readText(t, "examples/grafana/alerts.yml")) {
		for _, name := range metricPattern.FindAllString(text, -1) {
			assert.NotNil(t, labels[base(name)], "there is no %s", name)
			if i < len(queries) {
				shown[base(name)] = true
			}
		}
		for _, selector := range selectorPattern.FindAllStringSubmatch(text, -1) {
			for _, label := range labelPattern.FindAllStringSubmatch(selector[2], -1) {
				assert.Contains(t, labels[base(selector[1])], label[1], selector[0])
			}
		}
		for _, group := range groupPattern.FindAllStringSubmatch(text, -1) {
			for _, label := range strings.Split(group[1], ", ") {
				assert.Contains(t, labels[base(group[2])], label, group[0])
			}
		}
		for _, outcomes := range regexp.MustCompile(`outcome=~?"([^"]*)"`).FindAllStringSubmatch(text, -1) {
			for _, o := range strings.Split(outcomes[1], "|") {
				assert.Contains(t, outcomeNames, o)
			}
		}
	}
	assert.Len(t, shown, len(labels), "%v", shown)
}

func TestAlertRules(t *testing.T) {
	promtool := program(t, "promtool")
	for _, args := range [][]string{{"check", "rules", "examples/grafana/alerts.yml"}, {"test", "rules", "testdata/alerts_test.yml"}} {
		output, err := exec.Command(promtool, args...).CombinedOutput()
		assert.NoError(t, err, "%s", output)
		assert.Contains(t, string(output), "SUCCESS")
	}
	tested := readText(t, "testdata/alerts_test.yml")
	anchors := make(map[string]bool)
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(readText(t, "README.md"), -1) {
		anchors[strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")] = true
	}
	links := regexp.MustCompile(`runbook_url: https://github.com/tieredlimit/caddy-tieredlimit#(\S+)`).FindAllStringSubmatch(readText(t, "examples/grafana/alerts.yml"), -1)
	assert.Len(t, links, strings.Count(readText(t, "examples/grafana/alerts.yml"), "- alert: "), "each alert says where to read on")
	for _, link := range links {
		assert.True(t, anchors[link[1]], "the README has no heading for %s", link[1])
	}
	for _, alert := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(readText(t, "examples/grafana/alerts.yml"), -1) {
		assert.Contains(t, tested, `alertname="`+alert[1]+`"`)
	}
}

// The queries of the dashboard are ones that Prometheus understands.
func TestDashboardQueries(t *testing.T) {
	promtool := program(t, "promtool")
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for _, query := range dashboardQueries(t) {
		if strings.HasPrefix(query, "label_values(") {
			continue
		}
		query = strings.NewReplacer("$__rate_interval", "5m", "$stack", ".*", "$job", ".*", "$instance", ".*").Replace(query)
		text, err := json.Marshal(query)
		require.NoError(t, err)
		rules.WriteString("  - record: x\n    expr: " + string(text) + "\n")
	}
	file := filepath.Join(t.TempDir(), "rules.yml")
	require.NoError(t, os.WriteFile(file, []byte(rules.String()), 0o600))
	output, err := exec.Command(promtool, "check", "rules", "--lint=none", file).CombinedOutput()
	assert.NoError(t, err, "%s", output)
}
