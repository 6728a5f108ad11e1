package tieredlimit

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
func xff(lines ...string) http.Header { return http.Header{xffHeader: lines} }

// trustRanges trusts the addresses in these ranges.
func trustRanges(ranges ...string) func(*http.Request, netip.Addr) bool {
	var trusted []netip.Prefix
	for _, s := range ranges {
		trusted = append(trusted, canonicalPrefix(netip.MustParsePrefix(s)))
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
func byHops(n int, header string) *topology { return &topology{hops: n, header: header} }

func byTrust(headers ...string) *topology {
	if len(headers) == 0 {
		headers = []string{xffHeader}
	}
	return &topology{hops: -1, trusted: trustRanges("10.0.0.0/8", "fd00::/8"), headers: headers}
}

func byBoth(n int) *topology {
	t := byTrust()
	t.hops = n
	return t
}

// clientCase is a request and who sent it.
type clientCase struct {
	topology *topology
	peer     string
	header   http.Header
	want     string // empty: no address
	reason   fallbackReason
}

func (tc clientCase) run(t *testing.T) {
	t.Helper()
	r := requestFrom(tc.peer, tc.header)
	before := r.Header.Clone()
	got := tc.topology.client(r)
	want := netip.Addr{}
	if tc.want != "" {
		want = netip.MustParseAddr(tc.want)
	}
	assert.Equal(t, want, got.addr, "address")
	assert.Equal(t, tc.reason, got.fallback, "reason %q, want %q", got.fallback, tc.reason)
	assert.Equal(t, before, r.Header, "the header must not be touched")
	assert.Equal(t, plainClient(tc.topology, r), client{addr: got.addr, fallback: got.fallback, apart: got.apart}, "the plain reading")
}

func TestClientRows(t *testing.T) {
	const lb = "10.0.0.1:4711"
	for name, tc := range map[string]clientCase{
		"C1 hops 0 ignores the header": {
			topology: byHops(0, ""), peer: "203.0.113.7:1", header: xff("6.6.6.6"), want: "203.0.113.7"},
		"C1 hops 0 ignores trusted proxies": {
			topology: byBoth(0), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1"},
		"C1 hops 0 ignores a single-valued header": {
			topology: byHops(0, "Cf-Connecting-Ip"), peer: lb, header: http.Header{"Cf-Connecting-Ip": {"6.6.6.6"}},
			want: "10.0.0.1"},
		"C1 hops 0 ignores garbage": {
			topology: byHops(0, ""), peer: lb, header: xff("\x00"), want: "10.0.0.1"},
		"C2 hops 1 with a forged entry": {
			topology: byHops(1, ""), peer: lb, header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"C2 hops 1 with forged garbage": {
			topology: byHops(1, ""), peer: lb, header: xff(`,"\,;, 203.0.113.7`), want: "203.0.113.7"},
		"C3 hops 2 behind Google's load balancer": {
			topology: byHops(2, ""), peer: lb, header: xff("6.6.6.6,203.0.113.7,198.51.100.1"), want: "203.0.113.7"},
		"C3 hops 2, chain of exactly 2": {
			topology: byHops(2, ""), peer: lb, header: xff("203.0.113.7,198.51.100.1"), want: "203.0.113.7"},
		"C3 hops 2, another client": {
			topology: byHops(2, ""), peer: lb, header: xff("203.0.113.8,198.51.100.1"), want: "203.0.113.8"},
		"C4 hops 2, one entry": {
			topology: byHops(2, ""), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1", reason: fallbackShortChain},
		"C4 hops 2, none": {
			topology: byHops(2, ""), peer: lb, want: "10.0.0.1", reason: fallbackShortChain},
		"C4 hops 2, no line": {
			topology: byHops(2, ""), peer: lb, header: xff(), want: "10.0.0.1", reason: fallbackShortChain},
		"C4 hops 64, 63 entries": {
			topology: byHops(64, ""), peer: lb, header: xff(strings.Repeat("6.6.6.6,", 62) + "6.6.6.6"),
			want: "10.0.0.1", reason: fallbackShortChain},
		"C4 hops 64, 64 entries": {
			topology: byHops(64, ""), peer: lb, header: xff("203.0.113.7" + strings.Repeat(",10.0.0.1", 63)),
			want: "203.0.113.7"},
		"C4 another header is no replacement": {
			topology: byHops(1, "X-Real-Ip"), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1",
			reason: fallbackShortChain},
		"C5 two field lines": {
			topology: byHops(1, ""), peer: lb, header: xff("6.6.6.6", "6.6.6.7, 203.0.113.7"), want: "203.0.113.7"},
		"C5 two field lines, read across": {
			topology: byHops(3, ""), peer: lb, header: xff("203.0.113.7", "10.0.0.3, 10.0.0.2"), want: "203.0.113.7"},
		"C5 an empty line is an empty entry": {
			topology: byHops(1, ""), peer: lb, header: xff("6.6.6.6", ""), want: "10.0.0.1", reason: fallbackBadEntry},
		"C5 an empty line on the caller's side": {
			topology: byHops(1, ""), peer: lb, header: xff("", "203.0.113.7"), want: "203.0.113.7"},
		"C6 unknown": {
			topology: byHops(1, ""), peer: lb, header: xff("1.2.3.4, unknown"), want: "10.0.0.1",
			reason: fallbackBadEntry},
		"C6 empty": {
			topology: byHops(1, ""), peer: lb, header: xff("1.2.3.4, "), want: "10.0.0.1", reason: fallbackBadEntry},
		"C6 obfuscated": {
			topology: byHops(1, ""), peer: lb, header: xff("1.2.3.4, _x"), want: "10.0.0.1", reason: fallbackBadEntry},
		"C6 garbage in the middle": {
			topology: byHops(2, ""), peer: lb, header: xff("1.2.3.4, \xff, 10.0.0.2"), want: "10.0.0.1",
			reason: fallbackBadEntry},
		"C7 port": {
			topology: byHops(1, ""), peer: lb, header: xff("203.0.113.7:51234"), want: "203.0.113.7",
		},
		"C7 next port": {
			topology: byHops(1, ""), peer: lb, header: xff("203.0.113.7:51235"), want: "203.0.113.7",
		},
		"C7 brackets": {
			topology: byHops(1, ""), peer: lb, header: xff("[2001:db8::1]:443"), want: "2001:db8::1",
		},
		"C7 zone":                {topology: byHops(1, ""), peer: lb, header: xff("fe80::1%eth0"), want: "fe80::1"},
		"C7 peer zone":           {topology: byHops(0, ""), peer: "[fe80::1%eth0]:5", want: "fe80::1"},
		"C7 peer IPv6":           {topology: byHops(0, ""), peer: "[::1]:5", want: "::1"},
		"C7 peer without a port": {topology: byHops(0, ""), peer: "1.2.3.4", want: "1.2.3.4"},
		"C8 plain": {
			topology: byHops(1, ""), peer: lb, header: xff("203.0.113.7"), want: "203.0.113.7",
		},
		"C8 v4-mapped": {
			topology: byHops(1, ""), peer: lb, header: xff("::ffff:203.0.113.7"), want: "203.0.113.7",
		},
		"C8 v4-mapped in hex": {
			topology: byHops(1, ""), peer: lb, header: xff("::ffff:cb00:7107"), want: "203.0.113.7",
		},
		"C8 another v4-mapped": {
			topology: byHops(1, ""), peer: lb, header: xff("::ffff:cb00:7108"), want: "203.0.113.8",
		},
		"C8 v4-mapped peer": {topology: byHops(0, ""), peer: "[::ffff:203.0.113.7]:1", want: "203.0.113.7"},
		"C10 trusted proxy, a forged entry": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"C10 two trusted proxies": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, 203.0.113.7, 10.0.0.9"), want: "203.0.113.7"},
		"C10 IPv6 proxies": {
			topology: byTrust(), peer: "[fd00::1]:2", header: xff("6.6.6.6, 2001:db8::1, fd00::2"), want: "2001:db8::1"},
		"C10 trusted proxy, no header": {topology: byTrust(), peer: lb, want: "10.0.0.1"},
		"C10 garbage before the client": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, unknown, 10.0.0.2"), want: "10.0.0.1",
			reason: fallbackBadEntry},
		"C10 an empty header": {
			topology: byTrust(), peer: lb, header: xff(""), want: "10.0.0.1", reason: fallbackBadEntry},
		"C10 garbage behind the client is not read": {
			topology: byTrust(), peer: lb, header: xff("\x00, 203.0.113.7, 10.0.0.2"), want: "203.0.113.7"},
		"C10 the first header present decides": {
			topology: byTrust("Cf-Connecting-Ip", xffHeader), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"203.0.113.7"}, xffHeader: {"6.6.6.6"}}, want: "203.0.113.7"},
		"C10 an absent header is passed over": {
			topology: byTrust("Cf-Connecting-Ip", xffHeader), peer: lb, header: xff("203.0.113.7"), want: "203.0.113.7"},
		"C10 a garbage header is not passed over": {
			topology: byTrust("Cf-Connecting-Ip", xffHeader), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"?"}, xffHeader: {"6.6.6.6"}}, want: "10.0.0.1",
			reason: fallbackBadEntry},
		"C10 an all-trusted header is not passed over": {
			topology: byTrust("Cf-Connecting-Ip", xffHeader), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"10.0.0.2"}, xffHeader: {"6.6.6.6"}}, want: "10.0.0.1",
			reason: fallbackAllTrusted},
		"C10 Forwarded among the headers": {
			topology: byTrust(forwardedHeader, xffHeader), peer: lb,
			header: http.Header{forwardedHeader: {`for=6.6.6.6, for="203.0.113.7:1", for=10.0.0.2`}, xffHeader: {"6.6.6.6"}},
			want:   "203.0.113.7"},
		"C11 v4-mapped trusted proxy": {
			topology: byTrust(), peer: lb, header: xff("203.0.113.7, ::ffff:10.0.0.5"), want: "203.0.113.7"},
		"C11 v4-mapped in hex": {
			topology: byTrust(), peer: lb, header: xff("203.0.113.7, ::ffff:a00:5"), want: "203.0.113.7"},
		"C11 v4-mapped peer": {
			topology: byTrust(), peer: "[::ffff:10.0.0.1]:1", header: xff("203.0.113.7"), want: "203.0.113.7"},
		"C11 v4-mapped client": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, ::ffff:203.0.113.7, 10.0.0.5"), want: "203.0.113.7"},
		"C12 peer outside": {
			topology: byTrust(), peer: "198.51.100.9:1", header: xff("6.6.6.6"), want: "198.51.100.9",
		},
		"C12 peer outside, garbage": {
			topology: byTrust(), peer: "198.51.100.9:1", header: xff("?"), want: "198.51.100.9",
		},
		"C12 peer outside, hops": {
			topology: byBoth(1), peer: "198.51.100.9:1", header: xff("6.6.6.6"), want: "198.51.100.9",
		},
		"C12 peer outside, hops, short chain is no fallback": {
			topology: byBoth(2), peer: "198.51.100.9:1", want: "198.51.100.9"},
		"C12 peer inside, hops": {
			topology: byBoth(2), peer: lb, header: xff("6.6.6.6, 203.0.113.7, 198.51.100.1"), want: "203.0.113.7"},
		"C12 peer inside, hops count trusted entries too": {
			topology: byBoth(1), peer: lb, header: xff("203.0.113.7, 10.0.0.2"), want: "10.0.0.2"},
		"C12 peer inside, short chain": {
			topology: byBoth(2), peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1", reason: fallbackShortChain},
		"C12 only unix peers are trusted": {
			topology: &topology{hops: -1, unix: true, headers: []string{xffHeader}}, peer: lb, header: xff("6.6.6.6"),
			want: "10.0.0.1"},
		"C12 only unix peers are trusted, hops": {
			topology: &topology{hops: 1, unix: true}, peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1"},
		"C13 unix socket, hops 0": {
			topology: byHops(0, ""), peer: "@", header: xff("6.6.6.6"), reason: fallbackNoPeer,
		},
		"C13 unix socket, path":  {topology: byHops(0, ""), peer: "/run/app.sock", reason: fallbackNoPeer},
		"C13 no peer at all":     {topology: byHops(0, ""), peer: "", reason: fallbackNoPeer},
		"C13 garbage for a peer": {topology: byHops(0, ""), peer: "\xff:[\x00", reason: fallbackNoPeer},
		"C13 unix socket, ranges": {
			topology: byTrust(), peer: "@", header: xff("6.6.6.6"), reason: fallbackNoPeer,
		},
		"C13 unix socket, ranges, hops": {
			topology: byBoth(1), peer: "@", header: xff("6.6.6.6"), reason: fallbackNoPeer,
		},
		"C13 unix socket, unix, nothing": {
			topology: &topology{hops: -1, unix: true, headers: []string{xffHeader}}, peer: "@",
			reason: fallbackNoPeer,
		},
		"C13 unix socket, unix": {
			topology: &topology{hops: -1, unix: true, headers: []string{xffHeader}}, peer: "@",
			header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"C13 unix socket, unix and ranges": {
			topology: &topology{hops: -1, unix: true, trusted: trustRanges("10.0.0.0/8"), headers: []string{xffHeader}},
			peer:     "@", header: xff("6.6.6.6, 203.0.113.7, 10.0.0.2"), want: "203.0.113.7"},
		"C13 unix socket, unix and hops": {
			topology: &topology{hops: 2, unix: true}, peer: "@", header: xff("6.6.6.6, 203.0.113.7, 10.0.0.2"),
			want: "203.0.113.7"},
		"C13 unix socket, unix, ranges and hops": {
			topology: &topology{hops: 2, unix: true, trusted: trustRanges("10.0.0.0/8")}, peer: "@",
			header: xff("6.6.6.6, 203.0.113.7, 198.51.100.1"), want: "203.0.113.7"},
		"C13 unix socket, unix, garbage": {
			topology: &topology{hops: -1, unix: true, headers: []string{xffHeader}}, peer: "@",
			header: xff("6.6.6.6, ?"), reason: fallbackBadEntry},
		"C14 loopback":      {topology: byHops(0, ""), peer: "127.0.0.1:1", want: "127.0.0.1"},
		"C14 IPv6 loopback": {topology: byHops(1, ""), peer: lb, header: xff("::1"), want: "::1"},
		"C14 private":       {topology: byHops(1, ""), peer: lb, header: xff("192.168.1.1"), want: "192.168.1.1"},
		"C14 private walked": {
			topology: byTrust(), peer: lb, header: xff("6.6.6.6, 192.168.1.1"), want: "192.168.1.1",
		},
		"C15 nothing stated": {topology: &topology{hops: -1}, peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1"},
		"C15 nothing stated, header names": {
			topology: &topology{hops: -1, headers: []string{xffHeader}}, peer: lb, header: xff("6.6.6.6"), want: "10.0.0.1"},
		"C15 nothing stated, unix socket": {
			topology: &topology{hops: -1, headers: []string{xffHeader}}, peer: "@", header: xff("6.6.6.6"),
			reason: fallbackNoPeer},
		"C17 a quote left open": {
			topology: byHops(1, forwardedHeader), peer: lb,
			header: http.Header{forwardedHeader: {`for=9.9.9.9;x=", for="203.0.113.7:1"`}}, want: "10.0.0.1",
			reason: fallbackBadEntry},
		"C18 every entry trusted": {
			topology: byTrust(), peer: lb, header: xff("10.0.0.3, 10.0.0.2"), want: "10.0.0.1", reason: fallbackAllTrusted},
		"C18 unix socket, hops 1": {
			topology: byHops(1, ""), peer: "@", header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"C18 in process, hops 1": {
			topology: byHops(1, ""), peer: "", header: xff("6.6.6.6, 203.0.113.7"), want: "203.0.113.7"},
		"C18 unix socket, hops 1, nothing": {topology: byHops(1, ""), peer: "@", reason: fallbackShortChain},
		"C18 unix socket, hops 1, garbage": {
			topology: byHops(1, ""), peer: "@", header: xff("6.6.6.6, ?"), reason: fallbackBadEntry,
		},
		"C18 unix socket, all trusted": {
			topology: &topology{hops: -1, unix: true, trusted: trustRanges("10.0.0.0/8"), headers: []string{xffHeader}},
			peer:     "@", header: xff("10.0.0.2"), reason: fallbackAllTrusted,
		},
		"hops 1 of a single-valued header": {
			topology: byHops(1, "Cf-Connecting-Ip"), peer: lb,
			header: http.Header{"Cf-Connecting-Ip": {"203.0.113.7"}, xffHeader: {"6.6.6.6"}},
			want:   "203.0.113.7",
		},
		"hops without a peer to fall to": {
			topology: byHops(3, ""), peer: "nobody", header: xff("6.6.6.6"), reason: fallbackShortChain,
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
	assert.False(t, (&topology{hops: -1}).stated(), "nothing")
	assert.False(t, (&topology{hops: -1, header: xffHeader, headers: []string{xffHeader}}).stated(), "header names")
	assert.True(t, (&topology{hops: 0}).stated(), "0 hops")
	assert.True(t, (&topology{hops: 2}).stated(), "2 hops")
	assert.True(t, (&topology{hops: -1, trusted: trusted}).stated(), "trusted proxies")
	assert.True(t, (&topology{hops: -1, unix: true}).stated(), "unix")
	assert.True(t, (&topology{hops: 1, trusted: trusted, unix: true}).stated(), "all")
}

func TestFallbackReasonString(t *testing.T) {
	var got []string
	for f := range fallbackReasons {
		got = append(got, f.String())
	}
	assert.Equal(t, []string{"", "short_chain", "bad_entry", "all_trusted", "no_peer"}, got)
}

// TestChainFieldLines cuts one chain into field lines in every way: the client stays the same.
func TestChainFieldLines(t *testing.T) {
	entries := []string{"6.6.6.6", "6.6.6.7", "203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4"}
	for _, forwarded := range []bool{false, true} {
		for cuts := range 1 << (len(entries) - 1) {
			name, lines := xffHeader, []string{""}
			for i, e := range entries {
				if forwarded {
					name, e = forwardedHeader, "proto=https;For="+e
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
				want := client{addr: netip.MustParseAddr("10.0.0.1"), fallback: fallbackShortChain, apart: true}
				if n <= len(entries) {
					want = client{addr: netip.MustParseAddr(entries[len(entries)-n]), longer: n < len(entries)}
				}
				assert.Equal(t, want, top.client(r), "hops %d of %q", n, lines)
				assert.Equal(t, len(entries), top.chainLength(r), "length of %q", lines)
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
		topology *topology
		header   http.Header
		want     int
	}{
		"none":                    {topology: byHops(1, ""), want: 0},
		"one":                     {topology: byHops(1, ""), header: xff("6.6.6.6"), want: 1},
		"an empty line":           {topology: byHops(1, ""), header: xff(""), want: 1},
		"lines and empty entries": {topology: byHops(1, ""), header: xff("a,,b", "", "c,"), want: 6},
		"C1 hops 0":               {topology: byHops(0, ""), header: xff("a, b, c"), want: 3},
		"C1 hops 0, Forwarded": {
			topology: byHops(0, ""), header: http.Header{forwardedHeader: {`for=a;x=",", for=b`}}, want: 2,
		},
		"C1 hops 0, own header": {
			topology: byHops(0, "X-Real-Ip"), header: http.Header{"X-Real-Ip": {"a"}}, want: 1,
		},
		"C1 hops 0, server header": {
			topology: &topology{headers: []string{"Fly-Client-Ip"}},
			header:   http.Header{"Fly-Client-Ip": {"a"}}, want: 1,
		},
		"C1 hops 0, another header": {topology: byHops(0, ""), header: http.Header{"Accept": {"a"}}, want: 0},
		"hops, another header": {
			topology: byHops(1, ""), header: http.Header{forwardedHeader: {"for=a"}}, want: 0,
		},
		"trusted proxies": {topology: byTrust("X-Real-Ip", xffHeader), header: xff("a, b"), want: 2},
		"broken Forwarded": {
			topology: byHops(1, forwardedHeader), header: http.Header{forwardedHeader: {`for="a, b`}}, want: 2,
		},
		"many": {topology: byHops(1, ""), header: xff(strings.Repeat(",", 9999)), want: 10000},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, tc.want, tc.topology.chainLength(requestFrom("10.0.0.1:1", tc.header)))
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
	trusted := top.trusted
	top.trusted = func(r *http.Request, addr netip.Addr) bool { asked++; return trusted(r, addr) }
	got := top.client(requestFrom("10.0.0.1:1", xff(many...)))
	assert.Equal(t, client{addr: netip.MustParseAddr("10.0.0.1"), fallback: fallbackAllTrusted, apart: true}, got)
	assert.LessOrEqual(t, asked, maxHops+1, "10000 trusted entries")

	clientCase{topology: byTrust(), peer: "10.0.0.1:1", header: xff("203.0.113.7", strings.Join(many[:maxHops-1], ",")),
		want: "203.0.113.7"}.run(t)
	far := http.Header{forwardedHeader: {"for=203.0.113.7" + strings.Repeat(",for=10.0.0.2", maxHops)}}
	clientCase{topology: byTrust(forwardedHeader), peer: "10.0.0.1:1", header: far, want: "10.0.0.1",
		reason: fallbackAllTrusted}.run(t)
	near := http.Header{forwardedHeader: {"for=203.0.113.7" + strings.Repeat(",for=10.0.0.2", maxHops-1)}}
	clientCase{topology: byTrust(forwardedHeader), peer: "10.0.0.1:1", header: near, want: "203.0.113.7"}.run(t)

	lines := make([]string, 10000)
	clientCase{topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff(lines...), want: "10.0.0.1",
		reason: fallbackBadEntry}.run(t)
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
	reasons := map[fallbackReason]int{}
	for range cases {
		top, r := randomCase(rnd)
		got := top.client(r)
		want := plainClient(top, r)
		if got.addr != want.addr || got.fallback != want.fallback || got.apart != want.apart {
			t.Fatalf("hops %d of %q, ranges %v, unix %v, headers %q, peer %q, %q:\ngot  %v %q\nwant %v %q", top.hops,
				top.header, top.trusted != nil, top.unix, top.headers, r.RemoteAddr, r.Header, got.addr, got.fallback,
				want.addr, want.fallback)
		}
		reasons[got.fallback]++
	}
	for f := range fallbackReasons {
		assert.Greater(t, reasons[f], cases/1000, "the cases must reach %q", f)
	}
}

// randomCase makes a topology and a request with a fair share of everything.
func randomCase(rnd *rand.Rand) (*topology, *http.Request) {
	pick := func(from ...string) string { return from[rnd.IntN(len(from))] }
	names := []string{xffHeader, forwardedHeader, "X-Real-Ip"}
	top := &topology{hops: rnd.IntN(6) - 1, header: pick("", xffHeader, forwardedHeader, "X-Real-Ip")}
	if rnd.IntN(2) == 0 {
		top.trusted = trustRanges("10.0.0.0/8", "fd00::/8")
	}
	top.unix = rnd.IntN(4) == 0
	for _, i := range rnd.Perm(len(names))[:1+rnd.IntN(len(names))] {
		top.headers = append(top.headers, names[i])
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
				if name == forwardedHeader {
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
	if name != forwardedHeader {
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

// plainClient is topology.client, written as plainly as can be.
func plainClient(t *topology, r *http.Request) client {
	peer, hasPeer := plainAddr(r.RemoteAddr)
	header := ""
	fallback := func(reason fallbackReason) client {
		return client{addr: peer, fallback: reason, apart: header != "" && len(r.Header.Values(header)) > 0}
	}
	direct := fallback(fallbackNone)
	if !hasPeer {
		direct = fallback(fallbackNoPeer)
	}
	trusts := func(a netip.Addr) bool { return t.trusted != nil && t.trusted(r, a) }
	ranges := t.trusted != nil || t.unix
	believed := !ranges || hasPeer && trusts(peer) || !hasPeer && t.unix
	if t.hops == 0 || t.hops < 0 && !ranges || !believed {
		return direct
	}
	name := t.header
	if name == "" {
		name = "X-Forwarded-For"
	}
	if t.hops < 0 {
		name = ""
		for _, h := range t.headers {
			if name == "" && len(r.Header.Values(h)) > 0 {
				name = h
			}
		}
		if name == "" {
			return direct
		}
	}
	header = name
	entries, ok := plainEntries(name, r.Header.Values(name))
	if !ok {
		return fallback(fallbackBadEntry)
	}
	if t.hops > 0 {
		if len(entries) < t.hops {
			return fallback(fallbackShortChain)
		}
		addr, ok := plainAddr(entries[len(entries)-t.hops])
		if !ok {
			return fallback(fallbackBadEntry)
		}
		return client{addr: addr}
	}
	for i := len(entries) - 1; i >= 0 && i >= len(entries)-64; i-- {
		addr, ok := plainAddr(entries[i])
		if !ok {
			return fallback(fallbackBadEntry)
		}
		if !trusts(addr) {
			return client{addr: addr}
		}
	}
	return fallback(fallbackAllTrusted)
}

// TestClientAllocations holds the usual cases to no allocation at all.
func TestClientAllocations(t *testing.T) {
	for name, tc := range usualCases() {
		t.Run(name, func(t *testing.T) {
			r := requestFrom(tc.peer, tc.header)
			assert.Equal(t, netip.MustParseAddr(tc.want), tc.topology.client(r).addr)
			assert.Zero(t, testing.AllocsPerRun(100, func() { tc.topology.client(r) }), "allocations")
		})
	}
}

func BenchmarkClient(b *testing.B) {
	for name, tc := range usualCases() {
		b.Run(name, func(b *testing.B) {
			r := requestFrom(tc.peer, tc.header)
			b.ReportAllocs()
			for b.Loop() {
				tc.topology.client(r)
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
			topology: byHops(1, forwardedHeader), peer: "10.0.0.1:1",
			header: http.Header{forwardedHeader: {`for="[2001:db8::1]:443";proto=https;host=example.com`}},
			want:   "2001:db8::1",
		},
		"short":   {topology: byHops(2, ""), peer: "10.0.0.1:1", header: xff("6.6.6.6"), want: "10.0.0.1"},
		"unknown": {topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff("unknown"), want: "10.0.0.1"},
		"longXFF": {
			topology: byHops(1, ""), peer: "10.0.0.1:1", header: xff(many + "203.0.113.7"), want: "203.0.113.7",
		},
		"longForwarded": {topology: byHops(1, forwardedHeader), peer: "10.0.0.1:1", header: http.Header{forwardedHeader: {
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
func wantClient(t *testing.T, top *topology, r *http.Request, want string, unsure bool) {
	t.Helper()
	got := top.client(r)
	top.chainLength(r)
	top.neighbour(r)
	if got.addr == netip.MustParseAddr(want) && got.fallback == fallbackNone {
		return
	}
	peer, _ := canonicalAddr(r.RemoteAddr)
	if unsure && got.addr == peer && got.fallback == fallbackBadEntry {
		return
	}
	t.Fatalf("%q: got %v %q, want %v", r.Header, got.addr, got.fallback, want)
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
		n := 1 + int(hops)%maxHops
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
		for i := range int(proxies) % maxHops {
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
		r := requestFrom("10.0.0.1:1", http.Header{forwardedHeader: lines})
		wantClient(t, byHops(n, forwardedHeader), r, "203.0.113.7", caller != "")
		wantClient(t, byTrust(forwardedHeader), r, "203.0.113.7", caller != "")
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
