package redistest

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// Conn says how to talk to a server. It is a client of its own, so that tests do not rest on the one that they test.
type Conn struct {
	// Password logs in, if not empty.
	Password string

	// TLS encrypts, if not nil.
	TLS *tls.Config
}

// Do connects, sends one command and returns the reply.
func (c *Conn) Do(addr string, command ...string) (any, error) {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return nil, err
	}
	if c.TLS != nil {
		conn = tls.Client(conn, c.TLS)
	}
	r := bufio.NewReader(conn)
	if c.Password != "" {
		if _, err := ask(conn, r, "AUTH", c.Password); err != nil {
			return nil, err
		}
	}
	return ask(conn, r, command...)
}

func ask(w io.Writer, r *bufio.Reader, command ...string) (any, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(command))
	for _, word := range command {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(word), word)
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return nil, err
	}
	return read(r)
}

// read reads one reply of RESP 2.
func read(r *bufio.Reader) (any, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	line = strings.TrimSuffix(line, "\r\n")
	if line == "" {
		return nil, errors.New("empty reply")
	}
	switch rest := line[1:]; line[0] {
	case '+':
		return rest, nil
	case '-':
		return nil, errors.New(rest)
	case ':':
		return strconv.ParseInt(rest, 10, 64)
	case '$':
		n, err := strconv.Atoi(rest)
		if err != nil || n < 0 {
			return nil, err
		}
		text := make([]byte, n+2)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, err
		}
		return string(text[:n]), nil
	case '*':
		n, err := strconv.Atoi(rest)
		if err != nil || n < 0 {
			return nil, err
		}
		list := make([]any, n)
		for i := range list {
			if list[i], err = read(r); err != nil {
				return nil, err
			}
		}
		return list, nil
	}
	return nil, fmt.Errorf("reply %q is not understood", line)
}
