package tieredlimit

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"

	"github.com/tieredlimit/caddy-tieredlimit/internal/readmetest"
)

func init() { readmeClaims["Replay access logs/1"] = claimReplay }

// claimReplay runs the block's command on a log of one request, and compares the section's options with the command's.
func claimReplay(t *testing.T, b readmetest.Block) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	args := strings.Fields(strings.TrimPrefix(strings.TrimSpace(b.Text), "caddy tiered-limit replay "))
	args[slices.Index(args, "Caddyfile")] = write("Caddyfile", ":80 {\ntiered_limit {\ntrusted_hops 0\ntier ip 600/m\n}\nrespond ok\n}\n")
	args[slices.Index(args, "report.html")] = filepath.Join(dir, "report.html")
	args[slices.Index(args, "/var/log/caddy/access*")] = write("access.log", `{"level":"info","ts":1796000000.5,"logger":"http.log.access",`+
		`"msg":"handled request","request":{"remote_ip":"203.0.113.7","remote_port":"1","client_ip":"203.0.113.7","proto":"HTTP/1.1",`+
		`"method":"GET","host":"localhost","uri":"/","headers":{}},"duration":0.1,"status":200,"size":2}`+"\n")
	cmd := replay.NewCommand(newRehearsal)
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	require.NoError(t, cmd.Execute(), "%s", &out)
	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	require.NoError(t, err)
	assert.Contains(t, string(page), "600")
	assert.Contains(t, out.String(), "600")

	_, section, _ := strings.Cut(readText(t, "README.md"), "\n## Replay access logs\n")
	section, _, _ = strings.Cut(section, "\n## ")
	documented := make(map[string]bool)
	for _, name := range regexp.MustCompile("`--([a-z-]+)").FindAllStringSubmatch(section, -1) {
		documented[name[1]] = true
	}
	for _, name := range regexp.MustCompile(`--([a-z-]+) `).FindAllStringSubmatch(cmd.LocalFlags().FlagUsages(), -1) {
		assert.True(t, documented[name[1]] || name[1] == "help", "the README says nothing of --%s", name[1])
		delete(documented, name[1])
	}
	assert.Empty(t, documented, "options that the command does not have")
}
