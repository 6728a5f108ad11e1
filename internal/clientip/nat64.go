package clientip

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// NAT64 is the prefixes that translators of the operator's put in front of IPv4 addresses, besides the well-known ones,
// which need not be stated. They are as [ParseNAT64] makes them. nil: none.
//
// The IPv4 address in an IPv6 address is the client that it stands for: with the address as it is, all IPv4 clients behind
// a translator would be one, since they share their first 64 bits and more.
type NAT64 []netip.Prefix

// ParseNAT64 reads prefixes as RFC 6052 section 2.2 allows them: of 32, 40, 48, 56, 64 or 96 bits, and without any bit set
// behind these or in the bits 64 to 71, which translators must leave zero.
func ParseNAT64(list []string) (NAT64, error) {
	var n NAT64
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("%q is not an IPv6 prefix, such as 2001:db8:64::/96", s)
		}
		if err := checkNAT64(p); err != nil {
			return nil, fmt.Errorf("%q: %w", s, err)
		}
		n = append(n, p)
	}
	slices.SortFunc(n, func(a, b netip.Prefix) int { return b.Bits() - a.Bits() }) // the longest is the one that counts
	return n, nil
}

// checkNAT64 refuses a prefix that no translator can have.
func checkNAT64(p netip.Prefix) error {
	if p.Addr().Is4() || p.Addr().Is4In6() {
		return errors.New("the prefix of a translator is one of IPv6")
	}
	switch p.Bits() {
	case 32, 40, 48, 56, 64, 96:
	default:
		return fmt.Errorf("the prefix of a translator has 32, 40, 48, 56, 64 or 96 bits, not %d", p.Bits())
	}
	if p != p.Masked() {
		return fmt.Errorf("there are bits set behind the first %d", p.Bits())
	}
	if p.Addr().IsUnspecified() {
		return errors.New("the prefix holds the addresses :: and ::1, which stand for no other")
	}
	if p.Addr().As16()[reserved] != 0 {
		return errors.New("the bits 64 to 71 are not zero, as they are in every prefix of a translator")
	}
	return nil
}

// reserved is the byte of a translated address that the IPv4 address leaves out, and that is zero. Source: RFC 6052
// section 2.2.
const reserved = 8

// Canonical is the address that a client is known by: the IPv4 address in an IPv6 one, else the address without a zone. It
// goes by the bits, however they are written:
//
//   - ::ffff:0:0/96, as sockets show IPv4 peers (RFC 4291 section 2.5.5.2)
//   - ::ffff:0:0:0/96, by stateless translators (RFC 7915)
//   - 64:ff9b::/96, the well-known prefix (RFC 6052 section 2.1)
//   - ::/96 without :: and ::1, of old (RFC 4291 section 2.5.5.1)
//   - the prefixes of n
func (n NAT64) Canonical(addr netip.Addr) netip.Addr {
	if addr = addr.Unmap().WithZone(""); addr.Is4() {
		return addr
	}
	bytes := addr.As16()
	if wellKnown(&bytes) {
		return netip.AddrFrom4([4]byte(bytes[12:]))
	}
	for _, p := range n {
		if p.Contains(addr) && bytes[reserved] == 0 {
			return netip.AddrFrom4(embedded(&bytes, p.Bits()))
		}
	}
	return addr
}

// wellKnown reports whether an IPv6 address holds an IPv4 address in its last 32 bits, by one of the prefixes that are the
// same everywhere.
func wellKnown(bytes *[16]byte) bool {
	const (
		translated = 0x0064ff9b_00000000 // the first 64 bits
		mapped     = 0x0000ffff          // the next 32 bits, if the first 64 are zero
		stateless  = 0xffff0000          // the same
	)
	high, next := binary.BigEndian.Uint64(bytes[:]), binary.BigEndian.Uint32(bytes[8:])
	switch {
	case high == translated:
		return next == 0
	case high != 0:
		return false
	case next == 0:
		return binary.BigEndian.Uint32(bytes[12:]) > 1 // else it is :: or ::1
	}
	return next == mapped || next == stateless
}

// embedded is the IPv4 address behind a prefix of so many bits.
func embedded(bytes *[16]byte, bits int) (v4 [4]byte) {
	at := bits / 8
	for i := range v4 {
		if at == reserved {
			at++
		}
		v4[i] = bytes[at]
		at++
	}
	return v4
}

// CanonicalPrefix is the range of the canonical addresses of a range: that of IPv4 addresses if the range lies within what
// one translator makes of them. Match canonical addresses against canonical ranges only.
//
// The whole of a translator's prefix stays as it is, and so contains no client: it would be every IPv4 address there is,
// which whoever wrote it did not mean. The range of all v4-mapped addresses does mean that.
func (n NAT64) CanonicalPrefix(p netip.Prefix) netip.Prefix {
	bytes := p.Masked().Addr().As16()
	const wellKnownBits = 96
	if p.Bits() >= wellKnownBits && wellKnown(&bytes) {
		v4 := netip.PrefixFrom(netip.AddrFrom4([4]byte(bytes[12:])), p.Bits()-wellKnownBits)
		if v4.Bits() > 0 || p.Addr().Is4In6() {
			return v4
		}
	}
	for _, t := range n {
		if bits := behind(t.Bits(), p.Bits()); bits > 0 && t.Contains(p.Addr()) && bytes[reserved] == 0 {
			return netip.PrefixFrom(netip.AddrFrom4(embedded(&bytes, t.Bits())), bits)
		}
	}
	return p.Masked()
}

// behind is how many bits of an IPv4 address behind a translator's prefix of some bits are among the first bits of an
// address.
func behind(prefix, bits int) int {
	const first, last = reserved * 8, reserved*8 + 8
	n := bits - prefix
	if prefix <= first && bits > first {
		n -= min(bits, last) - first
	}
	return min(n, 32)
}
