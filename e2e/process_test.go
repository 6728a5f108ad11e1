package e2e

import (
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience is how long a test waits for what should happen at once, on a machine that may be very busy.
const patience = time.Minute

// process is a server that a test started. It ends with the test.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has ended
	err    error         // how it ended

	// log holds what it prints. A file has everything as soon as the process has written it; a pipe would not.
	log *os.File
}

// startProcess starts a command in a process group of its own, which is ended when the test ends.
func startProcess(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	log, err := os.CreateTemp("", "tl-log")
	require.NoError(t, err)
	require.NoError(t, os.Remove(log.Name()))
	p := &process{cmd: cmd, exited: make(chan struct{}), log: log}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	go func() {
		p.err = cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		p.stop(t)
		if t.Failed() {
			t.Logf("output of %s:\n%s", cmd.Path, lastBytes(p.output(), 16<<10))
		}
	})
	return p
}

// output is everything that the process has printed so far.
func (p *process) output() string {
	text, err := io.ReadAll(io.NewSectionReader(p.log, 0, math.MaxInt64))
	if err != nil {
		return "cannot be read: " + err.Error()
	}
	return string(text)
}

// signal sends a signal to the process.
func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(s))
}

// stop ends the process, gently at first, and whatever else is left in its group.
func (p *process) stop(t *testing.T) {
	t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(10 * time.Second):
		t.Logf("%s does not end by itself", p.cmd.Path)
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.exited
}

// waitExit waits until the process has ended and returns how.
func (p *process) waitExit(t *testing.T) error {
	t.Helper()
	select {
	case <-p.exited:
		return p.err
	case <-time.After(patience):
		t.Fatalf("%s has not ended after %s", p.cmd.Path, patience)
		return nil
	}
}

// waitFor polls a condition, and gives up when the process has ended or after a while.
func (p *process) waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	deadline := time.After(patience)
	for !done() {
		select {
		case <-poll.C:
		case <-p.exited:
			t.Fatalf("waiting for %s: %s has ended: %v\n%s", what, p.cmd.Path, p.err, p.output())
		case <-deadline:
			t.Fatalf("waiting for %s: nothing after %s\n%s", what, patience, lastBytes(p.output(), 4<<10))
		}
	}
}

// waitForPort waits until something listens on a port.
func (p *process) waitForPort(t *testing.T, port int) {
	t.Helper()
	p.waitFor(t, fmt.Sprintf("port %d", port), func() bool {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return false
		}
		return conn.Close() == nil
	})
}

func lastBytes(s string, n int) string {
	if len(s) > n {
		return "[...]" + s[len(s)-n:]
	}
	return s
}

// tempDir is a directory with a short path, since the paths of sockets are limited to about 100 bytes.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tl")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// requireProgram is the path of a program. Where it is not installed the test is skipped; but with CI=true, where it
// has to be there, it fails.
func requireProgram(t *testing.T, name, debianPackage string) string {
	t.Helper()
	for _, candidate := range []string{name, "/usr/sbin/" + name, "/usr/local/sbin/" + name} {
		if path, err := exec.LookPath(candidate); err == nil {
			return path
		}
	}
	text := fmt.Sprintf("%s is not installed (Debian package %s)", name, debianPackage)
	if os.Getenv("CI") == "true" {
		t.Fatal(text)
	}
	t.Skip(text)
	return ""
}
