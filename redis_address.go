package tieredlimit

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// redisAddress is one address and what its notation says besides.
type redisAddress struct {
	network  string // tcp or unix
	target   string // host:port, or the path of the socket
	tls      bool
	username string
	password string
	db       int
}

// parseRedisAddress reads host:port, a redis:// or rediss:// URL, unix//path or unix:///path. Errors never show a
// password.
func parseRedisAddress(address, mode string) (redisAddress, error) {
	if path, ok := redisSocket(address); ok {
		if path == "" || path[0] != '/' {
			return redisAddress{}, fmt.Errorf("address: %q: want unix//path/of/the.sock", address)
		}
		if mode != redisSingle {
			return redisAddress{}, fmt.Errorf("address: %q: a unix socket is for mode single, not %s", address, mode)
		}
		return redisAddress{network: "unix", target: path}, nil
	}
	if strings.Contains(address, "://") {
		return parseRedisURL(address, mode)
	}
	if strings.Contains(address, "@") {
		return redisAddress{}, fmt.Errorf("address: %q: a login goes into username and password, or into a redis:// URL",
			withoutSecrets(address))
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return redisAddress{}, fmt.Errorf("address: %q: want host:port, a redis:// or rediss:// URL, or unix//path", address)
	}
	if err := checkRedisHost(host, port); err != nil {
		return redisAddress{}, fmt.Errorf("address: %q: %w", address, err)
	}
	return redisAddress{network: "tcp", target: address}, nil
}

// redisSocket returns the path of a unix socket.
func redisSocket(address string) (path string, ok bool) {
	for _, scheme := range []string{"unix://", "unix/"} {
		if path, ok = strings.CutPrefix(address, scheme); ok {
			return path, true
		}
	}
	return "", false
}

// parseRedisURL reads redis://user:password@host:port/db.
func parseRedisURL(address, mode string) (redisAddress, error) {
	u, err := url.Parse(address)
	if err != nil {
		// The error of url.Parse repeats the URL, password included.
		return redisAddress{}, fmt.Errorf("address: the URL that begins with %q cannot be read", schemeOf(address))
	}
	if u.Scheme != "redis" && u.Scheme != "rediss" {
		return redisAddress{}, fmt.Errorf("address: %q: want the scheme redis or rediss, not %q", u.Redacted(), u.Scheme)
	}
	if u.RawQuery != "" || u.Fragment != "" {
		return redisAddress{}, fmt.Errorf("address: %q: a query is not understood", withoutSecrets(address))
	}
	port := u.Port()
	if port == "" {
		port = "6379"
		if mode == redisSentinel {
			port = "26379"
		}
	}
	if err := checkRedisHost(u.Hostname(), port); err != nil {
		return redisAddress{}, fmt.Errorf("address: %q: %w", u.Redacted(), err)
	}
	a := redisAddress{network: "tcp", target: net.JoinHostPort(u.Hostname(), port), tls: u.Scheme == "rediss"}
	a.username = u.User.Username()
	a.password, _ = u.User.Password()
	if path := strings.TrimPrefix(u.Path, "/"); path != "" {
		if a.db, err = strconv.Atoi(path); err != nil || a.db < 0 || a.db > redisLastDB {
			return redisAddress{}, fmt.Errorf("address: %q: db %q is not a number from 0 to %d", u.Redacted(), path, redisLastDB)
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

// checkRedisHost refuses what cannot be dialled.
func checkRedisHost(host, port string) error {
	if host == "" || strings.ContainsAny(host, " \t\r\n/@{}") {
		return fmt.Errorf("%q is not a host", host)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return fmt.Errorf("%q is not a port", port)
	}
	return nil
}
