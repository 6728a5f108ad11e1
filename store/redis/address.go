package redis

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// endpoint is one address and what its notation says besides.
type endpoint struct {
	network  string // tcp or unix
	target   string // host:port, or the path of the socket
	tls      bool
	username string
	password string
	db       int
}

// parseAddress reads host:port, a redis:// or rediss:// URL, unix//path or unix:///path. Errors never show a
// password.
func parseAddress(address, mode string) (endpoint, error) {
	if path, ok := socketOf(address); ok {
		if path == "" || path[0] != '/' {
			return endpoint{}, fmt.Errorf("address: %q: want unix//path/of/the.sock", address)
		}
		if mode != modeSingle {
			return endpoint{}, fmt.Errorf("address: %q: a unix socket is for mode single, not %s", address, mode)
		}
		return endpoint{network: "unix", target: path}, nil
	}
	if strings.Contains(address, "://") {
		return parseURL(address, mode)
	}
	if strings.Contains(address, "@") {
		return endpoint{}, fmt.Errorf("address: %q: a login goes into username and password, or into a redis:// URL",
			withoutSecrets(address))
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return endpoint{}, fmt.Errorf("address: %q: want host:port, a redis:// or rediss:// URL, or unix//path", address)
	}
	if err := checkHost(host, port); err != nil {
		return endpoint{}, fmt.Errorf("address: %q: %w", address, err)
	}
	return endpoint{network: "tcp", target: address}, nil
}

// socketOf returns the path of a unix socket.
func socketOf(address string) (path string, ok bool) {
	for _, scheme := range []string{"unix://", "unix/"} {
		if path, ok = strings.CutPrefix(address, scheme); ok {
			return path, true
		}
	}
	return "", false
}

// parseURL reads redis://user:password@host:port/db.
func parseURL(address, mode string) (endpoint, error) {
	u, err := url.Parse(address)
	if err != nil {
		// The error of url.Parse repeats the URL, password included.
		return endpoint{}, fmt.Errorf("address: the URL that begins with %q cannot be read", schemeOf(address))
	}
	if u.Scheme != "redis" && u.Scheme != "rediss" {
		return endpoint{}, fmt.Errorf("address: %q: want the scheme redis or rediss, not %q", u.Redacted(), u.Scheme)
	}
	if u.RawQuery != "" || u.Fragment != "" {
		return endpoint{}, fmt.Errorf("address: %q: a query is not understood", withoutSecrets(address))
	}
	port := u.Port()
	if port == "" {
		port = "6379"
		if mode == modeSentinel {
			port = "26379"
		}
	}
	if err := checkHost(u.Hostname(), port); err != nil {
		return endpoint{}, fmt.Errorf("address: %q: %w", u.Redacted(), err)
	}
	a := endpoint{network: "tcp", target: net.JoinHostPort(u.Hostname(), port), tls: u.Scheme == "rediss"}
	a.username = u.User.Username()
	a.password, _ = u.User.Password()
	if path := strings.TrimPrefix(u.Path, "/"); path != "" {
		if a.db, err = strconv.Atoi(path); err != nil || a.db < 0 || a.db > lastDB {
			return endpoint{}, fmt.Errorf("address: %q: db %q is not a number from 0 to %d", u.Redacted(), path, lastDB)
		}
	}
	return a, nil
}

// withoutSecrets is an address without what is in front of the host, and without a query, which may hold a password.
func withoutSecrets(address string) string {
	if i := strings.LastIndexByte(address, '@'); i >= 0 {
		address = "..." + address[i:]
	}
	if i := strings.IndexAny(address, "?#"); i >= 0 {
		address = address[:i+1] + "..."
	}
	return address
}

func schemeOf(address string) string {
	scheme, _, _ := strings.Cut(address, "://")
	return scheme + "://"
}

// checkHost refuses what cannot be dialled.
func checkHost(host, port string) error {
	if host == "" || strings.ContainsAny(host, " \t\r\n/@{}") {
		return fmt.Errorf("%q is not a host", host)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return fmt.Errorf("%q is not a port", port)
	}
	return nil
}
