package tieredlimit

import (
	"net/netip"
	"strings"
)

// prefixes says how many leading bits of an address tell one client from another. Both are in bits: v4 is 0 to 32,
// v6 is 0 to 128.
type prefixes struct{ v4, v6 int }

// mask clears the bits of a canonical address that do not count. The zero Addr stays the zero Addr. A number of bits
// that the address does not have leaves it as it is; a config with such a number does not load.
func (p prefixes) mask(a netip.Addr) netip.Addr {
	bits := p.v6
	if a.Is4() {
		bits = p.v4
	}
	if bits == a.BitLen() {
		return a
	}
	masked, err := a.Prefix(bits)
	if err != nil {
		return a
	}
	return masked.Addr()
}

// maxAddrText is the length of the longest text of an IP address, a v4-mapped one written in full.
const maxAddrText = len("0000:0000:0000:0000:0000:ffff:255.255.255.255")

// canonicalAddr reads an address as peers and proxies write it, and reports whether it is one. Blanks around it, a
// port, brackets and a zone are left out, and a v4-mapped address becomes the IPv4 address that its bits say, so that
// one client has one address.
//
// An IPv6 address with a port must be in brackets. A port is a number up to 65535 or, as in RFC 7239 section 6.3,
// an underscore and a name. Whatever net/netip refuses (leading zeros, hexadecimal, names) is not an address.
func canonicalAddr(s string) (netip.Addr, bool) {
	host, ok := hostText(trimBlanks(s))
	if !ok {
		return netip.Addr{}, false
	}
	zoned := false
	if i := strings.IndexByte(host, '%'); i >= 0 {
		if i == len(host)-1 {
			return netip.Addr{}, false
		}
		host, zoned = host[:i], true
	}
	// Refusing the obvious here spares the error that ParseAddr would allocate.
	if host == "" || len(host) > maxAddrText || !startsAddr(host[0]) {
		return netip.Addr{}, false
	}
	addr, err := netip.ParseAddr(host)
	if err != nil || zoned && addr.Is4() {
		return netip.Addr{}, false
	}
	return addr.Unmap(), true
}

// canonicalPrefix turns a v4-mapped prefix into the IPv4 prefix of the same addresses, and clears the bits behind any
// prefix. Match canonical addresses against canonical prefixes only.
func canonicalPrefix(p netip.Prefix) netip.Prefix {
	const mapped = 96 // bits in front of the IPv4 address, RFC 4291 section 2.5.5.2
	if p.Addr().Is4In6() && p.Bits() >= mapped {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-mapped)
	}
	return p.Masked()
}

// hostText cuts the port and the brackets off an address, and reports whether what it cut off is in order.
func hostText(s string) (string, bool) {
	if s == "" {
		return "", false
	}
	if s[0] == '[' {
		end := strings.IndexByte(s, ']')
		if end < 0 || strings.IndexByte(s[:end], ':') < 0 {
			return "", false // brackets are for IPv6 alone
		}
		host, rest := s[1:end], s[end+1:]
		return host, rest == "" || rest[0] == ':' && isPort(rest[1:])
	}
	first := strings.IndexByte(s, ':')
	if first < 0 || strings.IndexByte(s[first+1:], ':') >= 0 {
		return s, true // no colon is IPv4, two or more are IPv6 without a port
	}
	return s[:first], isPort(s[first+1:])
}

// isPort reports whether s is a port: a number up to 65535, or an underscore followed by a name.
func isPort(s string) bool {
	if s != "" && s[0] == '_' {
		return isObfuscated(s)
	}
	if s == "" || len(s) > 5 {
		return false
	}
	n := 0
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
		n = n*10 + int(s[i]-'0')
	}
	return n <= 65535
}

// isObfuscated reports whether s is an underscore followed by letters, digits, dots, underscores and dashes. Source:
// RFC 7239 section 6.3.
func isObfuscated(s string) bool {
	for i := 1; i < len(s); i++ {
		c := s[i]
		if !isAlnum(c) && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return len(s) > 1
}

// startsAddr reports whether the text of an IP address can start with c.
func startsAddr(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F' || c == ':'
}

// isAlnum reports whether c is an ASCII letter or digit.
func isAlnum(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// trimBlanks cuts spaces and tabs off both ends: the optional whitespace of RFC 9110 section 5.6.3.
func trimBlanks(s string) string {
	for s != "" && isBlank(s[0]) {
		s = s[1:]
	}
	for s != "" && isBlank(s[len(s)-1]) {
		s = s[:len(s)-1]
	}
	return s
}

// isBlank reports whether c is a space or a tab.
func isBlank(c byte) bool { return c == ' ' || c == '\t' }
