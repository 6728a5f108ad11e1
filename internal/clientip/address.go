package clientip

import (
	"net/netip"
	"strings"
)

// Prefixes says how many leading bits of an address tell one client from another. Both are in bits: V4 is 0 to 32,
// V6 is 0 to 128.
type Prefixes struct{ V4, V6 int }

// Mask clears the bits of a canonical address that do not count. The zero Addr stays the zero Addr. A number of bits
// that the address does not have leaves it as it is; a config with such a number does not load.
func (p Prefixes) Mask(a netip.Addr) netip.Addr {
	bits := p.V6
	if a.Is4() {
		bits = p.V4
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

// ParseAddr reads an address as peers and proxies write it, and reports whether it is one. Blanks around it, a port,
// brackets and a zone are left out, and an IPv4 address in an IPv6 one becomes that IPv4 address, so that one client has
// one address.
//
// A port is a number up to 65535 or, as in RFC 7239 section 6.3, an underscore and a name. Behind an IPv6 address
// without brackets it is one only where that cannot be a part of the address. Whatever net/netip refuses (leading zeros,
// hexadecimal, names) is not an address.
func (n NAT64) ParseAddr(s string) (netip.Addr, bool) {
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
	if addr = addr.Unmap(); addr.Is4() {
		return addr, true // as nearly all are, and without a call
	}
	return n.Canonical(addr), true
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
	if first < 0 {
		return s, true // no colon is IPv4
	}
	if strings.IndexByte(s[first+1:], ':') < 0 {
		return s[:first], isPort(s[first+1:])
	}
	if last := strings.LastIndexByte(s, ':'); endsInPort(s, last) {
		return s[:last], true
	}
	return s, true
}

// endsInPort reports whether what follows the last colon of an IPv6 address without brackets must be a port: it has five
// digits or an underscore, which no group has, or it is one group too many. A last group that could be either is a part of
// the address.
func endsInPort(s string, last int) bool {
	host, port := s[:last], s[last+1:]
	if !isPort(port) || strings.IndexByte(host, '%') >= 0 {
		return false
	}
	const groups = 8 // of an address without "::", which has one colon less; a "::" in front is one more
	most := groups - 1
	if strings.HasPrefix(host, "::") {
		most++
	}
	return port[0] == '_' || len(port) == 5 || strings.HasSuffix(host, "::") || strings.IndexByte(host, '.') >= 0 ||
		strings.Count(host, ":") >= most
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
