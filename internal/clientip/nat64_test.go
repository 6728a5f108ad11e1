package clientip

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func nat64(t testing.TB, prefixes ...string) NAT64 {
	t.Helper()
	n, err := ParseNAT64(prefixes)
	require.NoError(t, err)
	return n
}

// The places of an IPv4 address behind a prefix of each length are those of the examples of RFC 6052 section 2.4.
func TestNAT64ReadsThePlacesOfTheRFC(t *testing.T) {
	n := nat64(t, "2001:db8::/32", "2001:db8:100::/40", "2001:db8:122::/48", "2001:db8:122:300::/56", "2001:db8:122:344::/64",
		"2001:db8:122:344::/96")
	for _, s := range []string{
		"2001:db8:c000:221::", "2001:db8:1c0:2:21::", "2001:db8:122:c000:2:2100::", "2001:db8:122:3c0:0:221::",
		"2001:db8:122:344:c0:2:2100::", "2001:db8:122:344::192.0.2.33", "64:ff9b::192.0.2.33", "::ffff:192.0.2.33",
		"[2001:db8:122:344::192.0.2.33]:443", "2001:db8:c000:221::%eth0", "192.0.2.33",
	} {
		addr, ok := n.ParseAddr(s)
		assert.True(t, ok, s)
		assert.Equal(t, netip.MustParseAddr("192.0.2.33"), addr, s)
	}
}

// nat64Lengths are the lengths that a translator's prefix may have, and which bytes the IPv4 address is in.
var nat64Lengths = map[int][4]int{
	32: {4, 5, 6, 7}, 40: {5, 6, 7, 9}, 48: {6, 7, 9, 10}, 56: {7, 9, 10, 11}, 64: {9, 10, 11, 12}, 96: {12, 13, 14, 15},
}

// For each length: what is behind the address does not count, a bit in the reserved byte or in the prefix makes it another
// address, and without the prefix stated it is one.
func TestNAT64ByBits(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	for bits, at := range nat64Lengths {
		p := netip.MustParsePrefix(fmt.Sprintf("2001:db8:1234:5678::/%d", bits)).Masked()
		n := nat64(t, p.String())
		for range 200 {
			want := netip.AddrFrom4([4]byte{byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32())})
			bytes := p.Addr().As16()
			for i, b := range want.As4() {
				bytes[at[i]] = b
			}
			whole := netip.AddrFrom16(bytes)
			assert.Equal(t, want, n.Canonical(whole), "%s", whole)
			assert.Equal(t, want, n.Canonical(whole.WithZone("eth0")), "%s with a zone", whole)
			assert.Equal(t, whole, NAT64(nil).Canonical(whole), "%s, the prefix not stated", whole)
			for i := max(at[3], reserved) + 1; i < 16; i++ {
				suffix := bytes
				suffix[i] = byte(1 + rnd.IntN(255))
				assert.Equal(t, want, n.Canonical(netip.AddrFrom16(suffix)), "%s, byte %d", whole, i)
			}
			set := bytes
			set[8] |= 1 << rnd.IntN(8)
			assert.Equal(t, netip.AddrFrom16(set), n.Canonical(netip.AddrFrom16(set)), "%s, the reserved byte", whole)
			other := bytes
			bit := rnd.IntN(bits)
			other[bit/8] ^= 0x80 >> (bit % 8)
			assert.Equal(t, netip.AddrFrom16(other), n.Canonical(netip.AddrFrom16(other)), "%s, bit %d of the prefix", whole, bit)
		}
	}
}

// A range within what a translator makes of IPv4 addresses contains, as IPv4, the addresses that it contains as IPv6.
func TestNAT64RangesAndAddressesAgree(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 10))
	for bits, at := range nat64Lengths {
		p := netip.MustParsePrefix(fmt.Sprintf("2001:db8:1234:5678::/%d", bits)).Masked()
		n := nat64(t, p.String())
		translate := func(v4 netip.Addr) netip.Addr {
			bytes := p.Addr().As16()
			for i, b := range v4.As4() {
				bytes[at[i]] = b
			}
			return netip.AddrFrom16(bytes)
		}
		seen := map[int]bool{}
		for range 3000 {
			v4 := netip.AddrFrom4([4]byte{byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32())})
			long := netip.PrefixFrom(translate(v4), bits+rnd.IntN(129-bits)).Masked()
			got := n.CanonicalPrefix(long)
			// Which bits of the IPv4 address are among the range's is told bit by bit.
			var v4bits int
			for i := range 32 {
				if at[i/8]*8+i%8 < long.Bits() {
					v4bits++
				}
			}
			if v4bits == 0 {
				assert.Equal(t, long, got, "the whole of the translator's prefix stays")
				continue
			}
			seen[v4bits] = true
			assert.Equal(t, netip.PrefixFrom(v4, v4bits).Masked(), got, "%s", long)
			for range 3 {
				near := v4.As4()
				near[rnd.IntN(4)] ^= 1 << rnd.IntN(8)
				assert.Equal(t, long.Contains(translate(netip.AddrFrom4(near))), got.Contains(netip.AddrFrom4(near)), "%s and %v", long, near)
			}
		}
		assert.Len(t, seen, 32, "every length behind %s", p)
	}
}

// Ranges that are not within a translator's prefix, or that no translated address can be in, stay what they are.
func TestNAT64RangesThatStay(t *testing.T) {
	n := nat64(t, "2001:db8:64::/48", "2001:db8:96::/96")
	for _, s := range []string{
		"2001:db8::/32", "2001:db8:64::/48", "2001:db8:96::/96", "2001:db8:96::/95", "2001:db8:65::/64", "2001:db8:64:a00:100::/72",
		"::/0", "10.0.0.0/8", "0.0.0.0/0", "2001:db8:64:0:8000::/128",
	} {
		p := netip.MustParsePrefix(s).Masked()
		assert.Equal(t, p, n.CanonicalPrefix(p), s)
	}
	assert.Equal(t, netip.MustParsePrefix("10.1.0.0/16"), n.CanonicalPrefix(netip.MustParsePrefix("2001:db8:64:a01::/64")))
	assert.Equal(t, netip.MustParsePrefix("10.1.0.0/16"), n.CanonicalPrefix(netip.MustParsePrefix("2001:db8:64:a01::/72")))
	assert.Equal(t, netip.MustParsePrefix("10.1.0.0/17"), n.CanonicalPrefix(netip.MustParsePrefix("2001:db8:64:a01::/73")))
}

// Of prefixes that hold one another the longest counts, in whatever order they are stated.
func TestNAT64TheLongestPrefixCounts(t *testing.T) {
	for _, list := range [][]string{{"2001:db8::/32", "2001:db8:a01:203::/96"}, {"2001:db8:a01:203::/96", "2001:db8::/32"}} {
		n := nat64(t, list...)
		assert.Equal(t, netip.MustParseAddr("192.0.2.1"), n.Canonical(netip.MustParseAddr("2001:db8:a01:203::192.0.2.1")), "%v", list)
		assert.Equal(t, netip.MustParseAddr("10.1.2.4"), n.Canonical(netip.MustParseAddr("2001:db8:a01:204::192.0.2.1")), "%v", list)
		assert.Equal(t, netip.MustParsePrefix("192.0.2.0/24"), n.CanonicalPrefix(netip.MustParsePrefix("2001:db8:a01:203::192.0.2.0/120")), "%v", list)
	}
}

// Only what can be a translator's prefix is one.
func TestParseNAT64(t *testing.T) {
	for bits := range 129 {
		p := netip.PrefixFrom(netip.MustParseAddr("2001:db8::"), bits).Masked().String()
		_, err := ParseNAT64([]string{p})
		if _, possible := nat64Lengths[bits]; possible {
			assert.NoError(t, err, p)
		} else {
			assert.ErrorContains(t, err, fmt.Sprintf("has 32, 40, 48, 56, 64 or 96 bits, not %d", bits))
		}
	}
	for s, want := range map[string]string{
		"":                          "is not an IPv6 prefix",
		"2001:db8::":                "is not an IPv6 prefix",
		"2001:db8::%e/32":           "is not an IPv6 prefix",
		"10.0.0.0/8":                "is one of IPv6",
		"0.0.0.0/32":                "is one of IPv6",
		"::ffff:0:0/96":             "is one of IPv6",
		"2001:db8:1::/32":           "bits set behind the first 32",
		"2001:db8::1/96":            "bits set behind the first 96",
		"2001:db8:0:0:100::/96":     "the bits 64 to 71 are not zero",
		"2001:db8:0:0:8000::/96":    "the bits 64 to 71 are not zero",
		"::/96":                     "holds the addresses :: and ::1",
		"::/32":                     "holds the addresses :: and ::1",
		"2001:db8:0:0:8000::/64":    "bits set behind the first 64",
		"2001:db8:64:0:0:1::/96 ":   "is not an IPv6 prefix",
		"2001:db8:64:0:0:1::/096":   "is not an IPv6 prefix",
		"2001:0db8:64::/-1":         "is not an IPv6 prefix",
		"https://[2001:db8::]/32":   "is not an IPv6 prefix",
		"2001:db8:64:0:0:0:1:2/129": "is not an IPv6 prefix",
	} {
		_, err := ParseNAT64([]string{"2001:db8::/96", s})
		assert.ErrorContains(t, err, want, s)
		assert.ErrorContains(t, err, fmt.Sprintf("%q", s))
	}
	for _, s := range []string{"64:ff9b::/96", "64:ff9b:1::/48", "2001:db8:0:0:00ff::/96"} {
		_, err := ParseNAT64([]string{s})
		assert.NoError(t, err, s)
	}
	n, err := ParseNAT64(nil)
	assert.NoError(t, err)
	assert.Nil(t, n)
}

// Reading an address costs no memory, whatever it is in.
func TestParseAddrAllocations(t *testing.T) {
	n := nat64(t, "2001:db8:64::/96", "2001:db8::/32")
	for _, s := range []string{
		"203.0.113.7", "203.0.113.7:443", "2001:db8:1::1", "[2001:db8:1::1]:443", "64:ff9b::203.0.113.7", "::ffff:203.0.113.7",
		"2001:db8:64::203.0.113.7", "2001:db9:10:1:0:0:0:1:46532", "2001:db9::1:46532", "unknown", "_x", "",
	} {
		assert.Zero(t, testing.AllocsPerRun(100, func() { n.ParseAddr(s) }), s)
	}
}
