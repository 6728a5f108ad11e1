package e2e

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// victim is a client whose bucket nobody else may get into.
const victim = "198.51.100.200"

// absurdity is a request that no decent client sends. The server may refuse it; if it is judged, it is the named client's.
type absurdity struct {
	name   string
	fields string // header field lines, each with its CRLF; %c is the client that the proxy names, %v the victim
	client string // "chain": the one that the proxy appended; "peer", apart from its own budget; "" if the server refuses the request
}

// line is a header field line.
func line(name, value string) string { return name + ": " + value + "\r\n" }

// absurdChains are headers for X-Forwarded-For and one hop.
var absurdChains = []absurdity{
	{"64 KiB of entries", line("X-Forwarded-For", strings.Repeat("%v, ", 4300)+"%c"), "chain"},
	{"10000 entries", line("X-Forwarded-For", strings.Repeat("%v,", 10000)+"%c"), "chain"},
	{"10000 empty entries", line("X-Forwarded-For", "%v"+strings.Repeat(",", 10000)+"%c"), "chain"},
	{"10000 empty entries at the end", line("X-Forwarded-For", "%v, %c"+strings.Repeat(",", 10000)), "peer"},
	{"one entry of 64 KiB", line("X-Forwarded-For", "%v, "+strings.Repeat("1", 64<<10)), "peer"},
	{"64 KiB in front", line("X-Forwarded-For", strings.Repeat("%v.", 4300)+", %c"), "chain"},
	{"64 KiB of commas in a quote", line("X-Forwarded-For", `"`+strings.Repeat(",", 64<<10)+`%v", %c`), "chain"},
	{"64 KiB of spaces", line("X-Forwarded-For", "%v,"+strings.Repeat(" ", 64<<10)+"%c"), "chain"},
	{"5000 lines", strings.Repeat(line("X-Forwarded-For", "%v"), 5000) + line("X-Forwarded-For", "%c"), "chain"},
	{"duplicate lines", line("X-Forwarded-For", "%v") + line("x-forwarded-for", "%v") + line("X-FORWARDED-FOR", "%c"), "chain"},
	{"an empty line at the end", line("X-Forwarded-For", "%v") + line("X-Forwarded-For", ""), "peer"},
	{"empty lines in front", strings.Repeat(line("X-Forwarded-For", ""), 100) + line("X-Forwarded-For", "%c"), "chain"},
	{"invalid UTF-8 in front", line("X-Forwarded-For", "\xff\xfe%v\x80, %c"), "chain"},
	{"invalid UTF-8 at the end", line("X-Forwarded-For", "%v\xff"), "peer"},
	{"an address in other digits", line("X-Forwarded-For", "%v, \u0661\u0669\u0668.51.100.200"), "peer"},
	{"leading zeros", line("X-Forwarded-For", "198.051.100.200"), "peer"},
	{"a zone of 60 KiB", line("X-Forwarded-For", "%v, %v%"+strings.Repeat("z", 60<<10)), "peer"},
	{"a port without end", line("X-Forwarded-For", "%v, %v:"+strings.Repeat("9", 60<<10)), "peer"},
	{"brackets without end", line("X-Forwarded-For", "%v, "+strings.Repeat("[", 60<<10)), "peer"},
	{"NUL", line("X-Forwarded-For", "%v\x00, %c"), ""},
	{"a bare carriage return", line("X-Forwarded-For", "%v\r, %c"), ""},
	{"a control character", line("X-Forwarded-For", "%v\x01, %c"), ""},
	{"no colon", "X-Forwarded-For\r\n", ""},
	{"a space before the colon", line("X-Forwarded-For ", "%v"), ""},
	{"a folded line", "X-Forwarded-For: %v,\r\n %c\r\n", "chain"},
	{"a key of 64 KiB", line("X-Forwarded-For", "%c") + line("X-Key", strings.Repeat("k", 64<<10)), "chain"},
	{"a key of invalid UTF-8", line("X-Forwarded-For", "%c") + line("X-Key", "\xff\xfe\x80"), "chain"},
	{"placeholders as a key", line("X-Forwarded-For", "%c") + line("X-Key", "{http.request.uuid}{env.HOME}}{"), "chain"},
	{"5000 keys", line("X-Forwarded-For", "%c") + strings.Repeat(line("X-Key", "k"), 5000), "chain"},
}

// absurdForwarded are headers for Forwarded and one hop.
var absurdForwarded = []absurdity{
	{"10000 elements", line("Forwarded", strings.Repeat("for=%v,", 10000)+"for=%c"), "chain"},
	{"an open quote in front", line("Forwarded", `for=%v;x="`) + line("Forwarded", "for=%c"), "peer"},
	{"60 KiB of backslashes", line("Forwarded", `for="`+strings.Repeat(`\`, 60<<10)+`", for=%c`), "chain"},
	{"60 KiB of semicolons", line("Forwarded", "for=%v"+strings.Repeat(";", 60<<10)+", for=%c"), "chain"},
	{"10000 pairs", line("Forwarded", "for=%v"+strings.Repeat(";a=b", 10000)+", for=%c"), "chain"},
	{"two identities in the last element", line("Forwarded", "for=%c;for=%v"), "peer"},
	{"invalid UTF-8 in a quote", line("Forwarded", "for=\"\xff\xfe\", for=%c"), "chain"},
	{"an obfuscated identity", line("Forwarded", "for=%v, for=_hidden"), "peer"},
	{"unknown", line("Forwarded", "for=%v, for=unknown"), "peer"},
	{"5000 lines", strings.Repeat(line("Forwarded", "for=%v"), 5000) + line("Forwarded", "for=%c"), "chain"},
	{"an empty line at the end", line("Forwarded", "for=%v") + line("Forwarded", ""), "peer"},
	{"NUL", line("Forwarded", "for=%v\x00"), ""},
}

// A request with absurd header fields is either refused by the server itself or counted for the client that the proxy
// named, or for the peer; never for somebody else, and never answered with a server's error.
func TestAbsurdHeaders(t *testing.T) {
	for _, test := range []struct {
		header, honest string // the honest field names a client
		cases          []absurdity
	}{
		{"X-Forwarded-For", "X-Forwarded-For: %s\r\n", absurdChains},
		{"Forwarded", "Forwarded: for=%s\r\n", absurdForwarded},
	} {
		t.Run(test.header, func(t *testing.T) {
			port := ports.Free(t)
			startCaddy(t, fmt.Sprintf(`
				{
					servers {
						max_header_size 1MB
					}
				}
				:%[1]d {
					bind 127.0.0.1
					log
					tiered_limit {
						trusted_hops 1 %[2]s
						tier ip 2/%[3]s
						tier key 1000000/%[3]s {
							key {http.request.header.X-Key}
						}
					}
					respond ok
				}`, port, test.header, always))
			honest := func(client string) []int {
				return rawStatuses(t, 1, "127.0.3.1", port, fmt.Sprintf(test.honest, client))
			}
			for i, c := range test.cases {
				t.Run(c.name, func(t *testing.T) { checkAbsurdity(t, c, i+1, port, honest) })
			}
			assert.Equal(t, []int{200}, honest(victim), "the victim's first request")
			assert.Equal(t, []int{200}, honest(victim), "the victim's second request")
			assert.Equal(t, []int{429}, honest(victim), "the victim's third request")
		})
	}
}

// checkAbsurdity sends one absurd request three times to a limit of two and looks whose budget is gone.
func checkAbsurdity(t *testing.T, c absurdity, number, port int, honest func(client string) []int) {
	t.Helper()
	peer, client := fmt.Sprintf("127.0.2.%d", number), fmt.Sprintf("198.51.100.%d", number)
	fields := strings.NewReplacer("%c", client, "%v", victim).Replace(c.fields)
	got := rawStatuses(t, 3, peer, port, fields)
	peerLeft, clientLeft := rawStatuses(t, 1, peer, port, ""), honest(client)
	switch c.client {
	case "":
		assert.Subset(t, []int{400, 431}, got)
		assert.Equal(t, []int{200, 200}, append(peerLeft, clientLeft...), "budgets of peer and client")
	case "peer":
		assert.Equal(t, []int{200, 200, 429}, got)
		assert.Equal(t, []int{200, 200}, append(peerLeft, clientLeft...), "a chain of no use is counted apart from peer and client")
	case "chain":
		assert.Equal(t, []int{200, 200, 429}, got)
		assert.Equal(t, []int{200, 429}, append(peerLeft, clientLeft...), "budgets of peer and client")
	default:
		t.Fatalf("whose is it? %q", c.client)
	}
}

// rawStatuses sends a request with header field lines n times, each over its own connection, and returns the statuses.
func rawStatuses(t *testing.T, n int, source string, port int, fields string) []int {
	t.Helper()
	list := make([]int, n)
	for i := range list {
		response, conn, _ := sendRaw(t, source, port, "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"+fields+"\r\n")
		list[i] = response.StatusCode
		require.NoError(t, conn.Close())
	}
	return list
}

// What exceeds the server's own bound on header fields is refused by the server and costs nobody anything.
func TestHeadersOverTheServersBound(t *testing.T) {
	port := ports.Free(t)
	startCaddy(t, fmt.Sprintf(":%d {\n\tbind 127.0.0.1\n\ttiered_limit {\n\t\ttrusted_hops 1\n\t\ttier ip 1/%s\n\t}\n\trespond ok\n}\n",
		port, always))
	fields := line("X-Forwarded-For", strings.Repeat("198.51.100.1, ", 4000)+"198.51.100.1")
	assert.Equal(t, []int{http.StatusRequestHeaderFieldsTooLarge, http.StatusRequestHeaderFieldsTooLarge},
		rawStatuses(t, 2, "127.0.2.1", port, fields))
	assert.Equal(t, []int{200}, rawStatuses(t, 1, "127.0.2.1", port, line("X-Forwarded-For", "198.51.100.1")), "the client's budget")
	assert.Equal(t, []int{200}, rawStatuses(t, 1, "127.0.2.1", port, ""), "the peer's budget")
}
