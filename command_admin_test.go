package tieredlimit

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/visible"
)

// command runs a command below tiered-limit against the admin API of an edge.
func (e *edge) command(args ...string) (string, error) {
	e.t.Helper()
	server := httptest.NewServer(adminAPI(e))
	defer server.Close()
	return runCommand(append(args, "--address", server.Listener.Addr().String())...)
}

func runCommand(args ...string) (string, error) {
	root := &cobra.Command{Use: "tiered-limit", SilenceErrors: true}
	for _, make := range subcommands {
		root.AddCommand(make())
	}
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(args)
	err := root.Execute()
	return out.String(), err
}

// words are the words of a text, for comparing tables however wide their columns are.
func words(text string) string { return strings.Join(strings.Fields(text), " ") }

func TestCommands(t *testing.T) {
	e := newEdge(t, `
:8080 {
	tiered_limit cli {
		trusted_hops 1
		log_keys
		tier ip 2/s 5/m
		tier key 3/m {
			key {http.request.header.X-Key} x
			dry_run
		}
	}
	respond ok
}
:8081 {
	tiered_limit cli-inert {
		tier ip 1/m
	}
}`)
	e.clock.advance(2500 * time.Millisecond)
	for range 4 {
		e.send(request{listen: ":8080", header: http.Header{"X-Forwarded-For": {"203.0.113.7"}, "X-Key": {"\x1b[31m"}}})
	}
	out, err := e.command("status")
	require.NoError(t, err, out)
	assert.Equal(t, words(`
stack cli
  store memory, 3 counters, 0 hits in overflow
  requests: served 2, refused 2
  handler of srv0: limits by ip, key; client: entry 1 from the right of X-Forwarded-For, by /32 and /64
  TIER LIMITS KEY CHARGE DRY RUN REFUSED
  ip 2/1s 5/1m {http.tiered_limit.client_ip} served no 2 in this 1m
  key 3/1m {http.request.header.X-Key} x served yes 0 in this 1m
  MOST REFUSED BY KEY OR FINGERPRINT AT LEAST AT MOST
  ip 203.0.113.7 2 2

stack cli-inert
  handler of srv1: DISABLED, since the proxies in front are not stated; client: not stated`), words(out))

	_, err = e.command("explain", "--stack", "cli", "--peer", "10.0.0.1", "-H", "X-Forwarded-For: 9.9.9.9, 203.0.113.7", "-H", "X-Key:\x1b[31m")
	require.Error(t, err, "a control character is no field value")
	assert.NotContains(t, err.Error(), "\x1b")
	out, err = e.command("explain", "--stack", "cli", "--peer", "10.0.0.1", "-H", "X-Forwarded-For: 9.9.9.9, 203.0.113.7", "-H", "X-Key: a b")
	require.NoError(t, err)
	assert.Equal(t, words(`
stack cli of srv0
  peer: 10.0.0.1
  X-Forwarded-For:
    9.9.9.9 not read: written by the client, or by proxies further out
    203.0.113.7 the client
  client: 203.0.113.7, counted as 203.0.113.7
  TIER KEY LIMIT USED LEFT RESETS IN AT (UTC)
  ip 203.0.113.7 2/1s 2 0 1 s 2026-03-01 00:00:03 refuses
                 5/1m 2 3 58 s 2026-03-01 00:01:00 allows
  key (dry) "a b" x 3/1m 0 3 58 s 2026-03-01 00:01:00 not asked, since a tier in front refuses
  outcome: refused, by ip, retry in 1 s`), words(out))

	for _, name := range []string{"inspect", "reset"} {
		used := map[string]string{"inspect": "2 0", "reset": "0 2"}[name]
		out, err = e.command(name, "--stack", "cli", "--tier", "ip", "203.0.113.7")
		require.NoError(t, err)
		assert.Contains(t, out, "stack cli, tier ip, key 203.0.113.7 (fingerprint ")
		assert.Contains(t, words(out), "LIMIT USED LEFT RESETS IN AT (UTC) 2/1s "+used+" 1 s 2026-03-01 00:00:03")
	}
	assert.Equal(t, []int64{0, 0}, e.used("cli", "ip", request{header: http.Header{"X-Forwarded-For": {"203.0.113.7"}}}))

	out, err = e.command("status", "--json")
	require.NoError(t, err)
	var report statusReport
	require.NoError(t, json.Unmarshal([]byte(out), &report))
	assert.Equal(t, "cli", report.Stacks[0].Stack)
	assert.Contains(t, out, "\n  \"stacks\"", "indented")
}

func TestCommandsRefuseMistakes(t *testing.T) {
	e := adminEdge(t, "cli-bad")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"status", "x"}, `unknown command "x"`},
		{[]string{"status", "--nonsense"}, "unknown flag: --nonsense"},
		{[]string{"reset"}, "--stack and --tier are required"},
		{[]string{"inspect", "--stack", "cli-bad"}, "--stack and --tier are required"},
		{[]string{"reset", "--stack", "cli-bad", "--tier", "nobody", "x"}, `has no tier`},
		{[]string{"reset", "--stack", "cli-bad", "--tier", "ip", "x"}, `is not an IP address`},
		{[]string{"explain"}, "--peer is required"},
		{[]string{"explain", "--peer", "10.0.0.1", "-H", "x"}, `--header "x" is not of the form "Name: value"`},
		{[]string{"explain", "--peer", "10.0.0.1", "--set", "x"}, `--set "x" is not of the form name=value`},
		{[]string{"explain", "--peer", "x"}, "is neither an IP address nor unix"},
	} {
		_, err := e.command(c.args...)
		assert.ErrorContains(t, err, c.want, "%v", c.args)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := listener.Addr().String()
	require.NoError(t, listener.Close())
	_, err = runCommand("status", "--address", address)
	assert.ErrorContains(t, err, "no Caddy answers at "+address+`: it has to run, with its admin endpoint there and without "admin off"; `+
		"--address or --config name another place: ")
	assert.ErrorContains(t, err, "connection refused")
}

// What the endpoint refuses is said alone, and in words of the commands.
func TestCommandsSpeakTheirOwnWords(t *testing.T) {
	e := newEdge(t, freshListen()+` {
	tiered_limit cli-words {
		trusted_hops 1
		tier ip 9/m
		tier global 9/m
		tier pair 9/m {
			key {header.A} {header.B}
			key {header.C} {header.D}
		}
	}
	respond ok
}`)
	at := func(tier string, more ...string) []string {
		return append([]string{"inspect", "--stack", "cli-words", "--tier", tier}, more...)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"inspect", "--stack", "x", "--tier", "ip", "a"}, `there is no stack "x"; there are "cli-words"`},
		{at("nope"), `stack "cli-words" has no tier "nope"; it has "ip", "global", "pair"`},
		{at("ip"), `tier "ip": the values of the tier's key are missing; write them behind the flags`},
		{at("global", "x"), `tier "global": the tier has one counter for everybody; give no values`},
		{at("pair", "a", "b"), `tier "pair": the tier has several keys of 2 parts; say by --line which is meant, from 1 to 2`},
		{at("pair", "a", "b", "--line", "3"), `tier "pair": --line 3 is not between 1 and 2`},
		{[]string{"explain", "--peer", "x"}, `--peer "x" is neither an IP address nor unix`},
		{[]string{"explain", "--peer", "10.0.0.1", "--method", "G T"}, `--method "G T" is not a method`},
		{[]string{"explain", "--peer", "10.0.0.1", "--path", "x"}, `--path "x" does not begin with /`},
		{[]string{"explain", "--peer", "10.0.0.1", "-H", "a b: c"}, `--header: "a b" is not a field name`},
	} {
		_, err := e.command(c.args...)
		if assert.Error(t, err, "%v", c.args) {
			assert.Contains(t, err.Error(), c.want, "%v", c.args)
			assert.NotContains(t, err.Error(), "HTTP", "%v", c.args)
			assert.NotContains(t, err.Error(), "{", "%v", c.args)
			assert.NotContains(t, err.Error(), "admin", "%v", c.args)
		}
	}
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	_, err := runCommand("status", "--address", other.Listener.Addr().String())
	assert.EqualError(t, err, "what answers at "+other.Listener.Addr().String()+" knows no tiered_limit (HTTP 404): is it a Caddy with this "+
		"module, and its admin endpoint?")
}

func TestCommandsSayWhatTheyDo(t *testing.T) {
	for _, make := range subcommands {
		cmd := make()
		assert.NotEmpty(t, cmd.Short)
		assert.NotEmpty(t, strings.TrimSpace(cmd.Long))
		for line := range strings.Lines(cmd.Long) {
			assert.LessOrEqual(t, len(line), 85, "%s: %s", cmd.Name(), line)
		}
	}
}

func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"a": "a", "": `""`, "a b": `"a b"`, "\x1b[2J": `"\x1b[2J"`, "ü": "ü", "\u202e": `"\u202e"`, `a"b`: `"a\"b"`, "\xff": `"\xff"`,
	} {
		assert.Equal(t, want, plain(text))
	}
	for text, want := range map[string]string{
		`a "b" c`: `a "b" c`, "": "", "a\x1b[2J b": `a\x1b[2J b`, "a\nb": `a\nb`, "a \u202eb": `a \u202eb`, "\xff": `\xff`,
	} {
		assert.Equal(t, want, visible.Text(text))
	}
}

// status says how to find out whose a fingerprint is, and recognizes the client that it is asked for, in any notation.
func TestStatusRecognizesAClient(t *testing.T) {
	e := newEdge(t, freshListen()+` {
	tiered_limit cli-who {
		trusted_hops 0
		tier ip 1/m
		tier pair 1/m {
			key {header.A} {http.tiered_limit.client_ip}
		}
	}
	respond ok
}`)
	for _, peer := range []string{"203.0.113.7:1", "[2001:db8::1]:1"} {
		e.served(3, request{peer: peer})
	}
	out, err := e.command("status")
	require.NoError(t, err)
	assert.Contains(t, out, "name a client that\n  it may be, with status --client 203.0.113.7")
	assert.Contains(t, out, `select(.tiered_limit_outcome == "refused") | .request.client_ip'`)
	for hops, want := range map[string]string{
		"trusted_hops 2": `| .request.headers["X-Forwarded-For"][-1]'`, "trusted_hops 1 X-Real-IP": `| .request.headers["X-Real-Ip"][-1]'`,
	} {
		behind := newEdge(t, freshListen()+" {\ntiered_limit cli-behind {\n"+hops+"\ntier ip 1/m\n}\nrespond ok\n}")
		behind.served(3, request{})
		out, err = behind.command("status")
		require.NoError(t, err)
		assert.Contains(t, out, want)
		behind.close()
	}
	for client, shown := range map[string]string{"203.0.113.7": "203.0.113.7", "::ffff:203.0.113.7": "::ffff:203.0.113.7", "2001:db8::99": "2001:db8::99"} {
		out, err = e.command("status", "--client", client)
		require.NoError(t, err)
		assert.Regexp(t, `ip +[0-9a-f]{16} \(`+shown+`\) +2 +2\n`, out)
		assert.Equal(t, 1, strings.Count(out, "("+shown+")"), client)
	}
	out, err = e.command("status", "--client", "192.0.2.1")
	require.NoError(t, err)
	assert.NotContains(t, out, "(192.0.2.1)")
	_, err = e.command("status", "--client", "nobody")
	assert.ErrorContains(t, err, `"nobody" is not an IP address`)
	_, err = e.command("status", "--client", "192.0.2.1", "--json")
	assert.ErrorContains(t, err, "--client and --json do not go together")
}
