package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"
)

// member is a subject in a process of its own.
type member struct {
	Subject
	binary string
}

// members are the subjects of this program and of others that were built with this package.
func members(own []Subject, binaries []string) ([]member, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var list []member
	for _, s := range own {
		list = append(list, member{s, self})
	}
	for _, binary := range binaries {
		out, err := exec.Command(binary, "-subjects").Output()
		if err != nil {
			return nil, fmt.Errorf("asking %s for its subjects: %w", binary, err)
		}
		var theirs []struct {
			Name  string
			Group Group
			Tiers int
			Extra bool
		}
		if err := json.Unmarshal(out, &theirs); err != nil {
			return nil, fmt.Errorf("%s does not list its subjects: %w", binary, err)
		}
		for _, s := range theirs {
			if s.Extra {
				list = append(list, member{Subject{Name: s.Name, Group: s.Group, Tiers: s.Tiers}, binary})
			}
		}
	}
	return list, nil
}

// remote is a worker in another process.
type remote struct {
	member
	cmd   *exec.Cmd
	tasks *json.Encoder
	in    io.WriteCloser
	out   *json.Decoder
	said  *bytes.Buffer // on its standard error, which holds Caddy's first log lines too
}

// start starts a worker for a case.
func (s settings) start(m member, c Case) (*remote, error) {
	c.Prepared = s.ready
	config, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(m.binary, "-worker", m.Name, "-group", string(m.Group), "-case", string(config), "-profiles", s.profiles)
	said := new(bytes.Buffer)
	cmd.Stderr = said
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the worker of %s: %w", m.Name, err)
	}
	return &remote{member: m, cmd: cmd, tasks: json.NewEncoder(in), in: in, out: json.NewDecoder(out), said: said}, nil
}

// do lets the worker do something and waits for the result.
func (r *remote) do(t task) (result, error) {
	if err := r.tasks.Encode(t); err != nil {
		return result{}, fmt.Errorf("%s: %w", r.Name, err)
	}
	var res result
	if err := r.out.Decode(&res); err != nil {
		return result{}, fmt.Errorf("%s: the worker does not answer: %w", r.Name, err)
	}
	if res.Err != "" {
		return result{}, fmt.Errorf("%s: %s", r.Name, res.Err)
	}
	return res, nil
}

// stop ends the worker.
func (r *remote) stop() error {
	r.in.Close()
	if err := r.cmd.Wait(); err != nil {
		return fmt.Errorf("the worker of %s: %w\n%s", r.Name, err, r.said)
	}
	return nil
}

// startAll starts workers for a case. On an error none is left.
func (s settings) startAll(list []member, c Case) ([]*remote, error) {
	var workers []*remote
	for _, m := range list {
		r, err := s.start(m, c)
		if err != nil {
			stopAll(workers)
			return nil, err
		}
		workers = append(workers, r)
	}
	return workers, nil
}

func stopAll(workers []*remote) error {
	var first error
	for _, r := range workers {
		if err := r.stop(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// series are the rounds of several subjects, by their places in the list, then by round.
type series [][]result

// settings say how much is measured.
type settings struct {
	rounds int
	round  time.Duration // how long a subject's part of a round takes, about
	keys   int           // how many clients there are where there are many
	ready  int           // how many requests are prepared
	short  bool
	only   string
	log    io.Writer

	profiles string // where CPU profiles go; empty: there are none
}

// interleave runs rounds in which each subject has its turn, in an order that differs from round to round.
func (s settings) interleave(workers []*remote, turn func(i int, r *remote) (result, error)) (series, error) {
	all := make(series, len(workers))
	for round := range s.rounds {
		for _, i := range rand.Perm(len(workers)) {
			res, err := turn(i, workers[i])
			if err != nil {
				return nil, err
			}
			all[i] = append(all[i], res)
		}
		fmt.Fprintf(s.log, "\r  round %d of %d", round+1, s.rounds)
	}
	fmt.Fprint(s.log, "\r"+strings.Repeat(" ", 24)+"\r")
	return all, nil
}

// warm lets every client come once, and finds out how many requests make a round of the right length.
func (s settings) warm(workers []*remote, c Case, procs int) ([]int, error) {
	ops := make([]int, len(workers))
	for i, r := range workers {
		if _, err := r.do(task{Do: "fill", To: c.Keys}); err != nil {
			return nil, err
		}
		trial := 2000
		for {
			res, err := r.do(task{Do: "run", Ops: trial, Procs: procs})
			if err != nil {
				return nil, err
			}
			if took := max(res.Wall, time.Microsecond); took > s.round/8 || trial > 10_000_000 {
				ops[i] = max(1000, int(float64(trial)*float64(s.round)/float64(took)))
				break
			}
			trial *= 4
		}
	}
	return ops, nil
}
