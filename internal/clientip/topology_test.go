package clientip

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// requestFrom is a request from a peer with these headers.
func requestFrom(peer string, header http.Header) *http.Request {
	if header == nil {
		header = http.Header{}
	}
	return &http.Request{RemoteAddr: peer, Header: header}
}

// xff is a header with these field lines of X-Forwarded-For.
func xff(lines ...string) http.Header { return http.Header{DefaultHeader: lines} }

// trustRanges trusts the addresses in these ranges.
func trustRanges(ranges ...string) func(*http.Request, netip.Addr) bool {
	var trusted []netip.Prefix
	for _, s := range ranges {
		trusted = append(trusted, NAT64(nil).CanonicalPrefix(netip.MustParsePrefix(s)))
	}
	return func(_ *http.Request, addr netip.Addr) bool {
		for _, p := range trusted {
			if p.Contains(addr) {
				return true
			}
		}
		return false
	}
}

// Topologies that the tests share.
func byHops(n int, header string) *Topology { return &Topology{Hops: n, Header: header} }

func byTrust(headers ...string) *Topology {
	if len(headers) == 0 {
		headers = []string{DefaultHeader}
	}
	return &Topology{Hops: -1, Trusted: trustRanges("10.0.0.0/8", "fd00::/8"), Headers: headers}
}

func byBoth(n int) *Topology {
	t := byTrust()
	t.Hops = n
	return t
}

// clientCase is a request and who sent it.
type clientCase struct {
	topology *Topology
	peer     string
	header   http.Header
	want     string // empty: no address
	reason   Reason
}

func (tc clientCase) run(t *testing.T) {
	t.Helper()
	r := requestFrom(tc.peer, tc.header)
	before := r.Header.Clone()
	got, place := tc.topology.Find(r)
	assert.Equal(t, got, tc.topology.Client(r))
	want := netip.Addr{}
	if tc.want != "" {
		want = netip.MustParseAddr(tc.want)
	}
	assert.Equal(t, want, got.Addr, "address")
	assert.Equal(t, tc.reason, got.Fallback, "reason %q, want %q", got.Fallback, tc.reason)
	assert.Equal(t, before, r.Header, "the header must not be touched")
	got.Longer = false
	plain, plainPlace := plainClient(tc.topology, r)
	assert.Equal(t, plain, got, "the plain reading")
	assert.Equal(t, plainPlace, place, "the place, by the plain reading")
}

func TestClient(t *testing.T) {
	const lb = "10.0.0.1:4711"
	for name, tc := range map[string]clientCase{
		"hops 0 ignores the header": {
			topology: byHops(0, ""), peer: "203.0.113.7:1", header: xff("6.6.6.6"), want: "203.0.113.7"},
		"hops 0 ignores trusted proxies": {
			topology: byBoth(0), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1"},
		"hops 0 ignores a single-valued header": {
			topology: byHops(0, "Cf-Connecting-Ip"), peer: lb, header: http.Header{"Cf-Connecting-Ip": {"6.6.6.6"}},
			want: "10.0.0.1"},
		"hops 0 ignores garbage": {
			topology: byHops(0, ""), peer: lb, header: xff("\x00"), want: "10.0.0.1"},
		"hops 1 with a forged entry": {
			topology: byHops(1, ""), peer: lb, header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"hops 1 with forged garbage": {
			topology: byHops(1, ""), peer: lb, header: xff(`,"\,;, 203.0.113.7`), want: "203.0.113.7"},
		"hops 2 behind Google's load balancer": {
			topology: byHops(2, ""), peer: lb, header: xff("6.6.6.6,203.0.113.7,198.51.100.1"), want: "203.0.113.7"},
		"hops 2, chain of exactly 2": {
			topology: byHops(2, ""), peer: lb, header: xff("203.0.113.7,198.51.100.1"), want: "203.0.113.7"},
		"hops 2, another client": {
			topology: byHops(2, ""), peer: lb, header: xff("203.0.113.8,198.51.100.1"), want: "203.0.113.8"},
		"hops 2, one entry": {
			topology: byHops(2, ""), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1", reason: ShortChain},
		"hops 2, none": {
			topology: byHops(2, ""), peer: lb, want: "10.0.0.1", reason: ShortChain},
		"hops 2, no line": {
			topology: byHops(2, ""), peer: lb, header: xff(), want: "10.0.0.1", reason: ShortChain},
		"hops 64, 63 entries": {
			topology: byHops(64, ""), peer: lb, header: xff(strings.Repeat("6.6.6.6,", 62) + "6.6.6.6"),
			want: "10.0.0.1", reason: ShortChain},
		"hops 64, 64 entries": {
			topology: byHops(64, ""), peer: lb, header: xff("203.0.113.7" + strings.Repeat(",10.0.0.1", 63)),
			want: "203.0.113.7"},
		"another header is no replacement": {
			topology: byHops(1, "X-Real-Ip"), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1",
			reason: ShortChain},
		"two field lines": {
			topology: byHops(1, ""), peer: lb, header: xff("6.6.6.6", "6.6.6.7, 203.0.113.7"), want: "203.0.113.7"},
		"two field lines, read across": {
			topology: byHops(3, ""), peer: lb, header: xff("203.0.113.7", "10.0.0.3, 10.0.0.2"), want: "203.0.113.7"},
		"an empty line is an empty entry": {
			topology: byHops(1, ""), peer: lb, header: xff("6.6.6.6", ""), want: "10.0.0.1", reason: BadEntry},
		"an empty line on the caller's side": {
			topology: byHops(1, ""), peer: lb, header: xff("", "203.0.113.7"), want: "203.0.113.7"},
		"unknown": {
			topology: byHops(1, ""), peer: lb, header: xff("1.2.3.4, unknown"), want: "10.0.0.1",
			reason: BadEntry},
		"empty": {
			topology: byHops(1, ""), peer: lb, header: xff("1.2.3.4, "), want: "10.0.0.1", reason: BadEntry},
		"obfuscated": {
			topology: byHops(1, ""), peer: lb, header: xff("1.2.3.4, _x"), want: "10.0.0.1", reason: BadEntry},
		"garbage in the middle": {
			topology: byHops(2, ""), peer: lb, header: xff("1.2.3.4, \xff, 10.0.0.2"), want: "10.0.0.1",
			reason: BadEntry},
		"port": {
			topology: byHops(1, ""), peer: lb, header: xff("203.0.113.7:51234"), want: "203.0.113.7",
		},
		"next port": {
			topology: byHops(1, ""), peer: lb, header: xff("203.0.113.7:51235"), want: "203.0.113.7",
		},
		"brackets": {
			topology: byHops(1, ""), peer: lb, header: xff("[2001:db8::1]:443"), want: "2001:db8::1",
		},
		"zone":                {topology: byHops(1, ""), peer: lb, header: xff("fe80::1%eth0"), want: "fe80::1"},
		"peer zone":           {topology: byHops(0, ""), peer: "[fe80::1%eth0]:5", want: "fe80::1"},
		"peer IPv6":           {topology: byHops(0, ""), peer: "[::1]:5", want: "::1"},
		"peer without a port": {topology: byHops(0, ""), peer: "1.2.3.4", want: "1.2.3.4"},
		"plain": {
			topology: byHops(1, ""), peer: lb, header: xff("203.0.113.7"), want: "203.0.113.7",
		},
		"v4-mapped": {
			topology: byHops(1, ""), peer: lb, header: xff("::ffff:203.0.113.7"), want: "203.0.113.7",
		},
		"v4-mapped in hex": {
			topology: byHops(1, ""), peer: lb, header: xff("::ffff:cb00:7107"), want: "203.0.113.7",
		},
		"another v4-mapped": {
			topology: byHops(1, ""), peer: lb, header: xff("::ffff:cb00:7108"), want: "203.0.113.8",
		},
		"v4-mapped peer": {topology: byHops(0, ""), peer: "[::ffff:203.0.113.7]:1", want: "203.0.113.7"},
		"trusted proxy, a forged entry": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"two trusted proxies": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, 203.0.113.7, 10.0.0.9"), want: "203.0.113.7"},
		"IPv6 proxies": {
			topology: byTrust(), peer: "[fd00::1]:2", header: xff("6.6.6.6, 2001:db8::1, fd00::2"), want: "2001:db8::1"},
		"trusted proxy, no header": {topology: byTrust(), peer: lb, want: "10.0.0.1"},
		"garbage before the client": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, unknown, 10.0.0.2"), want: "10.0.0.1",
			reason: BadEntry},
		"an empty header": {
			topology: byTrust(), peer: lb, header: xff(""), want: "10.0.0.1", reason: BadEntry},
		"garbage behind the client is not read": {
			topology: byTrust(), peer: lb, header: xff("\x00, 203.0.113.7, 10.0.0.2"), want: "203.0.113.7"},
		"the first header present decides": {
			topology: byTrust("Cf-Connecting-Ip", DefaultHeader), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"203.0.113.7"}, DefaultHeader: {"6.6.6.6"}}, want: "203.0.113.7"},
		"an absent header is passed over": {
			topology: byTrust("Cf-Connecting-Ip", DefaultHeader), peer: lb, header: xff("203.0.113.7"), want: "203.0.113.7"},
		"a garbage header is not passed over": {
			topology: byTrust("Cf-Connecting-Ip", DefaultHeader), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"?"}, DefaultHeader: {"6.6.6.6"}}, want: "10.0.0.1",
			reason: BadEntry},
		"an all-trusted header is not passed over": {
			topology: byTrust("Cf-Connecting-Ip", DefaultHeader), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"10.0.0.2"}, DefaultHeader: {"6.6.6.6"}}, want: "10.0.0.1",
			reason: AllTrusted},
		"Forwarded among the headers": {
			topology: byTrust(ForwardedHeader, DefaultHeader), peer: lb,
			header: http.Header{ForwardedHeader: {`for=6.6.6.6, for="203.0.113.7:1", for=10.0.0.2`}, DefaultHeader: {"6.6.6.6"}},
			want:   "203.0.113.7"},
		"v4-mapped trusted proxy": {
			topology: byTrust(), peer: lb, header: xff("203.0.113.7, ::ffff:10.0.0.5"), want: "203.0.113.7"},
		"trusted, v4-mapped in hex": {
			topology: byTrust(), peer: lb, header: xff("203.0.113.7, ::ffff:a00:5"), want: "203.0.113.7"},
		"trusted, v4-mapped peer": {
			topology: byTrust(), peer: "[::ffff:10.0.0.1]:1", header: xff("203.0.113.7"), want: "203.0.113.7"},
		"v4-mapped client": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, ::ffff:203.0.113.7, 10.0.0.5"), want: "203.0.113.7"},
		"peer outside": {
			topology: byTrust(), peer: "198.51.100.9:1", header: xff("6.6.6.6"), want: "198.51.100.9", reason: UntrustedPeer,
		},
		"peer outside, garbage": {
			topology: byTrust(), peer: "198.51.100.9:1", header: xff("?"), want: "198.51.100.9", reason: UntrustedPeer,
		},
		"peer outside, hops": {
			topology: byBoth(1), peer: "198.51.100.9:1", header: xff("6.6.6.6"), want: "198.51.100.9", reason: UntrustedPeer,
		},
		"peer outside, hops, short chain is no fallback": {
			topology: byBoth(2), peer: "198.51.100.9:1", want: "198.51.100.9"},
		"peer inside, hops": {
			topology: byBoth(2), peer: lb, header: xff("6.6.6.6, 203.0.113.7, 198.51.100.1"), want: "203.0.113.7"},
		"peer inside, hops count trusted entries too": {
			topology: byBoth(1), peer: lb, header: xff("203.0.113.7, 10.0.0.2"), want: "10.0.0.2"},
		"peer inside, short chain": {
			topology: byBoth(2), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1", reason: ShortChain},
		"only unix peers are trusted": {
			topology: &Topology{Hops: -1, Unix: true, Headers: []string{DefaultHeader}}, peer: lb, header: xff("6.6.6.6"),
			want: "10.0.0.1", reason: UntrustedPeer},
		"only unix peers are trusted, hops": {
			topology: &Topology{Hops: 1, Unix: true}, peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1", reason: UntrustedPeer},
		"unix socket, hops 0": {
			topology: byHops(0, ""), peer: "@", header: xff("6.6.6.6"), reason: NoPeer,
		},
		"unix socket, path":  {topology: byHops(0, ""), peer: "/run/app.sock", reason: NoPeer},
		"no peer at all":     {topology: byHops(0, ""), peer: "", reason: NoPeer},
		"garbage for a peer": {topology: byHops(0, ""), peer: "\xff:[\x00", reason: NoPeer},
		"unix socket, ranges": {
			topology: byTrust(), peer: "@", header: xff("6.6.6.6"), reason: UntrustedPeer,
		},
		"unix socket, ranges, hops": {
			topology: byBoth(1), peer: "@", header: xff("6.6.6.6"), reason: UntrustedPeer,
		},
		"unix socket, unix, nothing": {
			topology: &Topology{Hops: -1, Unix: true, Headers: []string{DefaultHeader}}, peer: "@",
			reason: NoPeer,
		},
		"unix socket, unix": {
			topology: &Topology{Hops: -1, Unix: true, Headers: []string{DefaultHeader}}, peer: "@",
			header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"unix socket, unix and ranges": {
			topology: &Topology{Hops: -1, Unix: true, Trusted: trustRanges("10.0.0.0/8"), Headers: []string{DefaultHeader}},
			peer:     "@", header: xff("6.6.6.6, 203.0.113.7, 10.0.0.2"), want: "203.0.113.7"},
		"unix socket, unix and hops": {
			topology: &Topology{Hops: 2, Unix: true}, peer: "@", header: xff("6.6.6.6, 203.0.113.7, 10.0.0.2"),
			want: "203.0.113.7"},
		"unix socket, unix, ranges and hops": {
			topology: &Topology{Hops: 2, Unix: true, Trusted: trustRanges("10.0.0.0/8")}, peer: "@",
			header: xff("6.6.6.6, 203.0.113.7, 198.51.100.1"), want: "203.0.113.7"},
		"unix socket, unix, garbage": {
			topology: &Topology{Hops: -1, Unix: true, Headers: []string{DefaultHeader}}, peer: "@",
			header: xff("6.6.6.6, ?"), reason: BadEntry},
		"loopback":      {topology: byHops(0, ""), peer: "127.0.0.1:1", want: "127.0.0.1"},
		"IPv6 loopback": {topology: byHops(1, ""), peer: lb, header: xff("::1"), want: "::1"},
		"private":       {topology: byHops(1, ""), peer: lb, header: xff("192.168.1.1"), want: "192.168.1.1"},
		"private walked": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, 192.168.1.1"), want: "192.168.1.1",
		},
		"nothing stated": {topology: &Topology{Hops: -1}, peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1"},
		"nothing stated, header names": {
			topology: &Topology{Hops: -1, Headers: []string{DefaultHeader}}, peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1"},
		"nothing stated, unix socket": {
			topology: &Topology{Hops: -1, Headers: []string{DefaultHeader}}, peer: "@", header: xff("6.6.6.6"),
			reason: NoPeer},
		"a quote left open": {
			topology: byHops(1, ForwardedHeader), peer: lb,
			header: http.Header{ForwardedHeader: {`for=9.9.9.9;x=", for="203.0.113.7:1"`}}, want: "10.0.0.1",
			reason: BadEntry},
		"every entry trusted": {
			topology: byTrust(), peer: lb, header: xff("10.0.0.3, 10.0.0.2"), want: "10.0.0.1", reason: AllTrusted},
		"unix socket, hops 1": {
			topology: byHops(1, ""), peer: "@", header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"in process, hops 1": {
			topology: byHops(1, ""), peer: "", header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"unix socket, hops 1, nothing": {topology: byHops(1, ""), peer: "@", reason: ShortChain},
		"unix socket, hops 1, garbage": {
			topology: byHops(1, ""), peer: "@", header: xff("6.6.6.6, ?"), reason: BadEntry,
		},
		"unix socket, all trusted": {
			topology: &Topology{Hops: -1, Unix: true, Trusted: trustRanges("10.0.0.0/8"), Headers: []string{DefaultHeader}},
			peer:     "@", header: xff("10.0.0.2"), reason: AllTrusted,
		},
		"hops 1 of a single-valued header": {
			topology: byHops(1, "Cf-Connecting-Ip"), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"203.0.113.7"}, DefaultHeader: {"6.6.6.6"}},
			want:   "203.0.113.7",
		},
		"hops without a peer to fall to": {
			topology: byHops(3, ""), peer: "nobody", header: xff("6.6.6.6"), reason: ShortChain,
		},
		"tabs around the entries": {
			topology: byHops(2, ""), peer: lb, header: xff("6.6.6.6,\t203.0.113.7\t,\t10.0.0.2"),
			want: "203.0.113.7",
		},
		"quotes mean nothing outside of it": {
			topology: byHops(1, ""), peer: lb, header: xff(`"6.6.6.6, 203.0.113.7`), want: "203.0.113.7",
		},
	} {
		t.Run(name, tc.run)
	}
}

// TestTopologyStated tells for every combination whether the address may be used.
func TestTopologyStated(t *testing.T) {
	trusted := trustRanges("10.0.0.0/8")
	assert.False(t, (&Topology{Hops: -1}).Stated(), "nothing")
	assert.False(t, (&Topology{Hops: -1, Header: DefaultHeader, Headers: []string{DefaultHeader}}).Stated(), "header names")
	assert.True(t, (&Topology{Hops: 0}).Stated(), "0 hops")
	assert.True(t, (&Topology{Hops: 2}).Stated(), "2 hops")
	assert.True(t, (&Topology{Hops: -1, Trusted: trusted}).Stated(), "trusted proxies")
	assert.True(t, (&Topology{Hops: -1, Unix: true}).Stated(), "unix")
	assert.True(t, (&Topology{Hops: 1, Trusted: trusted, Unix: true}).Stated(), "all")
}

func TestFallbackReasonString(t *testing.T) {
	var got []string
	for f := range Reasons {
		got = append(got, f.String())
	}
	assert.Equal(t, []string{"", "short_chain", "bad_entry", "all_trusted", "no_peer", "untrusted_peer"}, got)
}

// TestChainFieldLines cuts one chain into field lines in every way: the client stays the same.
func TestChainFieldLines(t *testing.T) {
	entries := []string{"6.6.6.6", "6.6.6.7", "203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4"}
	for _, forwarded := range []bool{false, true} {
		for cuts := range 1 << (len(entries) - 1) {
			name, lines := DefaultHeader, []string{""}
			for i, e := range entries {
				if forwarded {
					name, e = ForwardedHeader, "proto=https;For="+e
				}
				switch last := &lines[len(lines)-1]; {
				case i == 0:
					*last = e
				case cuts>>(i-1)&1 == 1:
					lines = append(lines, e)
				default:
					*last += ", " + e
				}
			}
			for n := 1; n <= len(entries)+1; n++ {
				top := byHops(n, name)
				r := requestFrom("10.0.0.1:1", http.Header{name: lines})
				want := Client{Addr: netip.MustParseAddr("10.0.0.1"), Fallback: ShortChain, Apart: true}
				if n <= len(entries) {
					want = Client{Addr: netip.MustParseAddr(entries[len(entries)-n]), Longer: n < len(entries)}
				}
				assert.Equal(t, want, top.Client(r), "hops %d of %q", n, lines)
				assert.Equal(t, len(entries), top.ChainLength(r), "length of %q", lines)
				left, ok := top.neighbour(r)
				assert.Equal(t, n < len(entries), ok, "neighbour at hops %d of %q", n, lines)
				if ok {
					assert.Equal(t, netip.MustParseAddr(entries[len(entries)-n-1]), left)
				}
			}
		}
	}
}

func TestChainLength(t *testing.T) {
	for name, tc := range map[string]struct {
		topology *Topology
		header   http.Header
		want     int
	}{
		"none":                    {topology: byHops(1, ""), want: 0},
		"one":                     {topology: byHops(1, ""), header: xff("6.6.6.6"), want: 1},
		"an empty line":           {topology: byHops(1, ""), header: xff(""), want: 1},
		"lines and empty entries": {topology: byHops(1, ""), header: xff("a,,b", "", "c,"), want: 6},
		"hops 0":                  {topology: byHops(0, ""), header: xff("a, b, c"), want: 3},
		"hops 0, Forwarded": {
			topology: byHops(0, ""), header: http.Header{ForwardedHeader: {`for=a;x=",", for=b`}}, want: 2,
		},
		"hops 0, own header": {
			topology: byHops(0, "X-Real-Ip"), header: http.Header{"X-Real-Ip": {"a"}}, want: 1,
		},
		"hops 0, server header": {
			topology: &Topology{Headers: []string{"Fly-Client-Ip"}},
			header:   http.Header{"Fly-Client-Ip": {"a"}}, want: 1,
		},
		"hops 0, another header": {topology: byHops(0, ""), header: http.Header{"Accept": {"a"}}, want: 0},
		"hops, another header": {
			topology: byHops(1, ""), header: http.Header{ForwardedHeader: {"for=a"}}, want: 0,
		},
		"trusted proxies": {topology: byTrust("X-Real-Ip", DefaultHeader), header: xff("a, b"), want: 2},
		"broken Forwarded": {
			topology: byHops(1, ForwardedHeader), header: http.Header{ForwardedHeader: {`for="a, b`}}, want: 2,
		},
		"many": {topology: byHops(1, ""), header: xff(strings.Repeat(",", 9999)), want: 10000},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, tc.want, tc.topology.ChainLength(requestFrom("10.0.0.1:1", tc.header)))
		})
	}
}

// TestAbsurdHeaders sends what no proxy would: the work is bounded and the answer is right.
func TestAbsurdHeaders(t *testing.T) {
	const size = 1 << 16
	many := make([]string, 10000)
	for i := range many {
		many[i] = fmt.Sprintf("10.%d.%d.1", i/256, i%256)
	}
	for name, prefix := range map[string]string{
		"64 KiB of commas":          strings.Repeat(",", size),
		"64 KiB of blanks":          strings.Repeat(" \t", size/2),
		"64 KiB of one entry":       strings.Repeat("1", size),
		"64 KiB of quotes":          strings.Repeat(`"`, size),
		"64 KiB of NUL":             strings.Repeat("\x00", size),
		"64 KiB of invalid UTF-8":   strings.Repeat("\xff\xc0", size/2),
		"10000 trusted addresses":   strings.Join(many, ", "),
		"10000 untrusted addresses": strings.Repeat("6.6.6.6, ", 9999) + "6.6.6.6",
	} {
		for i, lines := range [][]string{
			{prefix, "203.0.113.7,10.0.0.2"},
			{prefix + ", 203.0.113.7,10.0.0.2"},
			{prefix, "203.0.113.7", "10.0.0.2"},
		} {
			t.Run(fmt.Sprint(name, " ", i), func(t *testing.T) {
				clientCase{topology: byHops(2, ""), peer: "10.0.0.1:1", header: xff(lines...), want: "203.0.113.7"}.run(t)
				clientCase{topology: byTrust(), peer: "10.0.0.1:1", header: xff(lines...), want: "203.0.113.7"}.run(t)
			})
		}
	}

	asked := 0
	top := byTrust()
	trusted := top.Trusted
	top.Trusted = func(r *http.Request, addr netip.Addr) bool { asked++; return trusted(r, addr) }
	got := top.Client(requestFrom("10.0.0.1:1", xff(many...)))
	assert.Equal(t, Client{Addr: netip.MustParseAddr("10.0.0.1"), Fallback: AllTrusted, Apart: true}, got)
	assert.LessOrEqual(t, asked, MaxHops+1, "10000 trusted entries")

	clientCase{topology: byTrust(), peer: "10.0.0.1:1", header: xff("203.0.113.7", strings.Join(many[:MaxHops-1], ",")),
		want: "203.0.113.7"}.run(t)
	far := http.Header{ForwardedHeader: {"for=203.0.113.7" + strings.Repeat(",for=10.0.0.2", MaxHops)}}
	clientCase{topology: byTrust(ForwardedHeader), peer: "10.0.0.1:1", header: far, want: "10.0.0.1",
		reason: AllTrusted}.run(t)
	near := http.Header{ForwardedHeader: {"for=203.0.113.7" + strings.Repeat(",for=10.0.0.2", MaxHops-1)}}
	clientCase{topology: byTrust(ForwardedHeader), peer: "10.0.0.1:1", header: near, want: "203.0.113.7"}.run(t)

	lines := make([]string, 10000)
	clientCase{topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff(lines...), want: "10.0.0.1",
		reason: BadEntry}.run(t)
	clientCase{topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff(append(lines, "203.0.113.7")...),
		want: "203.0.113.7"}.run(t)
}

// TestClientAgainstPlain compares with the plain reading on random topologies and chains.
func TestClientAgainstPlain(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	cases := 100_000
	if testing.Short() {
		cases = 10_000
	}
	reasons := map[Reason]int{}
	for range cases {
		top, r := randomCase(rnd)
		got, place := top.Find(r)
		want, plainPlace := plainClient(top, r)
		got.Longer = false
		if got != want || place != plainPlace {
			t.Fatalf("hops %d of %q, ranges %v, unix %v, headers %q, peer %q, %q:\ngot  %v %q\nwant %v %q", top.Hops,
				top.Header, top.Trusted != nil, top.Unix, top.Headers, r.RemoteAddr, r.Header, got.Addr, got.Fallback,
				want.Addr, want.Fallback)
		}
		reasons[got.Fallback]++
	}
	for f := range Reasons {
		assert.Greater(t, reasons[f], cases/1000, "the cases must reach %q", f)
	}
}

// randomCase makes a topology and a request with a fair share of everything.
func randomCase(rnd *rand.Rand) (*Topology, *http.Request) {
	pick := func(from ...string) string { return from[rnd.IntN(len(from))] }
	names := []string{DefaultHeader, ForwardedHeader, "X-Real-Ip"}
	top := &Topology{Hops: rnd.IntN(6) - 1, Header: pick("", DefaultHeader, ForwardedHeader, "X-Real-Ip")}
	if rnd.IntN(2) == 0 {
		top.Trusted = trustRanges("10.0.0.0/8", "fd00::/8")
	}
	top.Unix = rnd.IntN(4) == 0
	for _, i := range rnd.Perm(len(names))[:1+rnd.IntN(len(names))] {
		top.Headers = append(top.Headers, names[i])
	}
	header := http.Header{}
	for _, name := range names {
		if rnd.IntN(4) == 0 {
			continue
		}
		for range rnd.IntN(4) {
			var entries []string
			for range rnd.IntN(5) {
				addr := pick("10.0.0.2", "::ffff:10.0.0.3", "203.0.113.7", "[2001:db8::1]:443", "fd00::1", "10.0.0.4:80",
					"10.0.0.5", "[fd00::2]", "10.0.0.6", "unknown", "_x", "", " 6.6.6.6\t", "fe80::1%e", "1.2.3.4.5")
				if name == ForwardedHeader {
					addr = pick(`for="`+addr+`"`, `FOR="`+addr+`";proto=http`, `proto=https; for="`+addr+`" `,
						`for="\`+addr+`"`, `host="a,\"b";for="`+addr+`"`, `for=`+addr, `by=_p;`+`for="`+addr+`";;`)
					if rnd.IntN(60) == 0 {
						addr = pick(`for="`, `for=a b`, `for=`, `=`, `for=1.1.1.1;for=2.2.2.2`, `x="\`, `proto=http`,
							`for="a"b`, `for="1.1.1.1"b=c`, `for=1.1.1.1 b=c`)
					}
				}
				entries = append(entries, addr)
			}
			header[name] = append(header[name], strings.Join(entries, pick(",", ", ", " ,\t")))
		}
	}
	return top, requestFrom(pick("10.0.0.1:1", "10.0.0.1:1", "[::ffff:10.0.0.1]:2", "198.51.100.1:3", "@", ""), header)
}

const (
	plainToken   = "[!#$%&'*+.^_`|~0-9A-Za-z-]+"
	plainQuoted  = `"(?:[^\x00-\x08\x0a-\x1f\x7f"\\]|\\[^\x00-\x08\x0a-\x1f\x7f])*"`
	plainPair    = `(` + plainToken + `)=(` + plainToken + `|` + plainQuoted + `)`
	plainElement = `[ \t]*(?:` + plainPair + `)?[ \t]*(?:;[ \t]*(?:` + plainPair + `)?[ \t]*)*`
)

var (
	plainLine  = regexp.MustCompile(`^` + plainElement + `(?:,` + plainElement + `)*$`)
	plainPiece = regexp.MustCompile(plainPair + `|,`)
	plainSlash = regexp.MustCompile(`(?s)\\(.)`)
)

// plainEntries splits the field lines of a header into entries, and reports whether they can be split.
func plainEntries(name string, lines []string) ([]string, bool) {
	if len(lines) == 0 {
		return nil, true
	}
	if name != ForwardedHeader {
		return strings.Split(strings.Join(lines, ","), ","), true
	}
	var entries []string
	for _, line := range lines {
		if !plainLine.MatchString(line) {
			return nil, false
		}
		entries = append(entries, "")
		named := false
		for _, m := range plainPiece.FindAllStringSubmatch(line, -1) {
			switch {
			case m[0] == ",":
				entries = append(entries, "")
				named = false
			case strings.EqualFold(m[1], "for"):
				if named {
					return nil, false
				}
				named = true
				value := m[2]
				if strings.HasPrefix(value, `"`) {
					value = plainSlash.ReplaceAllString(value[1:len(value)-1], "$1")
				}
				entries[len(entries)-1] = value
			}
		}
	}
	return entries, true
}

// plainClient is Topology.Client, written as plainly as can be.
func plainClient(t *Topology, r *http.Request) (Client, int) {
	peer, hasPeer := plainAddr(r.RemoteAddr)
	header := ""
	fallback := func(reason Reason, place int) (Client, int) {
		return Client{Addr: peer, Fallback: reason, Apart: header != "" && len(r.Header.Values(header)) > 0}, place
	}
	direct, _ := fallback(None, 0)
	if !hasPeer {
		direct, _ = fallback(NoPeer, 0)
	}
	trusts := func(a netip.Addr) bool { return t.Trusted != nil && t.Trusted(r, a) }
	ranges := t.Trusted != nil || t.Unix
	believed := !ranges || hasPeer && trusts(peer) || !hasPeer && t.Unix
	if t.Hops == 0 || t.Hops < 0 && !ranges {
		return direct, 0
	}
	name := t.Header
	if name == "" {
		name = "X-Forwarded-For"
	}
	if t.Hops < 0 {
		name = ""
		for _, h := range t.Headers {
			if name == "" && len(r.Header.Values(h)) > 0 {
				name = h
			}
		}
		if name == "" {
			return direct, 0
		}
	}
	if !believed && len(r.Header.Values(name)) > 0 {
		return Client{Addr: peer, Fallback: UntrustedPeer}, 0
	}
	if !believed {
		return direct, 0
	}
	header = name
	entries, ok := plainEntries(name, r.Header.Values(name))
	if !ok {
		return fallback(BadEntry, 0)
	}
	if t.Hops > 0 {
		if len(entries) < t.Hops {
			return fallback(ShortChain, 0)
		}
		addr, ok := plainAddr(entries[len(entries)-t.Hops])
		if !ok {
			return fallback(BadEntry, t.Hops)
		}
		return Client{Addr: addr}, t.Hops
	}
	for i := len(entries) - 1; i >= 0 && i >= len(entries)-64; i-- {
		addr, ok := plainAddr(entries[i])
		if !ok {
			return fallback(BadEntry, len(entries)-i)
		}
		if !trusts(addr) {
			return Client{Addr: addr}, len(entries) - i
		}
	}
	return fallback(AllTrusted, 0)
}

// TestClientAllocations holds the usual cases to no allocation at all.
func TestClientAllocations(t *testing.T) {
	for name, tc := range usualCases() {
		t.Run(name, func(t *testing.T) {
			r := requestFrom(tc.peer, tc.header)
			assert.Equal(t, netip.MustParseAddr(tc.want), tc.topology.Client(r).Addr)
			assert.Zero(t, testing.AllocsPerRun(100, func() { tc.topology.Client(r) }), "allocations")
		})
	}
}

func BenchmarkClient(b *testing.B) {
	for name, tc := range usualCases() {
		b.Run(name, func(b *testing.B) {
			r := requestFrom(tc.peer, tc.header)
			b.ReportAllocs()
			for b.Loop() {
				tc.topology.Client(r)
			}
		})
	}
}

// usualCases are what honest traffic looks like, and the flood that costs the most.
func usualCases() map[string]clientCase {
	many := strings.Repeat("6.6.6.6, ", 7000) // 63 kB
	return map[string]clientCase{
		"peer":  {topology: byHops(0, ""), peer: "203.0.113.7:51234", want: "203.0.113.7"},
		"peer6": {topology: byHops(0, ""), peer: "[2001:db8::1]:51234", want: "2001:db8::1"},
		"hops1": {topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff("203.0.113.7"), want: "203.0.113.7"},
		"hops2": {
			topology: byHops(2, ""), peer: "10.0.0.1:1", header: xff("6.6.6.6, [2001:db8::1]:443,198.51.100.1"),
			want: "2001:db8::1",
		},
		"trusted": {
			topology: byTrust(), peer: "10.0.0.1:1", header: xff("6.6.6.6, 203.0.113.7, ::ffff:10.0.0.2"),
			want: "203.0.113.7",
		},
		"both": {
			topology: byBoth(1), peer: "10.0.0.1:1", header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7",
		},
		"forwarded": {
			topology: byHops(1, ForwardedHeader), peer: "10.0.0.1:1",
			header: http.Header{ForwardedHeader: {`for="[2001:db8::1]:443";proto=https;host=example.com`}},
			want:   "2001:db8::1",
		},
		"short":   {topology: byHops(2, ""), peer: "10.0.0.1:1", header: xff("6.6.6.6"), want: "10.0.0.1"},
		"unknown": {topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff("unknown"), want: "10.0.0.1"},
		"longXFF": {
			topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff(many + "203.0.113.7"), want: "203.0.113.7",
		},
		"longForwarded": {topology: byHops(1, ForwardedHeader), peer: "10.0.0.1:1", header: http.Header{ForwardedHeader: {
			strings.Repeat("for=6.6.6.6, ", 5000) + "for=203.0.113.7"}}, want: "203.0.113.7"},
	}
}

// callerLines are the field lines that a caller sends, from the bytes of a fuzzer: a newline starts the next.
func callerLines(caller string) []string {
	if caller == "" {
		return nil
	}
	return strings.Split(caller, "\n")
}

// appendEntry does what a proxy does to the field lines that it was sent: it starts a line of its own, or appends to
// the last one.
func appendEntry(lines []string, entry string, style int) []string {
	lines = append([]string(nil), lines...)
	if len(lines) == 0 || style == 0 {
		return append(lines, entry)
	}
	lines[len(lines)-1] += [...]string{"", ", ", ",", " ,\t"}[style%4] + entry
	return lines
}

// wantClient fails if the client is not the one that the proxies wrote. The peer is right too if unsure is set.
func wantClient(t *testing.T, top *Topology, r *http.Request, want string, unsure bool) {
	t.Helper()
	got := top.Client(r)
	top.ChainLength(r)
	top.neighbour(r)
	if got.Addr == netip.MustParseAddr(want) && got.Fallback == None {
		return
	}
	peer, _ := NAT64(nil).ParseAddr(r.RemoteAddr)
	if unsure && got.Addr == peer && got.Fallback == BadEntry {
		return
	}
	t.Fatalf("%q: got %v %q, want %v", r.Header, got.Addr, got.Fallback, want)
}

// chainSeeds are things that callers have tried.
var chainSeeds = []string{
	"", "\n", ",", ", ,", "6.6.6.6", "6.6.6.6, 7.7.7.7", "6.6.6.6\n10.0.0.3", "10.0.0.3, 10.0.0.4", "unknown", `"`, `"6.6.6.6`,
	`6.6.6.6\`, "\x00", "\xff\xfe", "[::1", "6.6.6.6;", "for=9.9.9.9", `for=9.9.9.9;x="`, `for=9.9.9.9;x="\`, `for="`, "for=",
	`for=9.9.9.9;`, `for=9.9.9.9,`, `x="\"`, "x=\"\nfor=9.9.9.9", `for="9.9.9.9`, `a=b;c="d,e"`, "for=9.9.9.9;for=8.8.8.8",
}

// FuzzChainHops: whatever a caller writes in front, the client by hops is the address that the proxies wrote.
func FuzzChainHops(f *testing.F) {
	for i, s := range chainSeeds {
		f.Add(s, uint8(i), uint8(i/2))
	}
	f.Fuzz(func(t *testing.T, caller string, hops, style uint8) {
		n := 1 + int(hops)%MaxHops
		lines := callerLines(caller)
		entry := [...]string{"203.0.113.7", "203.0.113.7:4711", "::ffff:203.0.113.7", "[::ffff:cb00:7107]:1"}[style>>2&3]
		lines = appendEntry(lines, entry, int(style&3))
		for i := 1; i < n; i++ {
			lines = appendEntry(lines, [...]string{"10.0.0.2", "unknown", "", "_p"}[(i+int(style))&3], int(style>>4)*i%4)
		}
		r := requestFrom("10.0.0.1:1", xff(lines...))
		wantClient(t, byHops(n, ""), r, "203.0.113.7", false)
		wantClient(t, byBoth(n), r, "203.0.113.7", false)
	})
}

// FuzzChainTrusted: whatever a caller writes in front, the walk ends at the address that the first trusted proxy wrote.
func FuzzChainTrusted(f *testing.F) {
	for i, s := range chainSeeds {
		f.Add(s, uint8(i), uint8(i/2))
	}
	f.Fuzz(func(t *testing.T, caller string, proxies, style uint8) {
		lines := callerLines(caller)
		entry := [...]string{"203.0.113.7", "203.0.113.7:4711", "::ffff:203.0.113.7", "[::ffff:cb00:7107]:1"}[style>>2&3]
		lines = appendEntry(lines, entry, int(style&3))
		for i := range int(proxies) % MaxHops {
			proxy := [...]string{"10.0.0.2", "::ffff:10.0.0.3", "[fd00::1]:80", "fd00::2%e"}[(i+int(style))&3]
			lines = appendEntry(lines, proxy, int(style>>4)*i%4)
		}
		wantClient(t, byTrust(), requestFrom("10.0.0.1:1", xff(lines...)), "203.0.113.7", false)
	})
}

// FuzzChainForwarded: whatever a caller writes in front, and whatever of it the proxies quote back, the client is the
// address that the proxies wrote, or the peer.
func FuzzChainForwarded(f *testing.F) {
	for i, s := range chainSeeds {
		f.Add(s, chainSeeds[(i*7)%len(chainSeeds)], uint8(i), uint8(i/2))
	}
	f.Fuzz(func(t *testing.T, caller, host string, proxies, style uint8) {
		n := 1 + int(proxies)%8
		lines := callerLines(caller)
		host = quoteAsProxy(host)
		element := [...]string{
			`for=203.0.113.7`, `For="203.0.113.7:4711";proto=https`, `host=` + host + `;for=203.0.113.7`,
			`by="_p";for="[::ffff:203.0.113.7]:1";host=` + host}[style>>2&3]
		lines = appendEntry(lines, element, int(style&3))
		for i := 1; i < n; i++ {
			proxy := [...]string{`for=10.0.0.2`, `for="[fd00::1]:80";host=` + host, `host=` + host + `; for="10.0.0.3"`,
				`for="\[fd00\:\:1\]"`}[(i+int(style))&3]
			lines = appendEntry(lines, proxy, int(style>>4)*i%4)
		}
		r := requestFrom("10.0.0.1:1", http.Header{ForwardedHeader: lines})
		wantClient(t, byHops(n, ForwardedHeader), r, "203.0.113.7", caller != "")
		wantClient(t, byTrust(ForwardedHeader), r, "203.0.113.7", caller != "")
	})
}

// quoteAsProxy is a quoted string of what a caller sent, as a careful proxy writes it.
func quoteAsProxy(s string) string {
	quoted := []byte{'"'}
	for _, c := range []byte(s) {
		if c < ' ' && c != '\t' || c == 0x7f {
			continue
		}
		if c == '"' || c == '\\' {
			quoted = append(quoted, '\\')
		}
		quoted = append(quoted, c)
	}
	return string(append(quoted, '"'))
}
