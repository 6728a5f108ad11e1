package servers

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// script makes wrk send one client's address after the other's, and report in JSON.
//
//go:embed clients.lua
var script []byte

// load is what a run of wrk has seen.
type load struct {
	Requests int
	Seconds  float64
	Statuses int // answers that are neither 2xx nor 3xx
	Broken   int // connections and requests that failed
}

// perSecond is the throughput.
func (l load) perSecond() float64 { return float64(l.Requests) / l.Seconds }

// writeScript puts the script where wrk finds it.
func (o *Options) writeScript() error {
	o.script = filepath.Join(o.dir, "clients.lua")
	return os.WriteFile(o.script, script, 0o600)
}

// send loads a server for a time, with so many clients, beginning behind those that came last.
func (o *Options) send(ctx context.Context, s *server, clients int, d time.Duration) (load, error) {
	cmd := exec.CommandContext(ctx, "taskset", "-c", o.LoadCore, o.Wrk, "-t1", "-c", strconv.Itoa(o.Connections),
		"-d", fmt.Sprintf("%ds", max(1, int(d.Seconds()))), "-s", o.script, "http://"+s.address()+"/", "--",
		strconv.Itoa(clients), strconv.Itoa(s.sent%clients))
	out, err := cmd.CombinedOutput()
	if err != nil {
		return load{}, fmt.Errorf("wrk against %s: %w\n%s", s.Name, err, tail(string(out), 1000))
	}
	l, err := parseLoad(string(out))
	if err != nil {
		return l, fmt.Errorf("wrk against %s: %w\n%s", s.Name, err, tail(string(out), 1000))
	}
	s.sent += l.Requests
	return l, nil
}

// parseLoad finds the script's line in what wrk prints.
func parseLoad(out string) (load, error) {
	var l load
	_, line, ok := strings.Cut(out, "result: ")
	if !ok {
		return l, fmt.Errorf("no result was printed")
	}
	line, _, _ = strings.Cut(line, "\n")
	if err := json.Unmarshal([]byte(line), &l); err != nil {
		return l, fmt.Errorf("the result: %w", err)
	}
	if l.Requests == 0 || l.Seconds <= 0 {
		return l, fmt.Errorf("no request was answered")
	}
	return l, nil
}
