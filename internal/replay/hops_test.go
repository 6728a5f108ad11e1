package replay

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

// chainSource makes the requests of a topology: who connects, and what the header says.
type chainSource func(rnd *rand.Rand, client string, forged string) (peer, header string)

// clientAddr is one of n clients.
func clientAddr(rnd *rand.Rand, n int) string {
	i := rnd.IntN(n)
	return fmt.Sprintf("203.0.%d.%d", 113+i/250, 1+i%250)
}

// forgedPrefix is what a client made up, or nothing.
func forgedPrefix(rnd *rand.Rand) string {
	s := ""
	for range 1 + rnd.IntN(3) {
		s += fmt.Sprintf("10.%d.%d.%d, ", rnd.IntN(256), rnd.IntN(256), rnd.IntN(256))
	}
	return s
}

func appendOwn(hop ...func(rnd *rand.Rand, client string) string) func(*rand.Rand, string, string) string {
	return func(rnd *rand.Rand, client, forged string) string {
		chain := forged
		for i, h := range hop {
			if i > 0 {
				chain += ", "
			}
			chain += h(rnd, client)
		}
		return chain
	}
}

func itself(_ *rand.Rand, client string) string { return client }

func one(addr string) func(*rand.Rand, string) string {
	return func(*rand.Rand, string) string { return addr }
}

func oneOf(list ...string) func(*rand.Rand, string) string {
	return func(rnd *rand.Rand, _ string) string { return list[rnd.IntN(len(list))] }
}

func through(peers []string, chain func(*rand.Rand, string, string) string) chainSource {
	return func(rnd *rand.Rand, client, forged string) (string, string) {
		return peers[rnd.IntN(len(peers))], chain(rnd, client, forged)
	}
}

// study has 2000 requests of a topology studied, a share of the clients always sending a made-up header.
func study(clients int, forging float64, source chainSource) *chainStudy {
	rnd := rand.New(rand.NewPCG(5, 6))
	c := newChainStudy()
	for range 2000 {
		client := clientAddr(rnd, clients)
		forged := ""
		if float64(hashOf(client)%1000) < forging*1000 {
			forged = forgedPrefix(rnd)
		}
		peer, header := source(rnd, client, forged)
		h := make(http.Header)
		if header != "" {
			h.Set("X-Forwarded-For", header)
		}
		c.add(peer, h)
	}
	return c
}

func hashOf(s string) (n int) {
	for _, c := range s {
		n = (n*31 + int(c)) % 1000003
	}
	return n
}

func peers(format string, n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf(format, i+1))
	}
	return list
}

func TestHopCountOfEveryTopology(t *testing.T) {
	direct := func(rnd *rand.Rand, client, forged string) (string, string) {
		return fmt.Sprintf("%s:%d", client, 1024+rnd.IntN(60000)), trimComma(forged)
	}
	for _, c := range []struct {
		name   string
		source chainSource
		want   int
	}{
		{"directly exposed", direct, 0},
		{"one load balancer", through([]string{"10.0.0.1:1"}, appendOwn(itself)), 1},
		{"three load balancers", through(peers("10.0.0.%d:1", 3), appendOwn(itself)), 1},
		{"nginx on the same host", through([]string{"127.0.0.1:1"}, appendOwn(itself)), 1},
		{"nginx over IPv6", through([]string{"[::1]:1"}, appendOwn(itself)), 1},
		{"a unix socket", through([]string{"@"}, appendOwn(itself)), 1},
		{"Google's load balancer", through(peers("35.191.0.%d:1", 60), appendOwn(itself, one("34.117.5.6"))), 2},
		{"HAProxy and nginx", through([]string{"127.0.0.1:1"}, appendOwn(itself, one("10.0.0.9"))), 2},
		{"three HAProxies and nginx", through([]string{"127.0.0.1:1"}, appendOwn(itself, oneOf("10.0.0.7", "10.0.0.8", "10.0.0.9"))), 2},
		{"Google's load balancer and nginx", through([]string{"10.0.0.1:1", "10.0.0.2:1"},
			appendOwn(itself, one("34.117.5.6"), oneOf(peers("35.191.0.%d", 60)...))), 3},
		{"a CDN's public addresses", through(peers("198.51.100.%d:1", 200), appendOwn(itself)), 1},
		{"entries with ports", through([]string{"10.0.0.1:1"}, appendOwn(func(rnd *rand.Rand, client string) string {
			return fmt.Sprintf("%s:%d", client, 1024+rnd.IntN(60000))
		})), 1},
	} {
		for _, forging := range []float64{0, 0.05, 0.3} {
			t.Run(fmt.Sprintf("%s, %.0f %% forge", c.name, forging*100), func(t *testing.T) {
				a := study(500, forging, c.source).advise()
				require.Equal(t, c.want, a.hops, a.reason)
				require.NotEmpty(t, a.reason)
			})
		}
	}
}

func trimComma(s string) string {
	if len(s) > 2 {
		return s[:len(s)-2]
	}
	return s
}

func TestHealthChecksOfAProxyAreNoClients(t *testing.T) {
	n := 0
	a := study(500, 0.05, func(rnd *rand.Rand, client, forged string) (string, string) {
		if n++; n%3 == 0 {
			return "10.0.0.1:1", ""
		}
		return "10.0.0.1:1", forged + client
	}).advise()
	require.Equal(t, 1, a.hops, a.reason)
	require.Contains(t, a.reason, "health checks")
}

func TestNoHopCountWhereNoneCanBeTold(t *testing.T) {
	for _, c := range []struct {
		name    string
		clients int
		source  chainSource
		want    string
	}{
		{"one peer that sends no header", 100, through([]string{"10.0.0.1:1"}, func(*rand.Rand, string, string) string { return "" }),
			"one peer"},
		{"a single client behind a proxy", 1, through([]string{"10.0.0.1:1"}, appendOwn(itself)), "too few"},
		{"two ways of different length", 500, func(rnd *rand.Rand, client, forged string) (string, string) {
			if rnd.IntN(2) == 0 {
				return "10.0.0.1:1", forged + client
			}
			return "10.0.0.2:1", forged + client + ", 10.0.0.1"
		}, "differ in length"},
		{"clients reach the server past the proxy", 500, func(rnd *rand.Rand, client, forged string) (string, string) {
			if rnd.IntN(2) == 0 {
				return "10.0.0.1:1", forged + client
			}
			return client + ":1", ""
		}, "different ways"},
		{"every client sends a header of its own", 500, func(rnd *rand.Rand, client, _ string) (string, string) {
			return "10.0.0.1:1", fmt.Sprintf("6.6.6.%d, %s", rnd.IntN(20), client)
		}, "header of its own"},
		{"a proxy that appends now and then", 500, func(rnd *rand.Rand, client, _ string) (string, string) {
			if rnd.IntN(2) == 0 {
				return "198.51.100.1:1", client
			}
			return "198.51.100.1:1", ""
		}, "do not always append"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := study(c.clients, 0, c.source).advise()
			require.Equal(t, -1, a.hops, a.reason)
			require.Contains(t, a.reason, c.want)
		})
	}
	c := newChainStudy()
	for range leastRequests - 1 {
		c.add("10.0.0.1:1", http.Header{"X-Forwarded-For": {"1.2.3.4"}})
	}
	require.Contains(t, c.advise().reason, "only 19 requests")
}

func TestTheEntriesTakenForProxiesAreNamed(t *testing.T) {
	a := study(500, 0.05, through(peers("35.191.0.%d:1", 60), appendOwn(itself, one("34.117.5.6")))).advise()
	require.Contains(t, a.cure, "your own proxies (34.117.5.6)")
	a = study(500, 0, through([]string{"10.0.0.1:1"}, appendOwn(itself, oneOf(peers("35.191.0.%d", 60)...)))).advise()
	require.Regexp(t, `your own proxies \(35[0-9., ]* and 57 more\)`, a.cure)
}

// Forwarded is read as handlers read it: with ports that change, brackets, quotes, escapes and several lines.
func TestForwardedIsStudiedAsHandlersReadIt(t *testing.T) {
	for name, chain := range map[string]func(client string, i int) []string{
		"commas in quotes": func(client string, _ int) []string {
			return []string{fmt.Sprintf(`for="%s:1";by="a,b";proto=https, for=10.0.0.9`, client)}
		},
		"a proxy's port that changes": func(client string, i int) []string {
			return []string{fmt.Sprintf(`for=%s, for="10.0.0.2:%d"`, client, 1024+i)}
		},
		"IPv6 with a port that changes": func(client string, i int) []string {
			return []string{fmt.Sprintf(`for=%s, for="[2001:db8::9]:%d"`, client, 1024+i)}
		},
		"a port that is a name": func(client string, i int) []string {
			return []string{fmt.Sprintf(`for=%s, for="10.0.0.2:_p%d"`, client, i)}
		},
		"escapes that change": func(client string, i int) []string {
			return []string{fmt.Sprintf(`for=%s;by="\"%d", for="10.0.0.%s2"`, client, i, []string{"", `\`}[i%2])}
		},
		"a parameter in front that changes": func(client string, i int) []string {
			return []string{"for=" + client, fmt.Sprintf("by=_%d;FOR=10.0.0.2", i)}
		},
		"chains of no use now and then": func(client string, i int) []string {
			if i%50 == 0 {
				return []string{`for=9.9.9.9;x="`, "for=" + client + ", for=10.0.0.2"}
			}
			return []string{"for=" + client + ", for=10.0.0.2"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(7, 8))
			c := newChainStudy()
			for i := range 600 {
				c.add("10.0.0.1:1", http.Header{"Forwarded": chain(clientAddr(rnd, 200), i)})
			}
			a := c.advise()
			require.Equal(t, 2, a.hops, a.reason)
			require.Equal(t, "Forwarded", a.header)
		})
	}
}

// studyFields has requests of many clients studied that come with fields of a client's address and of a proxy's.
func studyFields(c *chainStudy, peers []string, fields func(i int, client string) map[string]string) hopAdvice {
	rnd := rand.New(rand.NewPCG(9, 10))
	for i := range 1000 {
		h := make(http.Header)
		for name, value := range fields(i, clientAddr(rnd, 200)) {
			h.Set(name, value)
		}
		c.add(peers[i%len(peers)], h)
	}
	return c.advise()
}

func TestHeadersWithOneEntryAreStudiedToo(t *testing.T) {
	private, public := peers("10.0.0.%d:1", 3), peers("198.51.100.%d:1", 50)
	for _, c := range []struct {
		name, stated string
		peers        []string
		fields       func(i int, client string) map[string]string
		hops         int
		header       string
	}{
		{"a proxy that replaces", "", private, func(_ int, client string) map[string]string {
			return map[string]string{"X-Real-Ip": client}
		}, 1, "X-Real-Ip"},
		{"Cloudflare, as stated", "Cf-Connecting-Ip", public, func(_ int, client string) map[string]string {
			return map[string]string{"Cf-Connecting-Ip": client, "X-Forwarded-For": client}
		}, 1, "Cf-Connecting-Ip"},
		{"Cloudflare, nothing stated", "", public, func(_ int, client string) map[string]string {
			return map[string]string{"Cf-Connecting-Ip": client, "X-Forwarded-For": client}
		}, 1, "X-Forwarded-For"},
		{"a header of one's own", "X-Client-Address", private, func(_ int, client string) map[string]string {
			return map[string]string{"X-Client-Address": client}
		}, 1, "X-Client-Address"},
		{"stated, and on hardly any request", "Cf-Connecting-Ip", private, func(i int, client string) map[string]string {
			if i%10 == 0 {
				return map[string]string{"Cf-Connecting-Ip": client, "X-Forwarded-For": client}
			}
			return map[string]string{"X-Forwarded-For": client}
		}, 1, "X-Forwarded-For"},
		{"the address of a proxy in front of the proxy", "", private, func(_ int, client string) map[string]string {
			return map[string]string{"X-Real-Ip": "10.0.0.9", "X-Forwarded-For": client + ", 10.0.0.9"}
		}, 2, "X-Forwarded-For"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newChainStudy()
			if c.stated != "" {
				s.state(c.stated)
			}
			a := studyFields(s, c.peers, c.fields)
			require.Equal(t, c.hops, a.hops, a.reason)
			require.Equal(t, c.header, a.header)
			if a.header != "X-Forwarded-For" {
				require.Contains(t, a.cure, "can write the header itself")
			}
		})
	}
	made := studyFields(newChainStudy(), peers("203.0.113.%d:1", 200), func(i int, _ string) map[string]string {
		if i%200 < 20 && i < 800 {
			return map[string]string{"X-Real-Ip": fmt.Sprintf("9.9.9.%d", i%250)}
		}
		return nil
	})
	require.Equal(t, 0, made.hops, "clients make up any header: %s", made.reason)
}

func TestPeersAreBounded(t *testing.T) {
	c := newChainStudy()
	for i := range maxPeers + 5000 {
		c.add(fmt.Sprintf("198.51.%d.%d:1", i/256, i%256), http.Header{"X-Forwarded-For": {fmt.Sprintf("1.2.%d.%d", i/256, i%256)}})
	}
	require.Len(t, c.headers[0].peers, maxPeers)
	require.Equal(t, int64(5000), c.headers[0].others.requests)
}

func TestHostOfAPeer(t *testing.T) {
	for peer, want := range map[string]string{
		"1.2.3.4:5": "1.2.3.4", "[2001:db8::1]:5": "2001:db8::1", "[fe80::1%eth0]:5": "fe80::1%eth0", "@": "@", "1.2.3.4": "1.2.3.4",
		"2001:db8::1": "2001:db8::1", "": "",
	} {
		require.Equal(t, want, host(peer))
	}
	for addr, want := range map[string]bool{
		"8.8.8.8": true, "10.0.0.1": false, "127.0.0.1": false, "100.64.0.1": false, "169.254.1.1": false, "::1": false,
		"2001:db8::1": true, "fd00::1": false, "fe80::1%eth0": false, "::ffff:10.0.0.1": false, "@": false,
	} {
		require.Equal(t, want, isPublic(addr), addr)
	}
}
