package clientip

import (
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestParseAddr(t *testing.T) {
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
		"v4-compatible":                 {in: "::203.0.113.7", want: "203.0.113.7"},
		"v4-compatible in hex":          {in: "::cb00:7107", want: "203.0.113.7"},
		"v4-compatible, lowest":         {in: "::2", want: "0.0.0.2"},
		"v4-compatible, one bit more":   {in: "::1:cb00:7107", want: "::1:cb00:7107"},
		"stateless translator":          {in: "::ffff:0:203.0.113.7", want: "203.0.113.7"},
		"stateless translator, zero":    {in: "::ffff:0:0.0.0.0", want: "0.0.0.0"},
		"stateless translator, one":     {in: "::ffff:0:0.0.0.1", want: "0.0.0.1"},
		"nearly a stateless translator": {in: "::fffe:0:203.0.113.7", want: "::fffe:0:cb00:7107"},
		"translator, a bit behind":      {in: "::ffff:1:203.0.113.7", want: "::ffff:1:cb00:7107"},
		"well-known translator":         {in: "64:ff9b::203.0.113.7", want: "203.0.113.7"},
		"well-known translator in hex":  {in: "0064:FF9B::CB00:7107", want: "203.0.113.7"},
		"well-known translator, zero":   {in: "64:ff9b::", want: "0.0.0.0"},
		"well-known translator, one":    {in: "64:ff9b::1", want: "0.0.0.1"},
		"well-known translator, port":   {in: "[64:ff9b::203.0.113.7]:443", want: "203.0.113.7"},
		"well-known translator, zone":   {in: "64:ff9b::203.0.113.7%eth0", want: "203.0.113.7"},
		"not the well-known translator": {in: "64:ff9b::1:203.0.113.7", want: "64:ff9b::1:cb00:7107"},
		"translators of one's own":      {in: "64:ff9b:1::203.0.113.7", want: "64:ff9b:1::cb00:7107"},
		"IPv4 in hex":                   {in: "cb00:7107"},
		"nine groups":                   {in: "2001:db8:10:1:0:0:0:1:46532", want: "2001:db8:10:1::1"},
		"nine groups, a short port":     {in: "2001:db8:10:1:0:0:0:1:80", want: "2001:db8:10:1::1"},
		"nine groups, port 0":           {in: "2001:db8:10:1:0:0:0:1:0", want: "2001:db8:10:1::1"},
		"nine groups, the last not one": {in: "2001:db8:10:1:0:0:0:1:8f"},
		"nine groups, last too large":   {in: "2001:db8:10:1:0:0:0:1:65536"},
		"nine groups, last empty":       {in: "2001:db8:10:1:0:0:0:1:"},
		"nine groups, one of them gap":  {in: "2001:db8:10:1::0:2:3:1:80"},
		"ten groups":                    {in: "2001:db8:10:1:0:0:0:1:46532:46532"},
		"eight groups and a gap":        {in: "1::2:3:4:5:6:7:80", want: "1:0:2:3:4:5:6:7"},
		"eight groups behind a gap":     {in: "::1:2:3:4:5:6:7:80", want: "0:1:2:3:4:5:6:7"},
		"seven groups behind a gap":     {in: "::1:2:3:4:5:6:80", want: "::1:2:3:4:5:6:80"},
		"eight groups":                  {in: "1:2:3:4:5:6:7:80", want: "1:2:3:4:5:6:7:80"},
		"a gap at the end":              {in: "1:2:3:4:5:6:7::", want: "1:2:3:4:5:6:7:0"},
		"five digits":                   {in: "2001:db8::1:46532", want: "2001:db8::1"},
		"five digits behind eight":      {in: "2001:db8:0:0:0:0:0:1:46532", want: "2001:db8::1"},
		"five digits, leading zeros":    {in: "2001:db8::1:00443", want: "2001:db8::1"},
		"five digits, one of them hex":  {in: "2001:db8::1:4653f"},
		"five digits, too large":        {in: "2001:db8::1:65536"},
		"five digits of seven groups":   {in: "1:2:3:4:5:6:7:46532"},
		"six digits":                    {in: "2001:db8::1:046532"},
		"five digits behind the gap":    {in: "2001:db8::46532"},
		"a port behind the gap":         {in: "2001:db8:::443", want: "2001:db8::"},
		"five digits behind three":      {in: "2001:db8:::46532", want: "2001:db8::"},
		"four colons":                   {in: "2001:db8::::443"},
		"two gaps":                      {in: "2001::db8::46532"},
		"a name of a port":              {in: "2001:db8::1:_p", want: "2001:db8::1"},
		"a port behind IPv4 in IPv6":    {in: "::ffff:203.0.113.7:443", want: "203.0.113.7"},
		"five digits behind the same":   {in: "64:ff9b::203.0.113.7:46532", want: "203.0.113.7"},
		"two ports behind IPv4":         {in: "203.0.113.7:80:46532"},
		"five digits behind a zone":     {in: "fe80::1%eth0:46532", want: "fe80::1"},
		"a port alone behind a gap":     {in: ":::443", want: "::"},
		"five digits alone":             {in: "::46532"},
		"five digits and loopback":      {in: "::1:46532", want: "::1"},
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
		"zone that begins with a colon": {in: "fe80::1%:46532", want: "fe80::1"},
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
			got, ok := NAT64(nil).ParseAddr(tc.in)
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

// TestAddressesInEveryNotation writes many addresses in every notation there is: each is one key.
func TestAddressesInEveryNotation(t *testing.T) {
	for _, text := range []string{
		"0.0.0.0", "1.2.3.4", "10.0.0.1", "127.0.0.1", "203.0.113.7", "255.255.255.255",
		"::", "::1", "2001:db8::1", "2001:db8:1:2:3:4:5:6", "fe80::1", "fc00::abcd", "64:ff9b:1::1.2.3.4", "64:ff9c::1.2.3.4",
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
				got, ok := NAT64(nil).ParseAddr(around + s + around)
				assert.True(t, ok, "%q", around+s+around)
				assert.Equal(t, want, got, "%q", around+s+around)
			}
		}
	}
}

// The range of what one translator makes of a range of IPv4 addresses is that range. The whole of a translator's prefix
// stays, so that it is not taken for all IPv4 addresses.
func TestCanonicalPrefix(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.0/8":              "10.0.0.0/8",
		"10.1.2.3/8":              "10.0.0.0/8",
		"2001:db8::1/32":          "2001:db8::/32",
		"::ffff:10.0.0.0/104":     "10.0.0.0/8",
		"::ffff:a00:1/128":        "10.0.0.1/32",
		"::ffff:0.0.0.0/96":       "0.0.0.0/0",
		"::ffff:192.0.2.77/120":   "192.0.2.0/24",
		"::ffff:0:0/95":           "::fffe:0:0/95",
		"::/0":                    "::/0",
		"0.0.0.0/0":               "0.0.0.0/0",
		"::ffff:0:192.0.2.0/120":  "192.0.2.0/24",
		"::ffff:0:0.0.0.0/97":     "0.0.0.0/1",
		"::ffff:0:0.0.0.0/96":     "::ffff:0:0:0/96",
		"64:ff9b::192.0.2.77/120": "192.0.2.0/24",
		"64:ff9b::10.0.0.1/128":   "10.0.0.1/32",
		"64:ff9b::/96":            "64:ff9b::/96",
		"64:ff9b::/64":            "64:ff9b::/64",
		"64:ff9b:1::10.0.0.0/104": "64:ff9b:1::a00:0/104",
		"::10.1.2.3/104":          "10.0.0.0/8",
		"::/96":                   "::/96",
		"::1/128":                 "::1/128",
		"::/127":                  "::/127",
		"::2/128":                 "0.0.0.2/32",
		"::ffff:0:0:0/95":         "::ffff:0:0:0/95",
	} {
		assert.Equal(t, netip.MustParsePrefix(want), NAT64(nil).CanonicalPrefix(netip.MustParsePrefix(in)), in)
	}
	assert.Equal(t, netip.Prefix{}, NAT64(nil).CanonicalPrefix(netip.Prefix{}))
}

func TestPrefixesMask(t *testing.T) {
	for name, tc := range map[string]struct {
		prefixes Prefixes
		in, want string
	}{
		"IPv6 by network": {
			prefixes: Prefixes{32, 64}, in: "2001:db8:1:2:aaaa:bbbb:cccc:dddd", want: "2001:db8:1:2::",
		},
		"the next network": {
			prefixes: Prefixes{32, 64}, in: "2001:db8:1:3:aaaa:bbbb:cccc:dddd", want: "2001:db8:1:3::",
		},
		"IPv4 stays":           {prefixes: Prefixes{32, 64}, in: "203.0.113.7", want: "203.0.113.7"},
		"IPv4 by network":      {prefixes: Prefixes{24, 64}, in: "203.0.113.7", want: "203.0.113.0"},
		"IPv4 odd bits":        {prefixes: Prefixes{31, 64}, in: "203.0.113.7", want: "203.0.113.6"},
		"IPv4 all in one":      {prefixes: Prefixes{0, 64}, in: "203.0.113.7", want: "0.0.0.0"},
		"IPv6 all in one":      {prefixes: Prefixes{32, 0}, in: "2001:db8::1", want: "::"},
		"IPv6 by address":      {prefixes: Prefixes{32, 128}, in: "2001:db8::1", want: "2001:db8::1"},
		"IPv6 odd bits":        {prefixes: Prefixes{32, 57}, in: "2001:db8:0:ff::1", want: "2001:db8:0:80::"},
		"bits that cannot be":  {prefixes: Prefixes{33, 129}, in: "203.0.113.7", want: "203.0.113.7"},
		"bits below nought":    {prefixes: Prefixes{-1, -1}, in: "2001:db8::1", want: "2001:db8::1"},
		"loopback is no other": {prefixes: Prefixes{32, 64}, in: "127.0.0.1", want: "127.0.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, netip.MustParseAddr(tc.want), tc.prefixes.Mask(netip.MustParseAddr(tc.in)))
		})
	}
	assert.Equal(t, netip.Addr{}, Prefixes{32, 64}.Mask(netip.Addr{}), "no address")
}

var (
	plainBrackets = regexp.MustCompile(`(?s)^\[([^\]]*:[^\]]*)\](?::(.*))?$`)
	plainWithPort = regexp.MustCompile(`(?s)^([^:]*):([^:]*)$`)
	plainZone     = regexp.MustCompile(`(?s)^([^%]*)%(.+)$`)
	plainPort     = regexp.MustCompile(`^(?:[0-9]{1,4}|[0-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|` +
		`6553[0-5]|_[A-Za-z0-9._-]+)$`)
)

// plainEmbeddings are the prefixes of 96 bits that IPv4 addresses are behind everywhere.
var plainEmbeddings = []netip.Prefix{
	netip.MustParsePrefix("::ffff:0:0:0/96"), netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("::/96"),
}

// plainCanonical is NAT64(nil).Canonical, written as plainly as can be.
func plainCanonical(addr netip.Addr) netip.Addr {
	addr = addr.Unmap()
	for _, p := range plainEmbeddings {
		if p.Contains(addr) && addr != netip.IPv6Unspecified() && addr != netip.IPv6Loopback() {
			return netip.AddrFrom4([4]byte(addr.AsSlice()[12:]))
		}
	}
	return addr
}

// plainPortless cuts a port off an IPv6 address without brackets where the whole can be no address.
func plainPortless(s string) string {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.Contains(s, "%") || !plainPort.MatchString(s[i+1:]) {
		return s
	}
	_, whole := netip.ParseAddr(s)
	host, err := netip.ParseAddr(s[:i])
	if whole != nil && err == nil && host.Is6() {
		return s[:i]
	}
	return s
}

// plainAddr is ParseAddr, written as plainly as can be.
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
	} else {
		s = plainPortless(s)
	}
	zoned := false
	if m := plainZone.FindStringSubmatch(s); m != nil {
		s, zoned = m[1], true
	}
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" || zoned && addr.Is4() || !plainPort.MatchString(port) {
		return netip.Addr{}, false
	}
	return plainCanonical(addr), true
}

// Every digit may begin an address, and every digit, letter and mark of RFC 7239 may stand in a port; none beside them may.
func TestParseAddrCharacters(t *testing.T) {
	for c := range 256 {
		char := string([]byte{byte(c)})
		if strings.Contains(" \t:%", char) {
			continue // they are notation
		}
		digit, hex := strings.Contains("0123456789", char), strings.Contains("0123456789abcdefABCDEF", char)
		name := strings.Contains("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._-", char)
		for text, want := range map[string]bool{
			char + "::1": hex, "2001:db8::" + char: hex, char + ".0.113.7": digit, "203.0.113." + char: digit,
			"203.0.113.7:" + char: digit, "203.0.113.7:1" + char: digit, "[2001:db8::1]:" + char: digit,
			"203.0.113.7:_" + char: name, "203.0.113.7:_a" + char: name, "2001:db8::1:_" + char: name, "2001:db8::1:1000" + char: digit,
		} {
			_, ok := NAT64(nil).ParseAddr(text)
			assert.Equal(t, want, ok, "%q", text)
		}
	}
}

func FuzzParseAddr(f *testing.F) {
	for _, s := range []string{"1.2.3.4:5", "[::1%x]:80", "::ffff:1.2.3.4", "[::1", "a:_b", "fe80::%", "\t::1 "} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, ok := NAT64(nil).ParseAddr(s)
		want, wantOK := plainAddr(s)
		if got != want || ok != wantOK {
			t.Fatalf("NAT64(nil).ParseAddr(%q): got %v %v, want %v %v", s, got, ok, want, wantOK)
		}
		if ok && (got.Zone() != "" || got.Is4In6()) {
			t.Fatalf("NAT64(nil).ParseAddr(%q): got %v, which is not canonical", s, got)
		}
	})
}
