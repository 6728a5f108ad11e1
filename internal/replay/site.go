package replay

import (
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// site is a server of the config.
type site struct {
	name   string
	listen []string
	ports  []string
	tls    bool
	logger []string // names of the loggers of its access lines; nil if it states none

	server *caddyhttp.Server // nil if no stack is on it
	routes []*planRoute
	named  map[string]*planRoute
	stages []*stage

	chains *chainStudy
	met    int64 // requests that met a stack
	passed int64 // requests that met none

	failures int64 // requests that a matcher could not tell about
	failure  error // of the first
}

// noServer stands for a server where there is no config.
var noServer = new(caddyhttp.Server)

func newSite(name string, raw *rawServer, httpsPort string) *site {
	s := &site{name: name, listen: raw.Listen, tls: raw.overTLS(httpsPort), chains: newChainStudy()}
	for _, addr := range raw.Listen {
		if i := strings.LastIndexByte(addr, ':'); i >= 0 {
			s.ports = append(s.ports, addr[i+1:])
		}
	}
	if raw.Logs != nil {
		s.logger = loggerNames(raw.Logs)
	}
	return s
}

// loggerNames lists the loggers that a server's access lines may carry.
func loggerNames(l *rawLogs) []string {
	names := make(map[string]bool)
	if l.DefaultLoggerName != "" {
		names[l.DefaultLoggerName] = true
	}
	for _, raw := range l.LoggerNames {
		for name := range strings.FieldsFuncSeq(string(raw), func(r rune) bool { return strings.ContainsRune(`[]", `, r) }) {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// label names the site for people.
func (s *site) label() string {
	if len(s.listen) == 0 {
		return s.name
	}
	return s.name + " (" + strings.Join(s.listen, ", ") + ")"
}

// failed notes that a matcher could not tell.
func (s *site) failed(err error) {
	if s.failures++; s.failure == nil {
		s.failure = err
	}
}

// choose finds the server that a request came to. A log line does not say it, so servers are ruled out one by one: by
// the logger's name, by the port in the Host field, or that of the protocol, and by whether the request came over TLS. What rules out all of
// them rules out none. The first that is left, by name, is taken; of those, one that has a stack.
func choose(sites []*site, logger, host string, tls bool) *site {
	if len(sites) == 1 {
		return sites[0]
	}
	left := sites
	if _, name, ok := strings.Cut(logger, "http.log.access."); ok {
		left = narrow(left, func(s *site) bool { return slices.Contains(s.logger, name) })
	}
	port := "80"
	if _, p, err := net.SplitHostPort(host); err == nil {
		port = p
	} else if tls {
		port = "443"
	}
	left = narrow(left, func(s *site) bool { return slices.Contains(s.ports, port) })
	left = narrow(left, func(s *site) bool { return s.tls == tls })
	left = narrow(left, func(s *site) bool { return s.server != nil })
	return left[0]
}

// narrow keeps those for which f holds, or all if it holds for none.
func narrow(sites []*site, f func(*site) bool) []*site {
	kept := make([]*site, 0, 8)
	for _, s := range sites {
		if f(s) {
			kept = append(kept, s)
		}
	}
	if len(kept) == 0 {
		return sites
	}
	return kept
}
