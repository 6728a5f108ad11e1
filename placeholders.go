package tieredlimit

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// placeholderProbe tells at load which request placeholders exist, by resolving them on a request made up for it.
type placeholderProbe struct {
	repl *caddy.Replacer
}

func newPlaceholderProbe(server *caddyhttp.Server) *placeholderProbe {
	if server == nil {
		server = new(caddyhttp.Server)
	}
	r := probeRequest("192.0.2.1:1")
	local := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}
	r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, local))
	repl := caddy.NewReplacer()
	caddyhttp.PrepareRequest(r, repl, nil, server)
	return &placeholderProbe{repl: repl}
}

// probeRequest is a request as a server would receive it from a peer.
func probeRequest(peer string) *http.Request {
	return &http.Request{
		Method: http.MethodGet, URL: &url.URL{Path: "/"}, RequestURI: "/", Host: "probe.invalid",
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: make(http.Header), Body: http.NoBody, RemoteAddr: peer,
	}
}

// check refuses a placeholder that does not exist, and one whose value can never be shared by two requests of one
// client, so that a limit on it would never be reached.
func (p *placeholderProbe) check(name string) error {
	if neverLimits(name) {
		return fmt.Errorf("placeholder {%s} differs on every request, so it can never limit", name)
	}
	if alwaysEmpty(name) {
		return fmt.Errorf("placeholder {%s} is empty on every request, so it can never limit%s", name, insteadOf(name))
	}
	if !strings.HasPrefix(name, "http.request.") {
		return nil
	}
	value, known := p.repl.Get(name)
	if !known {
		return fmt.Errorf("placeholder {%s} does not exist in Caddy; %s", name, insteadOfUnknown(name))
	}
	if isPeerHost(name) && value == "" {
		return fmt.Errorf("placeholder {%s} has a number of bits that an address does not have", name)
	}
	return nil
}

// alwaysEmpty tells whether a placeholder has no value when a request is judged: what a refusal says, a field that
// never reaches a handler as one (RFC 9112 sections 3.2 and 6.1), or a name that is missing.
func alwaysEmpty(name string) bool {
	switch {
	case strings.HasPrefix(name, "http.tiered_limit."):
		return name != clientPlaceholder
	case strings.HasPrefix(name, headerPrefix):
		return neverAField(name[len(headerPrefix):])
	}
	return name == queryPrefix || name == cookiePrefix
}

// neverAField tells whether the server takes a field out of the header of every request.
func neverAField(name string) bool {
	switch textproto.CanonicalMIMEHeaderKey(name) {
	case "", "Host", "Transfer-Encoding", "Trailer":
		return true
	}
	return false
}

// insteadOfUnknown says what to write instead of a request's placeholder that does not exist.
func insteadOfUnknown(name string) string {
	for wrong, right := range map[string]string{
		"headers.": "header.", "cookies.": "cookie.", "query.": "uri.query.", "params.": "uri.query.", "header_": "header.",
	} {
		if rest, ok := strings.CutPrefix(name, "http.request."+wrong); ok {
			return fmt.Sprintf("write {http.request.%s%s}", right, rest)
		}
	}
	for wrong, right := range map[string]string{
		"path": "http.request.uri.path", "query": "http.request.uri.query", "user.id": userPlaceholder, "user": userPlaceholder,
	} {
		if name == "http.request."+wrong {
			return "write {" + right + "}"
		}
	}
	return "for the client's address write {" + clientPlaceholder + "}"
}

// insteadOf says what to write instead of a placeholder that is always empty, if there is something.
func insteadOf(name string) string {
	if strings.EqualFold(name, headerPrefix+"host") {
		return "; write {" + hostPlaceholder + "}"
	}
	return ""
}

// isPeerHost tells whether a placeholder is the address of the connection's other end, or a range around it.
func isPeerHost(name string) bool {
	return name == "http.request.remote.host" || strings.HasPrefix(name, "http.request.remote.host/")
}

// neverLimits tells whether a placeholder of Caddy's is new on every request or connection, or in every second, or
// reads the body.
func neverLimits(name string) bool {
	switch name {
	case "http.request.uuid", "http.request.remote", "http.request.remote.port",
		"http.vars.uuid", "http.vars.start_time", "time.now", "time.now.http",
		"time.now.rfc3339", "time.now.common_log", "time.now.unix", "time.now.unix_ms":
		return true
	}
	return strings.HasPrefix(name, "http.request.duration") || strings.HasPrefix(name, "http.request.body")
}
