package tieredlimit

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// CORS says which origins may read the responses that this module makes itself.
type CORS struct {
	// The origins, such as `https://app.example.com`, compared whole; or `*` alone for any.
	Origins []string `json:"origins"`

	// Whether responses may be read by requests with credentials. Not with `*`. Default: false.
	Credentials bool `json:"credentials,omitempty"`
}

// check refuses what browsers would ignore.
func (c *CORS) check() error {
	if c == nil {
		return nil
	}
	if len(c.Origins) == 0 {
		return errors.New("cors has no origin")
	}
	for i, o := range c.Origins {
		if slices.Contains(c.Origins[:i], o) {
			return fmt.Errorf("cors names %q twice", o)
		}
		if isPlaceholder(o) {
			continue
		}
		if o == "*" {
			if len(c.Origins) > 1 {
				return errors.New("cors * cannot stand beside other origins")
			}
			if c.Credentials {
				return errors.New("cors * cannot have credentials: browsers refuse it; list the origins")
			}
			continue
		}
		if err := checkOrigin(o); err != nil {
			return err
		}
	}
	return nil
}

// checkOrigin refuses what no browser sends as Origin (RFC 6454, section 7).
func checkOrigin(s string) error {
	u, err := url.Parse(s)
	if err != nil || u.Scheme == "" || u.Host == "" || s != strings.ToLower(u.Scheme+"://"+u.Host) {
		return fmt.Errorf("cors origin %q is not of the form scheme://host[:port], in lower case and without a path", s)
	}
	for _, c := range []byte(u.Hostname()) {
		if c == '*' {
			return fmt.Errorf("cors origin %q has a wildcard; origins are compared whole, so list them, or write * alone", s)
		}
		if c <= ' ' || c > '~' {
			return fmt.Errorf("cors origin %q has a host that is not ASCII; browsers send it in its xn-- form", s)
		}
	}
	port := u.Port()
	if n, err := strconv.Atoi(port); port != "" && (err != nil || n < 1 || n > 65535) {
		return fmt.Errorf("cors origin %q has no port from 1 to 65535", s)
	}
	if u.Scheme == "https" && port == "443" || u.Scheme == "http" && port == "80" || strings.HasSuffix(u.Host, ":") {
		return fmt.Errorf("cors origin %q names the default port, which browsers leave out", s)
	}
	return nil
}

// corsRules are a compiled [CORS].
type corsRules struct {
	any         bool
	origins     map[string]bool
	credentials bool
}

func compileCORS(c *CORS) *corsRules {
	if c == nil {
		return nil
	}
	rules := &corsRules{origins: make(map[string]bool), credentials: c.Credentials}
	for _, o := range c.Origins {
		rules.any = rules.any || o == "*"
		rules.origins[o] = true
	}
	return rules
}

// allow lets the request's origin read the response, if it is listed. A field that an earlier handler has set stays as
// it is.
func (c *corsRules) allow(header http.Header, r *http.Request) {
	if c == nil {
		return
	}
	if !c.any {
		addVary(header)
	}
	origins := r.Header["Origin"]
	if _, set := header[fieldAllow]; set || len(origins) != 1 {
		return
	}
	origin := origins[0]
	switch {
	case c.any:
		header[fieldAllow] = []string{"*"}
	case c.origins[origin]:
		header[fieldAllow] = []string{origin}
		if c.credentials {
			header[fieldAllowCred] = []string{"true"}
		}
	}
}

// addVary adds Origin to Vary, unless it is there.
func addVary(header http.Header) {
	for _, line := range header[fieldVary] {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name == "*" || strings.EqualFold(name, "Origin") {
				return
			}
		}
	}
	header[fieldVary] = append(header[fieldVary], "Origin")
}
