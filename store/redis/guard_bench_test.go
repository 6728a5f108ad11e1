package redis

import (
	"net"
	"strings"
	"testing"
)

// loop is a connection whose other side says the same over and over.
type loop struct {
	net.Conn
	text []byte
}

func (c *loop) Read(p []byte) (int, error)  { return copy(p, c.text), nil }
func (c *loop) Write(p []byte) (int, error) { return len(p), nil }

// BenchmarkGuardAlone is what a guard does for one decision of three tiers: it looks at a command and its reply.
func BenchmarkGuardAlone(b *testing.B) {
	conn := &loop{text: []byte("$32\r\n" + strings.Repeat("x", 32) + "\r\n")}
	g := newGuard(conn, modeSingle, nil)
	sent := []byte(command("EVALSHA", strings.Repeat("a", 40), "4", "tieredlimit:{api}:reset",
		"tieredlimit:{api}:ip:60000:"+strings.Repeat("f", 32), "tieredlimit:{api}:user:60000:"+strings.Repeat("f", 32),
		"tieredlimit:{api}:global:60000:"+strings.Repeat("f", 32), strings.Repeat("s", 52)))
	into := make([]byte, 64<<10)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := g.Write(sent); err != nil {
			b.Fatal(err)
		}
		if _, err := g.Read(into); err != nil {
			b.Fatal(err)
		}
	}
}
