package redistest

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Proxy stands between a client and a server, and can fail as networks do.
type Proxy struct {
	listener net.Listener
	target   atomic.Pointer[string]
	mute     atomic.Bool
	refuse   atomic.Bool
	delay    atomic.Int64 // nanoseconds
	mu       sync.Mutex
	conns    map[*net.TCPConn]bool
	wait     sync.WaitGroup
}

// StartProxy starts a proxy to an address, for the length of the test.
func StartProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: listener, conns: make(map[*net.TCPConn]bool)}
	p.Target(target)
	p.wait.Go(p.accept)
	t.Cleanup(func() {
		listener.Close()
		p.Reset()
		p.wait.Wait()
	})
	return p
}

// Addr is where the proxy listens.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Target leads new connections to another address.
func (p *Proxy) Target(addr string) { p.target.Store(&addr) }

// Mute lets commands through but no replies, or ends that.
func (p *Proxy) Mute(on bool) { p.mute.Store(on) }

// Delay holds up every reply by so much.
func (p *Proxy) Delay(by time.Duration) { p.delay.Store(int64(by)) }

// Refuse resets connections as soon as they are made, or ends that.
func (p *Proxy) Refuse(on bool) { p.refuse.Store(on) }

// Reset resets all connections.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.conns {
		_ = conn.SetLinger(0)
		conn.Close()
	}
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		if p.refuse.Load() {
			_ = client.(*net.TCPConn).SetLinger(0)
			client.Close()
			continue
		}
		server, err := net.Dial("tcp", *p.target.Load())
		if err != nil {
			client.Close()
			continue
		}
		p.pass(client.(*net.TCPConn), server.(*net.TCPConn))
	}
}

func (p *Proxy) pass(client, server *net.TCPConn) {
	p.mu.Lock()
	p.conns[client], p.conns[server] = true, true
	p.mu.Unlock()
	end := func() {
		p.mu.Lock()
		delete(p.conns, client)
		delete(p.conns, server)
		p.mu.Unlock()
		client.Close()
		server.Close()
	}
	p.wait.Go(func() {
		defer end()
		_, _ = io.Copy(server, client)
	})
	p.wait.Go(func() {
		defer end()
		buffer := make([]byte, 32<<10)
		for {
			n, err := server.Read(buffer)
			if err != nil {
				return
			}
			if by := p.delay.Load(); by > 0 {
				<-time.After(time.Duration(by))
			}
			if p.mute.Load() {
				continue
			}
			if _, err := client.Write(buffer[:n]); err != nil {
				return
			}
		}
	})
}
