package tieredlimit

import (
	"io"
	"net/http"
	"time"
)

// bodyPatience is how long the end of a request is waited for that may have a body or not. Browsers send it together with
// the head.
const bodyPatience = time.Second

// hasBody reports whether a request has a body. Over HTTP/3 the head does not tell where there is no Content-Length: then
// the first byte is waited for, and stays in the body. A request that does not end in time has one.
func hasBody(r *http.Request) bool {
	switch {
	case r.ContentLength == 0 && len(r.TransferEncoding) == 0:
		return false
	case r.ContentLength > 0 || len(r.TransferEncoding) > 0 || r.ProtoMajor < 3:
		return true
	case r.Body == nil || r.Body == http.NoBody:
		r.ContentLength = 0
		return false
	}
	body := peekBody(r.Body)
	timer := time.NewTimer(bodyPatience)
	defer timer.Stop()
	select {
	case <-body.peeked:
	case <-timer.C:
	}
	if body.isEmpty() {
		r.Body, r.ContentLength = http.NoBody, 0
		return false
	}
	r.Body = body
	return true
}

// peekedBody is a body of which a byte is read, or being read, already.
type peekedBody struct {
	body   io.ReadCloser
	peeked chan struct{} // closed once the fields below are set
	first  [1]byte
	n      int // bytes of first that are still to be read
	err    error
}

// peekBody begins to read a body.
func peekBody(body io.ReadCloser) *peekedBody {
	p := &peekedBody{body: body, peeked: make(chan struct{})}
	go func() {
		defer close(p.peeked)
		for p.n == 0 && p.err == nil {
			p.n, p.err = body.Read(p.first[:])
		}
	}()
	return p
}

// isEmpty reports whether the body is known to have ended without a byte.
func (p *peekedBody) isEmpty() bool {
	select {
	case <-p.peeked:
		return p.n == 0 && p.err == io.EOF
	default:
		return false
	}
}

// Read implements [io.Reader]. It waits for the first byte where that is still being read.
func (p *peekedBody) Read(buf []byte) (int, error) {
	<-p.peeked
	switch {
	case len(buf) == 0:
		return 0, nil
	case p.n > 0:
		buf[0], p.n = p.first[0], 0
		return 1, p.err
	case p.err != nil:
		return 0, p.err
	}
	return p.body.Read(buf)
}

// Close implements [io.Closer].
func (p *peekedBody) Close() error { return p.body.Close() }
