package replay

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// Report is what a replay has found out. Its JSON form only ever grows; Version counts changes that take something away.
type Report struct {
	Version  int              `json:"version"`
	Config   string           `json:"config,omitempty"`
	Log      LogReport        `json:"log"`
	Topology []TopologyReport `json:"topology"`
	Stacks   []StackReport    `json:"stacks"`
	Notes    []string         `json:"notes"`
}

// LogReport says what was read.
type LogReport struct {
	Files     []FileReport     `json:"files"`
	Lines     int64            `json:"lines"`
	Requests  int64            `json:"requests"`
	Other     int64            `json:"other_lines"`
	Bad       map[string]int64 `json:"bad_lines"`
	Missing   map[string]int64 `json:"missing_fields"`
	Redacted  map[string]int64 `json:"redacted_headers"`
	First     time.Time        `json:"first"`
	Last      time.Time        `json:"last"`
	Late      int64            `json:"late_requests"`
	StepsBack int64            `json:"clock_steps_back"`
	Recorded  int64            `json:"recorded_429"`
	Times     Times            `json:"times"`
}

// FileReport is one log.
type FileReport struct {
	Name     string `json:"name"`
	Lines    int64  `json:"lines"`
	Requests int64  `json:"requests"`
	Error    string `json:"error,omitempty"`
}

// Times is how something went over time.
type Times struct {
	Seconds float64 `json:"bar_seconds"`
	Bars    []Bar   `json:"bars"`
	Outside int64   `json:"outside"` // requests at times far from all others
}

// TopologyReport says what the forwarding headers of one server's requests tell about the proxies in front.
type TopologyReport struct {
	Server   string       `json:"server"`
	Header   string       `json:"header"`
	Requests int64        `json:"requests"`
	With     int64        `json:"with_header"`
	Hops     *int         `json:"trusted_hops"` // null: none can be told
	Reason   string       `json:"reason"`
	Cure     string       `json:"cure,omitempty"`
	Stated   []Statement  `json:"stated"`
	Peers    []PeerReport `json:"peers"`
	AllPeers int          `json:"all_peers"` // at most 4096 are told apart
	Places   []int        `json:"distinct_by_place"`
}

// Statement is what the config of a stack says of the topology.
type Statement struct {
	Stack string `json:"stack"`
	Says  string `json:"says"`
	Fits  *bool  `json:"fits"` // null: it cannot be told
}

// PeerReport is how many requests of a peer had chains of which length: 0, 1, ... and the last for all longer ones.
type PeerReport struct {
	Peer     string  `json:"peer"`
	Requests int64   `json:"requests"`
	Lengths  []int64 `json:"lengths"`
}

// StackReport is what a stack would have done.
type StackReport struct {
	Stack     string           `json:"stack"`
	Server    string           `json:"server"`
	Mode      string           `json:"mode"`
	DryRun    bool             `json:"dry_run"`
	Requests  int64            `json:"requests"`
	Outcomes  map[string]int64 `json:"outcomes"`
	Fallbacks map[string]int64 `json:"client_fallbacks"`
	Tiers     []TierReport     `json:"tiers"`
	Times     Times            `json:"times"`
}

// TierReport is what a tier would have done.
type TierReport struct {
	Tier       string        `json:"tier"`
	Charge     string        `json:"charge"`
	DryRun     bool          `json:"dry_run"`
	Single     bool          `json:"single"`
	Requests   int64         `json:"requests"`
	Refused    int64         `json:"refused"`
	DryRefused int64         `json:"dry_refused"`
	Skipped    int64         `json:"skipped"`
	Hidden     int64         `json:"key_redacted"`
	Needs      []string      `json:"needs_headers,omitempty"`
	Altered    string        `json:"altered,omitempty"` // what the log has altered of the key, so that nothing can be said of clients
	Clients    int64         `json:"clients"`
	Affected   int64         `json:"clients_refused"`
	Sampled    bool          `json:"estimated"` // the numbers of clients, uses and candidates are estimates from a sample
	Worst      []WorstReport `json:"worst"`
	Limits     []LimitReport `json:"limits"`
	Times      Times         `json:"times"`
}

// WorstReport is one who was refused often.
type WorstReport struct {
	Who      string `json:"who"`
	Requests int64  `json:"requests,omitempty"` // absent if not counted one by one
	Refused  int64  `json:"refused"`
	AtMost   int64  `json:"refused_at_most"`
}

// LimitReport is how a limit is used, and what others would do in its place. A use is the number of requests of one
// client in one window, whether they were refused or not.
type LimitReport struct {
	Count      int64             `json:"count"`
	Seconds    float64           `json:"window_seconds"`
	Exceeded   int64             `json:"exceeded"` // refusals at which this limit was reached
	Uses       int64             `json:"uses"`
	P50        int64             `json:"p50"`
	P99        int64             `json:"p99"`
	P999       int64             `json:"p999"`
	Max        int64             `json:"max"`
	Suggested  int64             `json:"suggested,omitempty"`
	Why        string            `json:"why"`
	Candidates []CandidateReport `json:"candidates"`

	peaks  []spreadValue
	uses   []spreadValue
	window time.Duration
}

// CandidateReport is what a limit would hit, if it were the only one.
type CandidateReport struct {
	Count        int64   `json:"count"`
	Requests     int64   `json:"requests"` // above the limit
	RequestShare float64 `json:"request_share"`
	Clients      int64   `json:"clients"` // with at least one such request
	ClientShare  float64 `json:"client_share"`
}

// Shape says how much a report holds.
type Shape struct {
	Top        int     // worst clients and peers
	Bars       int     // of charts
	Candidates []int64 // limits to weigh; nil: chosen by the log
}

// report makes the report of a finished run.
func (r *run) report() *Report {
	rep := &Report{Version: 1, Config: r.options.ConfigName, Notes: slices.Concat(r.plan.notes, r.notes())}
	rep.Log = r.logReport()
	for _, s := range r.plan.sites {
		if s.chains.headers[0].requests > 0 {
			rep.Topology = append(rep.Topology, s.topology(r.options.Shape, r.plan.studies))
		}
	}
	for _, s := range r.plan.stacks {
		rep.Stacks = append(rep.Stacks, s.report(r.options.Shape, r.plan.studies))
	}
	return rep
}

func (r *run) logReport() LogReport {
	var sum lineStats
	l := LogReport{Bad: make(map[string]int64), Missing: make(map[string]int64), Redacted: make(map[string]int64)}
	for _, s := range r.sources {
		f := FileReport{Name: s.name, Lines: s.stats.Lines, Requests: s.stats.Requests}
		if s.err != nil {
			f.Error = s.err.Error()
		}
		l.Files = append(l.Files, f)
		l.Late += s.late
		l.StepsBack += s.stepsBack
		sum.add(&s.stats)
	}
	l.Lines, l.Requests, l.Other = sum.Lines, sum.Requests, sum.Other
	for i, n := range sum.Bad {
		if n > 0 {
			l.Bad[badNames[i]] = n
		}
	}
	for i, n := range sum.Missing {
		if n > 0 {
			l.Missing[fieldNames[i]] = n
		}
	}
	for i, n := range sum.Redacted {
		if n > 0 {
			l.Redacted[r.want.names[i]] = n
		}
	}
	if r.seen {
		l.First, l.Last = time.Unix(0, r.first).UTC(), time.Unix(0, r.last).UTC()
	}
	l.Recorded = r.recorded
	l.Times = r.times.times(r.options.Shape.Bars)
	return l
}

// notes are what a reader has to know about the log.
func (r *run) notes() (notes []string) {
	var sum lineStats
	var late, steps int64
	for _, s := range r.sources {
		sum.add(&s.stats)
		late += s.late
		steps += s.stepsBack
	}
	access := sum.Requests + sum.Bad[badTime] + sum.Bad[badDuration] + sum.Bad[badPeer]
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	switch {
	case r.options.Config == nil && !r.options.TopologyOnly:
		note("no config found: only the topology is reported; name one with --config")
	case r.options.Config == nil:
		note("only the topology is reported, as --topology asks")
	}
	switch {
	case sum.Lines == 0:
		note("the log is empty")
	case access == 0:
		note("the log has no access lines: each is a JSON object with a request in it")
	}
	for kind, n := range sum.Bad {
		if n > 0 {
			text := fmt.Sprintf("%s could not be used: %s", plural(n, "line"), badMeans[kind])
			if sample := sum.samples[kind]; sample != "" {
				text += fmt.Sprintf("; the first begins with %q", sample)
			}
			note("%s", text)
		}
	}
	for i, n := range sum.Missing {
		if n > 0 {
			note("%s of the access lines have no %s: %s", share(n, access), fieldNames[i], missingMeans[i])
		}
	}
	if sum.coarse && !sum.fine {
		note("all times in the log are whole seconds: near the edges of windows, requests may be counted in the wrong one")
	}
	if late > 0 {
		note("%d requests took longer than lines are held back to be sorted, or the log is too busy for it; they were judged "+
			"later than they came (see --reorder)", late)
	}
	if steps > 0 {
		note("the times in the log step back %d times: the clock was set back, or logs were put one behind the other; name logs "+
			"one by one, and they are merged by time", steps)
	}
	return slices.Concat(notes, r.plan.studies.notes(r.plan), r.plan.warnings())
}

// badMeans says what is wrong with lines that could not be used, and what to do about it.
var badMeans = [badKinds]string{
	"they are cut off, and in the console format; write the log as JSON: log { format json }",
	"they are in the common log format, which lacks what a replay needs; let Caddy write JSON: log { format json }",
	"they are cut off, as by a collector with a bound on lines, or the end of a file that is still written",
	"they are no JSON objects, also behind what a collector may have put in front",
	"they have no time that can be read; see --time-key and --time-format",
	"they have a duration that cannot be read; see --duration-format",
	"they do not say who the peer was (request.remote_ip)",
	"they are too long",
}

// missingMeans says what follows where a field is missing.
var missingMeans = [fields]string{
	"they cannot be used", "they are taken as instantaneous", "they cannot be used", "they match no method",
	"they match no host", "they match no path", "no forwarding header, and no key from a header, is known of them",
}

// warnings are what is wrong with the stacks on this log.
func (p *plan) warnings() (notes []string) {
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	for _, s := range p.sites {
		if s.server != nil && s.server != noServer && s.met == 0 && s.passed > 0 {
			note("none of the %d requests of server %s met a stack: is the log that of this config?", s.passed, s.label())
		}
		if s.failures > 0 {
			note("server %s: %d requests could not be matched (%v)", s.label(), s.failures, s.failure)
		}
	}
	for _, s := range p.stacks {
		switch s.info.Mode {
		case Inert:
			note("stack %q limits nothing: trusted_hops is not stated, so no client address can be trusted", s.info.Label)
		case Off:
			note("stack %q is switched off: every tier has a limit of 0", s.info.Label)
		}
		if text := s.distrusted(); text != "" {
			note("%s", text)
		}
		for i, t := range s.tally.tiers {
			if t.hidden > 0 {
				note("tier %q of stack %q: the log has %s redacted, so %d requests could not be judged by it; write the log with "+
					"log_credentials to replay it", t.info.Name, s.info.Label, strings.Join(s.deps[i], ", "), t.hidden)
			}
		}
	}
	return notes
}

func (t *timeline) times(bars int) Times {
	list, width, outside := t.bars(bars)
	return Times{Seconds: width.Seconds(), Bars: list, Outside: outside}
}

// topology reports the chains of a site.
func (s *site) topology(shape Shape, studies *fieldStudies) TopologyReport {
	a := s.chains.advise()
	if how := studies.alteredChain(a.header); how != "" {
		header := a.header
		a = untold("in this log %s", how)
		a.header, a.cure = header, "replay a log that is written without that filter"
	}
	study := s.chains.headers[0]
	for _, h := range s.chains.headers {
		if h.header == a.header {
			study = h
		}
	}
	t := TopologyReport{
		Server: s.label(), Header: a.header, Requests: study.requests, With: study.with, Reason: a.reason, Cure: a.cure,
		AllPeers: len(study.peers),
	}
	if a.hops >= 0 {
		t.Hops = &a.hops
	}
	for place := 1; place <= maxPlaces && study.distinct(place) > 0; place++ {
		t.Places = append(t.Places, study.distinct(place))
	}
	for _, p := range study.sorted() {
		if len(t.Peers) == shape.Top {
			break
		}
		t.Peers = append(t.Peers, PeerReport{Peer: p.name, Requests: p.requests, Lengths: slices.Clone(p.lengths[:])})
	}
	for _, st := range s.stages {
		t.Stated = append(t.Stated, st.statement(a))
	}
	return t
}

// statement compares what a stack is told with what the log implies.
func (s *stage) statement(a hopAdvice) Statement {
	i := &s.info
	st := Statement{Stack: i.Label, Says: "nothing is stated"}
	fits := false
	switch {
	case i.Hops >= 0:
		st.Says = fmt.Sprintf("trusted_hops %d", i.Hops)
		if i.Header != "X-Forwarded-For" {
			st.Says += " " + i.Header
		}
		if i.Hops > 0 && i.Trusted {
			st.Says += ", believed from the server's trusted_proxies only"
		}
		switch {
		case a.hops != 0 && s.tally.misplaced():
		case a.hops < 0 || i.Hops > 0 && i.Header != a.header:
			return st
		default:
			fits = i.Hops == a.hops
		}
	case i.Trusted:
		st.Says = "trusted_proxies of the server"
		if a.hops == 0 || !s.tally.misplaced() {
			return st
		}
	case a.hops < 0:
		return st
	}
	st.Fits = &fits
	return st
}

// distrusted says of which peers a stack has not believed the chains, if those are likely proxies. It is empty otherwise.
func (s *stage) distrusted() string {
	if s.site.chains.advise().hops == 0 || !s.tally.misplaced() {
		return ""
	}
	peers := slices.SortedFunc(maps.Keys(s.tally.untrusted), func(a, b string) int {
		return cmp.Or(cmp.Compare(s.tally.untrusted[b], s.tally.untrusted[a]), cmp.Compare(a, b))
	})
	var named []string
	for _, peer := range peers[:min(len(peers), 5)] {
		named = append(named, fmt.Sprintf("%s: %d", peer, s.tally.untrusted[peer]))
	}
	if more := len(peers) - len(named); more > 0 {
		named = append(named, fmt.Sprintf("%d more", more))
	}
	n := s.tally.fallbacks[clientip.UntrustedPeer.String()]
	return fmt.Sprintf("stack %q: %d requests (%s) have a forwarding header and come from peers that are not in trusted_proxies (%s), so all "+
		"clients behind such a peer share one limit; if these are your proxies, add them to trusted_proxies and replay again",
		s.info.Label, n, share(n, s.tally.judged()), strings.Join(named, ", "))
}

// report reports a stack.
func (s *stage) report(shape Shape, studies *fieldStudies) StackReport {
	t := s.tally
	rep := StackReport{
		Stack: s.info.Label, Server: s.site.label(), DryRun: s.info.DryRun, Outcomes: make(map[string]int64),
		Fallbacks: maps.Clone(t.fallbacks), Times: t.times.times(shape.Bars),
	}
	rep.Mode = [...]string{"limiting", "off", "inert"}[s.info.Mode]
	for i, n := range t.outcomes {
		rep.Requests += n
		if n > 0 {
			rep.Outcomes[Outcome(i).String()] = n
		}
	}
	for i, tier := range t.tiers {
		rep.Tiers = append(rep.Tiers, tier.report(shape, s.Skipped(i), s.deps[i], studies.alteredFor(&s.info, &s.info.Tiers[i])))
	}
	return rep
}

func (t *tierTally) report(shape Shape, skipped int64, needs []string, altered string) TierReport {
	t.clients.finish()
	rep := TierReport{
		Tier: t.info.Name, Charge: t.info.Charge, DryRun: t.info.DryRun, Single: t.info.Single, Requests: t.requests,
		Refused: t.refused, DryRefused: t.dry, Skipped: skipped, Hidden: t.hidden, Needs: needs,
		Sampled: !t.clients.exact(), Times: t.times.times(shape.Bars),
	}
	rep.Clients, rep.Affected = t.clients.seen()
	for _, o := range t.worst.top(maxWorst) {
		w := WorstReport{Who: o.name, Refused: o.count - o.over, AtMost: o.count}
		if requests, refused, ok := t.clients.requests(o.hash); ok {
			w.Requests = requests
			if t.clients.exact() {
				w.Refused, w.AtMost = refused, refused
			}
		}
		rep.Worst = append(rep.Worst, w)
	}
	slices.SortStableFunc(rep.Worst, func(a, b WorstReport) int { return cmp.Compare(b.Refused, a.Refused) })
	rep.Worst = rep.Worst[:min(len(rep.Worst), shape.Top)]
	for i, limit := range t.info.Limits {
		rep.Limits = append(rep.Limits, t.limit(i, limit, shape))
		if l := &rep.Limits[i]; altered != "" {
			l.Suggested, l.Why, l.Candidates = 0, "the log does not say who the clients are", nil
		}
	}
	rep.Altered = altered
	return rep
}

func (t *tierTally) limit(i int, limit LimitInfo, shape Shape) LimitReport {
	uses, peaks := t.clients.use[i].sorted(), t.clients.peaks(i).sorted()
	rep := LimitReport{
		Count: limit.Count, Seconds: limit.Window.Seconds(), Exceeded: t.exceeded[i], Uses: t.clients.use[i].n,
		P50: quantile(uses, 0.5), P99: quantile(uses, 0.99), P999: quantile(uses, 0.999), Max: quantile(uses, 1),
		uses: uses, peaks: peaks, window: limit.Window,
	}
	advice := adviseLimit(uses, peaks, t.info.Single)
	rep.Suggested, rep.Why = advice.count, advice.reason
	if len(uses) == 0 {
		return rep
	}
	requests := total(uses)
	clients, _ := t.clients.seen()
	for _, count := range candidates(uses, limit.Count, advice.count, shape.Candidates) {
		c := CandidateReport{Count: count}
		_, c.Requests = above(uses, count)
		c.Clients, _ = above(peaks, count)
		c.RequestShare, c.ClientShare = ratio(c.Requests, requests), ratio(c.Clients, clients)
		rep.Candidates = append(rep.Candidates, c)
	}
	return rep
}

func ratio(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// share is a part of a whole in percent, for people.
func share(part, whole int64) string {
	return percent(ratio(part, whole))
}

// percent writes a ratio with as many digits as it takes to tell it from 0 and from 1.
func percent(r float64) string {
	switch p := 100 * r; {
	case p == 0 || p == 100:
		return fmt.Sprintf("%.0f %%", p)
	case p < 0.01:
		return "<0.01 %"
	case p > 99.99:
		return ">99.99 %"
	case p < 1 || p > 99:
		return fmt.Sprintf("%.2f %%", p)
	default:
		return fmt.Sprintf("%.1f %%", p)
	}
}
