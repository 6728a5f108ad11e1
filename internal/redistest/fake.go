package redistest

import (
	"bufio"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
)

// Fake is a server that answers scripts as a test wants it to, and so in ways in which no real server would. It speaks
// RESP 3.
type Fake struct {
	says     map[string]string
	listener net.Listener
	answer   func(w io.WriteCloser, command []string)
	wait     sync.WaitGroup
	mu       sync.Mutex
	conns    map[net.Conn]bool
}

// StartFake starts a fake server, for the length of the test. It calls answer for each script that it is to run.
// Other commands are answered by what says has for them, by their first word in upper case, or else as usual.
func StartFake(t testing.TB, says map[string]string, answer func(w io.WriteCloser, command []string)) *Fake {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &Fake{says: says, listener: listener, answer: answer, conns: make(map[net.Conn]bool)}
	f.wait.Go(f.accept)
	t.Cleanup(func() {
		listener.Close()
		f.mu.Lock()
		for conn := range f.conns {
			conn.Close()
		}
		f.mu.Unlock()
		f.wait.Wait()
	})
	return f
}

// Addr is where the server listens.
func (f *Fake) Addr() string { return f.listener.Addr().String() }

func (f *Fake) accept() {
	for {
		conn, err := f.listener.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		f.conns[conn] = true
		f.mu.Unlock()
		f.wait.Go(func() { f.serve(conn) })
	}
}

func (f *Fake) serve(conn net.Conn) {
	defer func() {
		conn.Close()
		f.mu.Lock()
		delete(f.conns, conn)
		f.mu.Unlock()
	}()
	r := bufio.NewReader(conn)
	for {
		request, err := read(r)
		if err != nil {
			return
		}
		var command []string
		words, _ := request.([]any)
		for _, word := range words {
			text, _ := word.(string)
			command = append(command, text)
		}
		if len(command) == 0 {
			return
		}
		name := strings.ToUpper(command[0])
		said, known := f.says[name]
		switch {
		case known:
			_, err = io.WriteString(conn, said)
		case name == "EVAL" || name == "EVALSHA":
			f.answer(conn, command)
		case name == "HELLO":
			_, err = io.WriteString(conn, "%2\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:3\r\n")
		case name == "PING":
			_, err = io.WriteString(conn, "+PONG\r\n")
		default:
			_, err = io.WriteString(conn, "+OK\r\n")
		}
		if err != nil {
			return
		}
	}
}
