package tieredlimit

import (
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestCanonicalAddr(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		want string // empty: not an address
	}{
		"IPv4":                         {in: "203.0.113.7", want: "203.0.113.7"},
		"IPv4 with a port":             {in: "203.0.113.7:51234", want: "203.0.113.7"},
		"IPv4 with port 0":             {in: "203.0.113.7:0", want: "203.0.113.7"},
		"IPv4 with the last port":      {in: "203.0.113.7:65535", want: "203.0.113.7"},
		"IPv4 with an obfuscated port": {in: "203.0.113.7:_p.1-x", want: "203.0.113.7"},
		"IPv4 between spaces":          {in: "  203.0.113.7 ", want: "203.0.113.7"},
		"IPv4 between tabs":            {in: "\t203.0.113.7:1\t", want: "203.0.113.7"},
		"unspecified":                  {in: "0.0.0.0", want: "0.0.0.0"},
		"broadcast":                    {in: "255.255.255.255", want: "255.255.255.255"},
		"IPv6":                         {in: "2001:db8::1", want: "2001:db8::1"},
		"IPv6 in capitals":             {in: "2001:DB8::A", want: "2001:db8::a"},
		"IPv6 in full":                 {in: "2001:0db8:0000:0000:0000:0000:0000:0001", want: "2001:db8::1"},
		"IPv6 in brackets":             {in: "[2001:db8::1]", want: "2001:db8::1"},
		"IPv6 in brackets with a port": {in: "[2001:db8::1]:443", want: "2001:db8::1"},
		"IPv6 with obfuscated port":    {in: "[2001:db8::1]:_x", want: "2001:db8::1"},
		"IPv6 that ends like a port":   {in: "2001:db8::1:443", want: "2001:db8::1:443"},
		"IPv6 loopback":                {in: "::1", want: "::1"},
		"IPv6 unspecified":             {in: "::", want: "::"},
		"IPv6 with a zone":             {in: "fe80::1%eth0", want: "fe80::1"},
		"IPv6 zone, brackets and port": {in: "[fe80::1%eth0]:5", want: "fe80::1"},
		"zone with a colon":            {in: "fe80::1%eth0:1", want: "fe80::1"},
		"v4-mapped":                    {in: "::ffff:203.0.113.7", want: "203.0.113.7"},
		"v4-mapped in hex":             {in: "::ffff:cb00:7107", want: "203.0.113.7"},
		"v4-mapped with leading zeros": {in: "0000:0000:0000:0000:0000:ffff:203.000.113.7"},
		"v4-mapped, longest": {
			in: "0000:0000:0000:0000:0000:ffff:203.100.113.107", want: "203.100.113.107",
		},
		"v4-mapped in capitals":         {in: "::FFFF:CB00:7107", want: "203.0.113.7"},
		"v4-mapped, brackets and port":  {in: "[::ffff:203.0.113.7]:443", want: "203.0.113.7"},
		"v4-mapped with a zone":         {in: "::ffff:203.0.113.7%eth0", want: "203.0.113.7"},
		"v4-compatible is not mapped":   {in: "::203.0.113.7", want: "::cb00:7107"},
		"v4-translated is not mapped":   {in: "::ffff:0:203.0.113.7", want: "::ffff:0:cb00:7107"},
		"nothing":                       {in: ""},
		"blanks":                        {in: " \t "},
		"unknown":                       {in: "unknown"},
		"obfuscated":                    {in: "_x"},
		"unix socket":                   {in: "@"},
		"unix socket path":              {in: "/run/caddy.sock"},
		"host name":                     {in: "example.com:80"},
		"host name of hex digits":       {in: "face"},
		"leading zero":                  {in: "203.0.113.07"},
		"five parts":                    {in: "1.2.3.4.5"},
		"three parts":                   {in: "1.2.3"},
		"part too large":                {in: "1.2.3.256"},
		"hex number":                    {in: "0xcb007107"},
		"decimal number":                {in: "3405803783"},
		"prefix":                        {in: "203.0.113.0/24"},
		"port missing":                  {in: "203.0.113.7:"},
		"port missing after brackets":   {in: "[2001:db8::1]:"},
		"port too large":                {in: "203.0.113.7:65536"},
		"port too long":                 {in: "203.0.113.7:000080"},
		"port not a number":             {in: "203.0.113.7:http"},
		"port negative":                 {in: "203.0.113.7:-1"},
		"obfuscated port without name":  {in: "203.0.113.7:_"},
		"obfuscated port with a blank":  {in: "203.0.113.7:_a b"},
		"port alone":                    {in: ":80"},
		"IPv4 in brackets":              {in: "[203.0.113.7]:80"},
		"brackets left open":            {in: "[2001:db8::1"},
		"brackets not opened":           {in: "2001:db8::1]"},
		"brackets empty":                {in: "[]:80"},
		"brackets twice":                {in: "[[::1]]"},
		"junk behind brackets":          {in: "[2001:db8::1]443"},
		"zone empty":                    {in: "fe80::1%"},
		"zone empty in brackets":        {in: "[fe80::1%]:80"},
		"zone on IPv4":                  {in: "203.0.113.7%eth0"},
		"zone alone":                    {in: "%eth0"},
		"quotes":                        {in: `"203.0.113.7"`},
		"two addresses":                 {in: "203.0.113.7 203.0.113.8"},
		"NUL behind":                    {in: "203.0.113.7\x00"},
		"NUL before":                    {in: "\x00203.0.113.7"},
		"newline":                       {in: "203.0.113.7\n"},
		"invalid UTF-8":                 {in: "\xff\xfe"},
		"wide digits":                   {in: "２03.0.113.7"},
		"no-break space":                {in: "\u00a0203.0.113.7"},
		"64 KiB of digits":              {in: strings.Repeat("1", 1<<16)},
		"64 KiB of colons":              {in: strings.Repeat(":", 1<<16)},
		"64 KiB of blanks":              {in: strings.Repeat(" ", 1<<16)},
		"address behind 64 KiB of zero": {in: strings.Repeat("0", 1<<16) + "::1"},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := canonicalAddr(tc.in)
			assert.Equal(t, tc.want != "", ok, "is an address")
			want := netip.Addr{}
			if tc.want != "" {
				want = netip.MustParseAddr(tc.want)
			}
			assert.Equal(t, want, got)
			ref, refOK := plainAddr(tc.in)
			assert.Equal(t, ref, got, "the plain reading")
			assert.Equal(t, refOK, ok, "the plain reading")
		})
	}
}

// TestCanonicalAddrNotations writes many addresses in every notation there is: each is one key.
func TestCanonicalAddrNotations(t *testing.T) {
	for _, text := range []string{
		"0.0.0.0", "1.2.3.4", "10.0.0.1", "127.0.0.1", "203.0.113.7", "255.255.255.255",
		"::", "::1", "2001:db8::1", "2001:db8:1:2:3:4:5:6", "fe80::1", "fc00::abcd", "64:ff9b::1.2.3.4",
	} {
		want := netip.MustParseAddr(text)
		bare := []string{want.StringExpanded()}
		if want.Is4() {
			mapped := netip.AddrFrom16(want.As16())
			b := want.As4()
			hex := netip.AddrFrom16([16]byte{12: b[0], 13: b[1], 14: b[2], 15: b[3]}).StringExpanded()
			hex = "0000:0000:0000:0000:0000:ffff:" + hex[len(hex)-9:]
			for _, six := range []string{mapped.String(), hex, strings.ToUpper(hex)} {
				bare = append(bare, six, "["+six+"]", "["+six+"]:443", six+"%eth0", "["+six+"%eth0]:1")
			}
			bare = append(bare, text+":1", text+":65535", text+":_obf")
		} else {
			for _, six := range []string{text, want.StringExpanded(), strings.ToUpper(text)} {
				bare = append(bare, six, "["+six+"]", "["+six+"]:443", six+"%eth0", "["+six+"%eth0]:1")
			}
		}
		for _, s := range bare {
			for _, around := range []string{"", " ", "\t", " \t "} {
				got, ok := canonicalAddr(around + s + around)
				assert.True(t, ok, "%q", around+s+around)
				assert.Equal(t, want, got, "%q", around+s+around)
			}
		}
	}
}

func TestCanonicalPrefix(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.0/8":             "10.0.0.0/8",
		"10.1.2.3/8":             "10.0.0.0/8",
		"2001:db8::1/32":         "2001:db8::/32",
		"::ffff:10.0.0.0/104":    "10.0.0.0/8",
		"::ffff:a00:1/128":       "10.0.0.1/32",
		"::ffff:0.0.0.0/96":      "0.0.0.0/0",
		"::ffff:192.0.2.77/120":  "192.0.2.0/24",
		"::ffff:0:0/95":          "::fffe:0:0/95",
		"::/0":                   "::/0",
		"0.0.0.0/0":              "0.0.0.0/0",
		"::ffff:0:192.0.2.0/120": "::ffff:0:c000:200/120",
	} {
		assert.Equal(t, netip.MustParsePrefix(want), canonicalPrefix(netip.MustParsePrefix(in)), in)
	}
	assert.Equal(t, netip.Prefix{}, canonicalPrefix(netip.Prefix{}))
}

func TestPrefixesMask(t *testing.T) {
	for name, tc := range map[string]struct {
		prefixes prefixes
		in, want string
	}{
		"C9 IPv6 by network": {
			prefixes: prefixes{32, 64}, in: "2001:db8:1:2:aaaa:bbbb:cccc:dddd", want: "2001:db8:1:2::",
		},
		"C9 the next network": {
			prefixes: prefixes{32, 64}, in: "2001:db8:1:3:aaaa:bbbb:cccc:dddd", want: "2001:db8:1:3::",
		},
		"C9 IPv4 stays":        {prefixes: prefixes{32, 64}, in: "203.0.113.7", want: "203.0.113.7"},
		"IPv4 by network":      {prefixes: prefixes{24, 64}, in: "203.0.113.7", want: "203.0.113.0"},
		"IPv4 odd bits":        {prefixes: prefixes{31, 64}, in: "203.0.113.7", want: "203.0.113.6"},
		"IPv4 all in one":      {prefixes: prefixes{0, 64}, in: "203.0.113.7", want: "0.0.0.0"},
		"IPv6 all in one":      {prefixes: prefixes{32, 0}, in: "2001:db8::1", want: "::"},
		"IPv6 by address":      {prefixes: prefixes{32, 128}, in: "2001:db8::1", want: "2001:db8::1"},
		"IPv6 odd bits":        {prefixes: prefixes{32, 57}, in: "2001:db8:0:ff::1", want: "2001:db8:0:80::"},
		"bits that cannot be":  {prefixes: prefixes{33, 129}, in: "203.0.113.7", want: "203.0.113.7"},
		"bits below nought":    {prefixes: prefixes{-1, -1}, in: "2001:db8::1", want: "2001:db8::1"},
		"loopback is no other": {prefixes: prefixes{32, 64}, in: "127.0.0.1", want: "127.0.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, netip.MustParseAddr(tc.want), tc.prefixes.mask(netip.MustParseAddr(tc.in)))
		})
	}
	assert.Equal(t, netip.Addr{}, prefixes{32, 64}.mask(netip.Addr{}), "no address")
}

var (
	plainBrackets = regexp.MustCompile(`(?s)^\[([^\]]*:[^\]]*)\](?::(.*))?$`)
	plainWithPort = regexp.MustCompile(`(?s)^([^:]*):([^:]*)$`)
	plainZone     = regexp.MustCompile(`(?s)^([^%]*)%(.+)$`)
	plainPort     = regexp.MustCompile(`^(?:[0-9]{1,4}|[0-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|` +
		`6553[0-5]|_[A-Za-z0-9._-]+)$`)
)

// plainAddr is canonicalAddr, written as plainly as can be.
func plainAddr(s string) (netip.Addr, bool) {
	s = strings.Trim(s, " \t")
	port := "0"
	if m := plainBrackets.FindStringSubmatchIndex(s); m != nil {
		if m[4] >= 0 {
			port = s[m[4]:m[5]]
		}
		s = s[m[2]:m[3]]
	} else if m := plainWithPort.FindStringSubmatch(s); m != nil {
		s, port = m[1], m[2]
	}
	zoned := false
	if m := plainZone.FindStringSubmatch(s); m != nil {
		s, zoned = m[1], true
	}
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" || zoned && addr.Is4() || !plainPort.MatchString(port) {
		return netip.Addr{}, false
	}
	return addr.Unmap(), true
}

func FuzzCanonicalAddr(f *testing.F) {
	for _, s := range []string{"1.2.3.4:5", "[::1%x]:80", "::ffff:1.2.3.4", "[::1", "a:_b", "fe80::%", "\t::1 "} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, ok := canonicalAddr(s)
		want, wantOK := plainAddr(s)
		if got != want || ok != wantOK {
			t.Fatalf("canonicalAddr(%q): got %v %v, want %v %v", s, got, ok, want, wantOK)
		}
		if ok && (got.Zone() != "" || got.Is4In6()) {
			t.Fatalf("canonicalAddr(%q): got %v, which is not canonical", s, got)
		}
	})
}
