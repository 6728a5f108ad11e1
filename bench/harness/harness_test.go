package harness

import (
	"bytes"
	"io"
	"math/rand"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestMain lets the test binary be a worker, as the benchmark's own binary is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-worker" {
		os.Exit(Main(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// TestSubjects lets every subject serve, refuse and grow, so that what is measured is what the tables say.
func TestSubjects(t *testing.T) {
	for _, s := range subjects(nil) {
		t.Run(string(s.Group)+"/"+s.Name, func(t *testing.T) {
			for _, c := range []Case{
				{Name: "served-1", Keys: 1},
				{Name: "served", Keys: 30, Spread: Uniform},
				{Name: "zipf", Keys: 30, Spread: Zipf},
				{Name: "refused", Keys: 30, Spread: Uniform, Refused: true},
				{Name: "few prepared", Keys: 30, Spread: Uniform, Prepared: 4},
			} {
				w, err := newWorker(s, c)
				require.NoError(t, err, c.Name)
				assert.Equal(t, 30, w.fill(0, 30, 1).Served, "%s: each client's first", c.Name)
				want := 200
				if c.Refused && s.Tiers > 0 {
					want = 0
				}
				for _, procs := range []int{1, 2} {
					got := w.run(200, procs)
					assert.Equal(t, 200, got.Ops, "%s: sent", c.Name)
					assert.Equal(t, want, got.Served, "%s: served, by %d", c.Name, procs)
				}
				assert.Equal(t, 25, w.do(task{Do: "fresh", Ops: 25}).Served, "%s: new clients", c.Name)
				assert.Positive(t, w.do(task{Do: "heap"}).Heap, c.Name)
				assert.NotEmpty(t, w.do(task{Do: "dance"}).Err, c.Name)
				require.NoError(t, w.running.Close(), c.Name)
			}
		})
	}
}

// TestLimit checks that a count is one: that many requests of a client pass, and no more.
func TestLimit(t *testing.T) {
	for _, s := range subjects(nil) {
		if s.Tiers == 0 {
			continue
		}
		t.Run(string(s.Group)+"/"+s.Name, func(t *testing.T) {
			w, err := newWorker(s, Case{Name: "limit", Keys: 2, Count: 5, Window: ages})
			require.NoError(t, err)
			defer w.running.Close()
			assert.Equal(t, 10, w.fill(0, 2, 9).Served, "served of 9 for each of 2 clients with a limit of 5")
		})
	}
}

// TestTables runs the whole benchmark with few counters: the processes, the rounds, and every table but the one that
// has to wait for a window's end.
func TestTables(t *testing.T) {
	var out, log bytes.Buffer
	status := Main([]string{"-short", "-rounds", "1", "-round", "1ms", "-keys", "20", "-run", "^(serve|decide|scale|heap|growth|flood)"}, &out, &log)
	require.Zero(t, status, log.String())
	for _, s := range subjects(nil) {
		assert.Contains(t, out.String(), "| "+s.Name, "a row of each subject")
	}
	assert.Equal(t, len(reports())-1, strings.Count(out.String(), "\n### "), "tables")
	assert.NotContains(t, strings.ReplaceAll(out.String(), nameBare+" (100.0 % served)", ""), "% served",
		"a subject that serves what it should refuse, or the other way round")
}

func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-rounds", "0"}, "-rounds 0"},
		{[]string{"-round", "-1s"}, "-round -1s"},
		{[]string{"-keys", "1"}, "-keys 1"},
		{[]string{"-prepared", "0"}, "-prepared 0"},
		{[]string{"-run", "("}, "-run"},
		{[]string{"stray"}, `"stray"`},
		{[]string{"-with", "/nowhere"}, "/nowhere"},
		{[]string{"-worker", "nobody", "-group", "serve", "-case", "{}"}, `"nobody"`},
		{[]string{"-worker", nameOne, "-group", "serve", "-case", "{"}, "-case"},
		{[]string{"-nonsense"}, "-nonsense"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			var log bytes.Buffer
			assert.Equal(t, 1, Main(c.args, io.Discard, &log))
			assert.Contains(t, log.String(), c.want)
		})
	}
}

func TestHistogram(t *testing.T) {
	var h histogram
	for i := range 1000 {
		h.add(time.Duration(i+1) * time.Microsecond)
	}
	h.add(time.Second)
	assert.Equal(t, time.Second, h.max)
	assert.InEpsilon(t, 500*time.Microsecond, h.quantile(0.5), 0.04)
	assert.InEpsilon(t, 990*time.Microsecond, h.quantile(0.99), 0.04)
	assert.InEpsilon(t, time.Second, h.quantile(1), 0.04)
	h.add(0)
	assert.Equal(t, 1002, h.n)
}

func TestVisits(t *testing.T) {
	v := from(300, 3)
	for i, want := range []string{"11.0.1.44 user-300", "11.0.1.45 user-301", "11.0.1.46 user-302"} {
		ip, user := v.of(i)
		assert.Equal(t, want, ip+" "+user)
	}
}

func TestSpreads(t *testing.T) {
	const drawn = 100_000
	counts := func(s Spread) []int {
		list := make([]int, 100)
		client := clientsOf(Case{Keys: 100, Spread: s}, rand.New(rand.NewSource(1)))
		for i := range drawn {
			list[client(i)]++
		}
		return list
	}
	for n, count := range counts(Uniform) {
		assert.InEpsilon(t, drawn/100, count, 0.15, "client %d", n)
	}
	most := 0
	for _, count := range counts(Zipf) {
		most = max(most, count)
	}
	assert.Greater(t, most, drawn/10, "the client that comes most often")
}
