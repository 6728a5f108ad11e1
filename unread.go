package tieredlimit

import (
	"io"
	"net/http"
	"strings"
	"time"
)

// A refused request's body is not wanted. What has arrived of it is dropped, so that the connection can serve the next
// request; whoever is still sending is answered at once, and the connection ends.
const (
	unreadPatience = 50 * time.Millisecond // for a body that is right behind its head
	maxDropped     = 64 << 10              // bytes of a body that are dropped rather than the connection
)

// leaveBody makes sure that an answer does not wait for the rest of the request's body: net/http reads up to 256 KiB of
// it before it answers over HTTP/1, and so would wait for as long as a client likes to take. Other versions of HTTP
// answer without it.
func leaveBody(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor != 1 || r.ContentLength == 0 || r.Body == nil || r.Body == http.NoBody {
		return
	}
	controller := http.NewResponseController(w)
	if r.Header["Expect"] == nil && r.ContentLength <= maxDropped {
		if controller.SetReadDeadline(time.Now().Add(unreadPatience)) != nil {
			return // this is no connection
		}
		if n, err := io.CopyN(io.Discard, r.Body, maxDropped+1); err == io.EOF && n <= maxDropped {
			_ = controller.SetReadDeadline(time.Time{})
			return
		}
	}
	if controller.SetReadDeadline(time.Unix(1, 0)) != nil { // nothing waits for the rest from here on
		return
	}
	endAfterReply(w)
}

// endAfterReply makes net/http answer without reading on, and close the connection so that the client still gets the answer
// while it sends. What it does for a body over its bound ([http.MaxBytesReader]) is just that.
func endAfterReply(w http.ResponseWriter) {
	for {
		wrapped, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = wrapped.Unwrap()
	}
	over := http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0)
	_, _ = over.Read(make([]byte, 2))
}
