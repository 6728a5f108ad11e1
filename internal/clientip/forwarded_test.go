package clientip

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestForwardedTail(t *testing.T) {
	for name, tc := range map[string]struct {
		lines []string
		want  []string // from the left; nil: does not parse
	}{
		"none": {lines: nil, want: []string{}},
		"one":  {lines: []string{"for=192.0.2.43"}, want: []string{"192.0.2.43"}},
		"two": {
			lines: []string{"for=1.1.1.1, for=2.2.2.2"}, want: []string{"1.1.1.1", "2.2.2.2"},
		},
		"two lines":                  {lines: []string{"for=a,for=b", "for=c"}, want: []string{"a", "b", "c"}},
		"other parameters":           {lines: []string{"proto=http;by=_b;for=a;host=h"}, want: []string{"a"}},
		"names in any case":          {lines: []string{"FOR=a,For=b,fOr=c"}, want: []string{"a", "b", "c"}},
		"a name that only starts so": {lines: []string{"fort=a,xfor=b,fo=c"}, want: []string{"", "", ""}},
		"quoted": {
			lines: []string{`for="[2001:db8::1]:443"`}, want: []string{"[2001:db8::1]:443"},
		},
		"quoted and empty":       {lines: []string{`for=""`}, want: []string{""}},
		"comma in quotes":        {lines: []string{`host="a,b";for=a,for=b`}, want: []string{"a", "b"}},
		"semicolon in quotes":    {lines: []string{`host="a;for=x";for=a`}, want: []string{"a"}},
		"escaped quote":          {lines: []string{`host="a\",for=x";for=a`}, want: []string{"a"}},
		"escaped backslash":      {lines: []string{`host="a\\",for=b`}, want: []string{"", "b"}},
		"escapes in the address": {lines: []string{`for="\1\9\2.0.2.43"`}, want: []string{"192.0.2.43"}},
		"escapes far too long": {
			lines: []string{`for="` + strings.Repeat(`\1`, 200) + `"`}, want: []string{""},
		},
		"escapes that are just not": {
			lines: []string{`for="` + strings.Repeat(`\1`, 128) + `", for="` + strings.Repeat(`\1`, 128) + `1"`},
			want:  []string{strings.Repeat("1", 128), ""},
		},
		"without for":                   {lines: []string{"proto=https, for=b"}, want: []string{"", "b"}},
		"empty elements count":          {lines: []string{",for=a,,for=b,"}, want: []string{"", "a", "", "b", ""}},
		"empty line":                    {lines: []string{""}, want: []string{""}},
		"blank line":                    {lines: []string{" \t"}, want: []string{""}},
		"empty pairs":                   {lines: []string{";;for=a;;"}, want: []string{"a"}},
		"blanks around commas":          {lines: []string{"\tfor=a \t, \tfor=b "}, want: []string{"a", "b"}},
		"blanks around semicolons":      {lines: []string{"for=a ; proto=http"}, want: []string{"a"}},
		"all token characters":          {lines: []string{"a!#$%&'*+-.^_`|~z=x;for=a"}, want: []string{"a"}},
		"high bytes in quotes":          {lines: []string{"host=\"\xff\xc3\xa9\t\";for=a"}, want: []string{"a"}},
		"unknown and obfuscated":        {lines: []string{`for=unknown,for=_x`}, want: []string{"unknown", "_x"}},
		"open quote":                    {lines: []string{`for=9.9.9.9;x="`}},
		"open quote, appended":          {lines: []string{`for=9.9.9.9;x=", for="203.0.113.7:1"`}},
		"open quote, appended token":    {lines: []string{`for=9.9.9.9;x=", for=203.0.113.7`}},
		"open quote, appended twice":    {lines: []string{`for=9.9.9.9;x=", for="203.0.113.7:1", for="10.0.0.2"`}},
		"open quote on another line":    {lines: []string{`for=9.9.9.9;x="`, `for=203.0.113.7`}},
		"open quote on another line, 2": {lines: []string{`for=9.9.9.9;x="`, `for="203.0.113.7"`}},
		"open quote and a backslash":    {lines: []string{`for=9.9.9.9;x="\`}},
		"backslash swallows the quote":  {lines: []string{`for=9.9.9.9;x="\"`}},
		"backslash outside of quotes":   {lines: []string{`for=a\;x=b`}},
		"behind a closing quote":        {lines: []string{`for="a"b`}},
		"pair behind a closing quote":   {lines: []string{`for="a"b=c`}},
		"pair behind a blank":           {lines: []string{`for="a" b=c`}},
		"pair behind a token":           {lines: []string{"for=a b=c"}},
		"open quote, appended pair":     {lines: []string{`for=9.9.9.9;x=", for="y=z, for=203.0.113.7`}},
		"quote behind a quote":          {lines: []string{`for="a""b"`}},
		"blank and word behind a quote": {lines: []string{`for="a" b`}},
		"blank in a token":              {lines: []string{"for=a b"}},
		"blank before equals":           {lines: []string{"for =a"}},
		"blank behind equals":           {lines: []string{"for= a"}},
		"no equals":                     {lines: []string{"for"}},
		"a blank for equals":            {lines: []string{"for a"}},
		"a colon for equals":            {lines: []string{"for:a"}},
		"a quote for equals":            {lines: []string{`for"a"`}},
		"no value":                      {lines: []string{"for="}},
		"no value, then a pair":         {lines: []string{"for=;proto=http"}},
		"no value, then an element":     {lines: []string{"x=, for=a"}},
		"no name":                       {lines: []string{"=a"}},
		"two equals":                    {lines: []string{"for=a=b"}},
		"quoted name":                   {lines: []string{`"for"=a`}},
		"two for":                       {lines: []string{"for=a;for=b"}},
		"two for, one empty":            {lines: []string{`for="";For=b`}},
		"bare address":                  {lines: []string{"192.0.2.43, x:y"}},
		"colon in a token":              {lines: []string{"for=192.0.2.43:80"}},
		"bracket in a token":            {lines: []string{"for=[2001:db8::1]"}},
		"NUL":                           {lines: []string{"for=a\x00"}},
		"NUL in quotes":                 {lines: []string{"x=\"\x00\";for=a"}},
		"DEL in quotes":                 {lines: []string{"x=\"\x7f\";for=a"}},
		"escaped NUL":                   {lines: []string{"x=\"\\\x00\";for=a"}},
		"high bytes in a token":         {lines: []string{"for=\xff"}},
		"long s for s":                  {lines: []string{"ſor=a"}},
		"bad line behind a good one":    {lines: []string{"for=a", "?"}},
		"bad line before a good one":    {lines: []string{"?", "for=a"}},
	} {
		t.Run(name, func(t *testing.T) {
			var tail Forwarded
			ok := tail.parse(tc.lines)
			plain, plainOK := plainEntries(ForwardedHeader, tc.lines)
			assert.Equal(t, tc.want != nil, ok, "parses")
			assert.Equal(t, tc.want != nil, plainOK, "parses, the plain reading")
			if tc.want == nil {
				return
			}
			got := []string{}
			for n := tail.count; n > 0; n-- {
				entry, ok := tail.fromRight(n)
				assert.True(t, ok)
				got = append(got, entry)
			}
			assert.Equal(t, tc.want, got)
			assert.Len(t, plain, len(tc.want), "the plain reading")
			_, ok = tail.fromRight(tail.count + 1)
			assert.False(t, ok, "beyond the leftmost")
			_, ok = tail.fromRight(0)
			assert.False(t, ok, "right of the rightmost")
		})
	}
}

// TestForwardedTailRoom reads headers around and beyond what the tail has room for.
func TestForwardedTailRoom(t *testing.T) {
	for _, count := range []int{1, MaxHops - 1, MaxHops, MaxHops + 1, MaxHops + 2, 3*MaxHops + 7, 10000} {
		var elements []string
		for i := range count {
			elements = append(elements, "for=_"+strings.Repeat("i", (count-i)%100))
		}
		var tail Forwarded
		assert.True(t, tail.parse([]string{strings.Join(elements, ",")}))
		assert.Equal(t, count, tail.count)
		for n := 1; n <= MaxHops+3; n++ {
			got, ok := tail.fromRight(n)
			assert.Equal(t, n <= count && n <= MaxHops+1, ok, "element %d of %d", n, count)
			if ok {
				assert.Equal(t, elements[count-n], "for="+got, "element %d of %d", n, count)
			}
		}
	}
}

// TestForwardedClient resolves the notations of the "for" parameter.
func TestForwardedClient(t *testing.T) {
	for name, tc := range map[string]struct {
		element string
		want    string // empty: the peer, for want of an address
	}{
		"token":                {element: "for=203.0.113.7", want: "203.0.113.7"},
		"quoted":               {element: `for="203.0.113.7"`, want: "203.0.113.7"},
		"port":                 {element: `for="203.0.113.7:47011"`, want: "203.0.113.7"},
		"obfuscated port":      {element: `for="203.0.113.7:_p"`, want: "203.0.113.7"},
		"IPv6":                 {element: `for="[2001:db8:cafe::17]"`, want: "2001:db8:cafe::17"},
		"IPv6 with a port":     {element: `for="[2001:db8:cafe::17]:4711"`, want: "2001:db8:cafe::17"},
		"IPv6 with a zone":     {element: `for="[fe80::1%eth0]"`, want: "fe80::1"},
		"v4-mapped":            {element: `for="[::ffff:203.0.113.7]:4711"`, want: "203.0.113.7"},
		"IPv6 escaped":         {element: `for="\[2001\:db8::1\]"`, want: "2001:db8::1"},
		"unknown":              {element: "for=unknown"},
		"unknown with a port":  {element: `for="unknown:80"`},
		"obfuscated":           {element: "for=_gazonk"},
		"obfuscated and port":  {element: `for="_gazonk:80"`},
		"empty":                {element: `for=""`},
		"only who it is by":    {element: "by=203.0.113.7"},
		"only a protocol":      {element: "proto=https"},
		"nothing":              {element: ""},
		"host name":            {element: "for=example.com"},
		"does not parse":       {element: "for=[2001:db8::1]"},
		"does not parse, port": {element: "for=203.0.113.7:80"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, lines := range [][]string{{"for=6.6.6.6, " + tc.element}, {"for=6.6.6.6", tc.element}} {
				for _, top := range []*Topology{byHops(1, ForwardedHeader), byTrust(ForwardedHeader)} {
					c := clientCase{topology: top, peer: "10.0.0.1:1", header: http.Header{ForwardedHeader: lines}, want: tc.want}
					if tc.want == "" {
						c.want, c.reason = "10.0.0.1", BadEntry
					}
					c.run(t)
				}
			}
		})
	}
}
