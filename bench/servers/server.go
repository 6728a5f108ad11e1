// Package servers measures whole servers with wrk: how many requests each answers on one core, what a request costs it in
// processor time, and how much memory it keeps. It needs Linux, two cores, wrk, taskset, and for the comparison nginx.
package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Target is a server to measure.
type Target struct {
	// Name is what tables call it.
	Name string

	// Binary is the Caddy to run. Empty for nginx.
	Binary string

	// Config is the file to run it with. In a Caddyfile {$BENCH_PORT} is where to listen, and {$BENCH_COUNT} and
	// {$BENCH_WINDOW} are the limit of a client.
	Config string

	// Base is the name of the target that it is compared with.
	Base string

	// Static tells that it limits nothing, so that no answer is checked.
	Static bool
}

// server is a running target.
type server struct {
	Target
	cmd  *exec.Cmd
	port int
	sent int // requests so far
}

// start runs a target on the server's core and waits until it can be reached.
func (o *Options) start(ctx context.Context, t Target, c Case) (*server, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	admin, err := freePort()
	if err != nil {
		return nil, err
	}
	home, err := os.MkdirTemp(o.dir, "server")
	if err != nil {
		return nil, err
	}
	count, window := c.limit()
	args := []string{"-c", o.ServerCore, t.Binary, "run", "--adapter", "caddyfile", "--config", t.Config}
	if t.Binary == "" {
		config, err := nginxConfig(home, t.Config, port, c.Refused)
		if err != nil {
			return nil, err
		}
		args = []string{"-c", o.ServerCore, o.Nginx, "-p", home, "-c", config}
	}
	cmd := exec.CommandContext(ctx, "taskset", args...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "HOME="+home, "XDG_DATA_HOME="+home, "XDG_CONFIG_HOME="+home,
		"CADDY_ADMIN=127.0.0.1:"+strconv.Itoa(admin), "BENCH_PORT="+strconv.Itoa(port),
		"BENCH_COUNT="+strconv.Itoa(count), "BENCH_WINDOW="+window.String())
	log, err := os.Create(filepath.Join(home, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", t.Name, err)
	}
	s := &server{Target: t, cmd: cmd, port: port}
	if err := s.wait(ctx); err != nil {
		s.stop()
		said, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("%s: %w\n%s", t.Name, err, tail(string(said), 2000))
	}
	return s, nil
}

// wait waits until the server takes connections.
func (s *server) wait(ctx context.Context) error {
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		conn, err := net.DialTimeout("tcp", s.address(), time.Second)
		if err == nil {
			return conn.Close()
		}
		if _, gone := os.Stat(fmt.Sprintf("/proc/%d", s.cmd.Process.Pid)); gone != nil {
			return errors.New("it has ended")
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
	return fmt.Errorf("it does not listen on %s", s.address())
}

func (s *server) address() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// stop ends the server. Its exit status does not matter.
func (s *server) stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// ticks is how many of the kernel's clock ticks make a second, as /proc counts them on every Linux that Go runs on.
const ticks = 100

// cpu is the processor time that the server has used.
func (s *server) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	return parseStat(string(text))
}

// parseStat reads utime and stime, fields 14 and 15 of proc_pid_stat(5). The second field may hold blanks.
func parseStat(text string) (time.Duration, error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/PID/stat has only %d fields behind the name", len(fields))
	}
	sum := 0
	for _, field := range fields[11:13] {
		n, err := strconv.Atoi(field)
		if err != nil {
			return 0, fmt.Errorf("/proc/PID/stat: %w", err)
		}
		sum += n
	}
	return time.Duration(sum) * time.Second / ticks, nil
}

// memory is the server's resident set, in bytes.
func (s *server) memory() (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	return parseStatus(string(text))
}

// parseStatus reads VmRSS, which is in kB.
func parseStatus(text string) (int, error) {
	_, rest, ok := strings.Cut(text, "VmRSS:")
	if !ok {
		return 0, errors.New("/proc/PID/status has no VmRSS")
	}
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return 0, errors.New("/proc/PID/status has an empty VmRSS")
	}
	n, err := strconv.Atoi(fields[0])
	return n << 10, err
}

// freePort is a port that nobody uses at the moment.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func tail(s string, n int) string { return s[max(0, len(s)-n):] }
