package tieredlimit

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
)

// grpcCall makes a request a gRPC call with a content type.
func grpcCall(contentType string) request {
	return request{method: http.MethodPost, url: "http://localhost/shop.Cart/Add", edit: func(r *http.Request) {
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
	}}.with("Content-Type", contentType).with("Te", "trailers")
}

// A gRPC call is refused as its clients read it: a status of gRPC in fields, HTTP status 200 and no body, and how long to
// wait.
func TestAgRPCCallIsRefusedInItsOwnTerms(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ block, status, message, wait string }{
		{"tier ip 1/m", "8", `rate limit "ip" reached, retry in 60 s`, "60"},
		{"tier ip 1/m\nbody grpc", "8", `rate limit "ip" reached, retry in 60 s`, "60"},
		{"tier ip 1/m\nstore away", "14", "service unavailable, retry in 3 s", "3"},
	} {
		for _, contentType := range []string{
			"application/grpc", "application/grpc+proto", "application/grpc+json", "application/grpc;charset=utf-8", "Application/gRPC",
		} {
			e := newEdge(t, ":8080 {\ntiered_limit grpc-refusal {\ntrusted_hops 0\n"+c.block+"\n}\nheader Content-Length 7\nrespond ok\n}")
			e.send(request{})
			w := e.send(grpcCall(contentType))
			assert.Equal(t, 200, w.Code, contentType)
			assert.Empty(t, w.Body.String())
			for field, want := range map[string]string{
				"Content-Type": "application/grpc", "Grpc-Status": c.status, "Grpc-Message": c.message, "Retry-After": c.wait,
				"Grpc-Retry-Pushback-Ms": c.wait + "000", "Cache-Control": "no-store", "Content-Length": "",
			} {
				assert.Equal(t, want, w.Header().Get(field), field)
			}
			if c.status == "8" {
				assert.Equal(t, "ip", w.Header().Get("X-RateLimit-Resource"))
				assert.Equal(t, 1.0, e.metric(`requests_total{outcome="refused",stack="grpc-refusal"}`))
			}
			e.close()
		}
	}
}

// What is no gRPC call, what states another body, and what the site's own error routes take is answered as ever.
func TestWhatIsNotRefusedAsGRPC(t *testing.T) {
	t.Parallel()
	with := func(edit func(*http.Request)) request {
		q := grpcCall("application/grpc")
		first := q.edit
		q.edit = func(r *http.Request) { first(r); edit(r) }
		return q
	}
	for name, c := range map[string]struct {
		q             request
		block, routes string
		want          string
	}{
		"grpc-web":         {q: grpcCall("application/grpc-web"), want: "application/problem+json"},
		"grpc-web-text":    {q: grpcCall("application/grpc-web-text+proto"), block: "body grpc", want: "application/problem+json"},
		"a longer word":    {q: grpcCall("application/grpcx"), want: "application/problem+json"},
		"JSON":             {q: grpcCall("application/json"), block: "body grpc", want: "application/problem+json"},
		"no type":          {q: with(func(r *http.Request) { r.Header.Del("Content-Type") }), want: "application/problem+json"},
		"two types":        {q: with(func(r *http.Request) { r.Header.Add("Content-Type", "text/plain") }), want: "application/problem+json"},
		"HTTP/1":           {q: with(func(r *http.Request) { r.ProtoMajor = 1 }), want: "application/problem+json"},
		"GET":              {q: with(func(r *http.Request) { r.Method = "GET" }), want: "application/problem+json"},
		"another body":     {q: grpcCall("application/grpc"), block: "body text", want: "text/plain; charset=utf-8"},
		"a stated problem": {q: grpcCall("application/grpc"), block: "body problem", want: "application/problem+json"},
		"error routes": {
			q: grpcCall("application/grpc"), routes: "handle_errors 429 {\nheader Content-Type text/html\nrespond mine\n}", want: "text/html",
		},
	} {
		e := newEdge(t, ":8080 {\ntiered_limit grpc-not {\ntrusted_hops 0\ntier ip 1/m\n"+c.block+"\n}\nrespond ok\n"+c.routes+"\n}")
		e.send(request{})
		w := e.send(c.q)
		assert.Equal(t, 429, w.Code, name)
		assert.Equal(t, c.want, w.Header().Get("Content-Type"), name)
		assert.Empty(t, w.Header().Get("Grpc-Status"), name)
		e.close()
	}
}
