// Package redistest runs real Redis servers for tests: on free ports of 127.0.0.1, in directories of their own, ended
// with the test.
package redistest

import (
	"crypto/tls"
	"errors"
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Server is a running redis-server.
type Server struct {
	t    testing.TB
	args []string
	env  *Conn // how to talk to it: TLS and password, if any
	mu   sync.Mutex
	cmd  *exec.Cmd
	gone chan struct{}

	// Dir is where it keeps its files.
	Dir string

	// Port is where it listens.
	Port int
}

// Patience bounds every wait for a server to change its state. A sentinel that was kept from running, as on a busy machine,
// does nothing for 30 seconds (SENTINEL_TILT_PERIOD).
const Patience = 90 * time.Second

// Need returns the path of a program of Debian's. Without it the test is skipped, or fails where CI is set.
func Need(t testing.TB, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is needed: %v", program, err)
	}
	t.Skipf("%s is not installed", program)
	return ""
}

// Start starts a server with further arguments, as on the command line, and waits until it answers.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s := New(t, args...)
	s.Run()
	return s
}

// New prepares a server without starting it.
func New(t testing.TB, args ...string) *Server {
	t.Helper()
	Need(t, "redis-server")
	s := &Server{t: t, Dir: t.TempDir(), Port: ports.Free(t), env: &Conn{}}
	s.args = append([]string{
		"--port", strconv.Itoa(s.Port), "--bind", "127.0.0.1", "--dir", s.Dir, "--save", "", "--appendonly", "no",
		"--daemonize", "no", "--protected-mode", "no",
	}, args...)
	t.Cleanup(s.Kill)
	return s
}

// With says how to talk to the server, where that takes more than a connection.
func (s *Server) With(c Conn) *Server {
	s.env = &c
	return s
}

// OnlyTLS makes the server's port one for TLS alone. It must not have been started yet.
func (s *Server) OnlyTLS(config *tls.Config) {
	config.ServerName = "127.0.0.1"
	s.env.TLS = config
	s.args = append(s.args, "--port", "0", "--tls-port", strconv.Itoa(s.Port))
}

// Addr is the server's address.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port)) }

// Run starts the server, also again, and waits until it answers.
func (s *Server) Run() {
	s.t.Helper()
	s.Launch()
	s.Await(func() bool { _, err := s.Try("PING"); return err == nil })
}

// Launch starts the server and does not wait.
func (s *Server) Launch() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	args := s.args
	if _, err := os.Stat(filepath.Join(s.Dir, "sentinel.conf")); err == nil {
		args = []string{filepath.Join(s.Dir, "sentinel.conf"), "--sentinel"}
	}
	cmd := exec.Command("redis-server", args...)
	cmd.Dir = s.Dir
	log, err := os.OpenFile(filepath.Join(s.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	gone := make(chan struct{})
	s.cmd, s.gone = cmd, gone
	go func() { _ = cmd.Wait(); close(gone) }()
}

// Kill ends the server at once, as kill -9 does, and waits until it is gone.
func (s *Server) Kill() {
	s.mu.Lock()
	cmd, gone := s.cmd, s.gone
	s.cmd = nil
	s.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Kill()
	<-gone
}

// Pause stops the server without ending it, as SIGSTOP does.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP) }

// Continue ends a pause.
func (s *Server) Continue() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		s.t.Fatal("the server is not running")
	}
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// Log is what the server has written.
func (s *Server) Log() string {
	text, _ := os.ReadFile(filepath.Join(s.Dir, "log"))
	return string(text)
}

// Await waits until a condition holds.
func (s *Server) Await(condition func() bool) {
	s.t.Helper()
	if !Await(condition) {
		s.t.Fatalf("waited in vain; the server at %s says:\n%s", s.Addr(), s.Log())
	}
}

// Await asks again until a condition holds, and tells whether it did in time.
func Await(condition func() bool) bool {
	deadline := time.NewTimer(Patience)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-deadline.C:
			return false
		case <-tick.C:
		}
	}
	return true
}

// Do sends a command and returns the reply, which is a string, an int64, nil, or a []any of these.
func (s *Server) Do(command ...string) any {
	s.t.Helper()
	reply, err := s.Try(command...)
	if err != nil {
		s.t.Fatalf("%s: %v", strings.Join(command, " "), err)
	}
	return reply
}

// Try is Do for commands that may fail.
func (s *Server) Try(command ...string) (any, error) {
	return s.env.Do(s.Addr(), command...)
}

// Keys lists the keys that match a pattern.
func (s *Server) Keys(pattern string) []string {
	s.t.Helper()
	reply, ok := s.Do("KEYS", pattern).([]any)
	if !ok {
		s.t.Fatal(errors.New("KEYS returned no list"))
	}
	var keys []string
	for _, key := range reply {
		keys = append(keys, fmt.Sprint(key))
	}
	return keys
}

// Args are the settings of a redis.conf as arguments, but for where to listen.
func Args(config string) []string {
	var args []string
	for line := range strings.Lines(config) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" || fields[0] == "bind" || fields[0] == "port" {
			continue
		}
		args = append(args, "--"+fields[0])
		for _, value := range fields[1:] {
			args = append(args, strings.Trim(value, `"`))
		}
	}
	return args
}
