package replay

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// walk takes one request after another through a plan.
type walk struct {
	plan  *plan
	want  *wanted
	trace func(Judged)

	site    *site
	trip    trip
	user    string
	query   Query
	verdict Verdict
	groups  []int
	depth   int
	judged  int // stacks that the request met
	told    Judged
	studies *fieldStudies

	reused map[*site]*reusable
	values []string // of the request's header, in one piece
	hidden []uint16 // fields whose value is redacted
}

// Judged is what became of a request at the last stack that it met, as a trace sees it. Stack is empty if it met none.
type Judged struct {
	Log     string
	Line    int64
	At      time.Time
	Stack   string
	Outcome Outcome
	Tier    string // that refused, or would have
}

// reusable is a request that is prepared once for a server and filled anew for each line.
type reusable struct {
	request  *http.Request
	replacer *caddy.Replacer
	url      url.URL
}

func newWalk(p *plan, want *wanted) *walk {
	w := &walk{plan: p, want: want, reused: make(map[*site]*reusable), studies: p.studies}
	w.query.Hidden, w.query.Fresh = w.isHidden, p.needs.everything
	return w
}

// take judges a request by all stacks that it meets.
func (w *walk) take(t trip, log *source) {
	b, e := t.batch, t.entry
	w.trip = t
	w.site = choose(w.plan.sites, b.get(e.logger), b.get(e.host), e.flags&overTLS != 0)
	w.fill()
	w.site.chains.add(b.get(e.peer), w.query.Request.Header)
	w.studies.add(b.get(e.peer), &w.query)
	if w.site.server == nil {
		w.site.passed++
		return
	}
	w.groups, w.depth, w.judged = w.groups[:0], 0, 0
	w.told = Judged{}
	w.query.Met = nil
	w.query.Now = time.Unix(0, t.at)
	if _, err := w.run(w.site.routes); err != nil && w.judged == 0 {
		w.site.failed(err)
	}
	if w.judged == 0 {
		w.site.passed++
	} else {
		w.site.met++
	}
	if w.trace != nil {
		w.told.Log, w.told.Line = log.name, b.first+int64(e.line)
		w.told.At = w.query.Now
		w.trace(w.told)
	}
}

// judge puts the request to a stack. It ended if the stack refuses it.
func (w *walk) judge(s *stage) (ended bool, err error) {
	w.judged++
	err = s.Judge(&w.query, &w.verdict)
	if err != nil {
		w.verdict.Outcome = Failed
	}
	s.tally.add(w, s)
	w.told.Stack, w.told.Outcome, w.told.Tier = s.info.Label, w.verdict.Outcome, ""
	if i := w.verdict.RefusedBy; i >= 0 && err == nil {
		w.told.Tier = s.info.Tiers[w.verdict.Claims[i].Tier].Name
	}
	return err != nil || w.verdict.Outcome == Refused, err
}

// fill makes a request of the line, as the server saw it.
func (w *walk) fill() {
	b, e := w.trip.batch, w.trip.entry
	w.user = b.get(e.user)
	if w.plan.needs.everything {
		w.prepare()
		return
	}
	u := w.reused[w.site]
	if u == nil {
		u = &reusable{replacer: caddy.NewReplacer()}
		blank := &http.Request{Method: http.MethodGet, URL: &u.url, Header: make(http.Header), RemoteAddr: "192.0.2.1:1"}
		u.request = caddyhttp.PrepareRequest(blank, u.replacer, nil, w.site.server)
		w.reused[w.site] = u
	}
	clear(u.request.Header)
	u.replacer.Delete(userPlaceholder)
	w.copyTo(u.request)
	setURL(&u.url, u.request.RequestURI)
	u.request.URL = &u.url
	w.query.Request, w.query.Replacer = u.request, u.replacer
}

// prepare makes a new request and prepares it as Caddy does.
func (w *walk) prepare() {
	port := 80
	if len(w.site.ports) > 0 {
		if n, err := strconv.Atoi(w.site.ports[0]); err == nil {
			port = n
		}
	}
	local := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}
	r := &http.Request{Header: make(http.Header), URL: new(url.URL), Body: http.NoBody}
	w.values = nil
	w.copyTo(r)
	setURL(r.URL, r.RequestURI)
	r = r.WithContext(context.WithValue(context.Background(), http.LocalAddrContextKey, local))
	w.query.Replacer = caddy.NewReplacer()
	w.query.Request = caddyhttp.PrepareRequest(r, w.query.Replacer, nil, w.site.server)
}

// copyTo sets the fields of a request that the log has.
func (w *walk) copyTo(r *http.Request) {
	b, e := w.trip.batch, w.trip.entry
	r.Method, r.Host, r.RequestURI = b.get(e.method), b.get(e.host), b.get(e.uri)
	r.RemoteAddr, r.Proto = b.get(e.peer), b.get(e.proto)
	r.ProtoMajor, r.ProtoMinor = protoVersion(r.Proto)
	r.TLS = nil
	if e.flags&overTLS != 0 {
		r.TLS = finished
	}
	w.copyHeader(r.Header)
	r.ContentLength, r.TransferEncoding = 0, nil
	if n, err := strconv.ParseInt(r.Header.Get("Content-Length"), 10, 64); err == nil {
		r.ContentLength = n
	} else {
		r.ContentLength = e.size
	}
	if e.flags&chunked != 0 {
		r.ContentLength, r.TransferEncoding = -1, []string{"chunked"}
	}
}

// finished is what is known of a connection that the log says was encrypted.
var finished = &tls.ConnectionState{HandshakeComplete: true, Version: tls.VersionTLS13}

// copyHeader sets the header fields that were read. Lines of one name are next to each other.
func (w *walk) copyHeader(h http.Header) {
	b, e := w.trip.batch, w.trip.entry
	w.values, w.hidden = w.values[:0], w.hidden[:0]
	lines := b.headers[e.headers:e.headersEnd]
	for _, line := range lines {
		w.values = append(w.values, b.get(line.value))
	}
	for i := 0; i < len(lines); {
		j := i + 1
		for j < len(lines) && lines[j].index == lines[i].index && lines[j].name == lines[i].name {
			j++
		}
		name := b.get(lines[i].name)
		if lines[i].index != unlisted {
			name = w.want.names[lines[i].index]
			if w.values[i] == redacted {
				w.hidden = append(w.hidden, lines[i].index)
			}
		}
		h[name] = w.values[i:j:j]
		i = j
	}
}

// isHidden tells whether the log has a field's value redacted.
func (w *walk) isHidden(name string) bool {
	for _, i := range w.hidden {
		if w.want.names[i] == name {
			return true
		}
	}
	return false
}

// protoVersion reads HTTP/1.1 and the like.
func protoVersion(proto string) (major, minor int) {
	if len(proto) == len("HTTP/1.1") && strings.HasPrefix(proto, "HTTP/") && proto[6] == '.' {
		return int(proto[5] - '0'), int(proto[7] - '0')
	}
	return 1, 1
}

// setURL parses a request target as Go's server does. Most need no more than a cut at the question mark.
func setURL(u *url.URL, target string) {
	*u = url.URL{}
	if path, query, _ := strings.Cut(target, "?"); plainTarget(target) {
		u.Path, u.RawQuery = path, query
		return
	}
	if parsed, err := url.ParseRequestURI(target); err == nil {
		*u = *parsed
		return
	}
	u.Path = target
}

// plainTarget tells whether a target is a path, and perhaps a query, that stands for itself.
func plainTarget(target string) bool {
	if len(target) < 2 || target[0] != '/' || target[1] == '/' || target[len(target)-1] == '?' {
		return false
	}
	for i := 0; i < len(target); i++ {
		if !plainBytes[target[i]] {
			return false
		}
	}
	return true
}

// plainBytes are those that neither stand for anything else nor are ever escaped in a path.
var plainBytes = func() (plain [256]bool) {
	for _, c := range "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/-_.~?&=+,:@" {
		plain[c] = true
	}
	return plain
}()
