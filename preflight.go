package tieredlimit

import (
	"net/http"
	"slices"
	"strings"
)

// isPreflight reports whether a request is a CORS preflight as browsers send it (Fetch standard, CORS-preflight fetch):
// OPTIONS with Origin and Access-Control-Request-Method, without a body, and without any field that neither browsers nor
// the proxies in between add to a preflight: credentials under whatever name, another method, another target.
func isPreflight(r *http.Request) bool {
	if r.Method != http.MethodOptions {
		return false
	}
	for _, field := range originFields {
		if !hasField(r, field) {
			return false
		}
	}
	for name := range r.Header {
		if !isPreflightField(name) {
			return false
		}
	}
	return !overridesMethod(r) && !hasBody(r) // last, since it may wait
}

// originFields are the header fields that every preflight has, by their canonical names.
var originFields = [...]string{"Origin", "Access-Control-Request-Method"}

// hasField reports whether a field is there once, with a value.
func hasField(r *http.Request, canonical string) bool {
	values := r.Header[canonical]
	return len(values) == 1 && strings.Trim(values[0], " \t") != ""
}

// isPreflightField reports whether a header field, by its canonical name, may be on a preflight that a browser has sent.
func isPreflightField(name string) bool {
	if preflightFields[name] {
		return true
	}
	for _, prefix := range preflightPrefixes {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// isMoreThanPreflight reports whether a header field, by its name in any case, makes a request more than a preflight.
func isMoreThanPreflight(name string) bool { return !isPreflightField(http.CanonicalHeaderKey(name)) }

// preflightFields are what browsers put on a preflight, and what proxies add to any request.
var preflightFields = func() map[string]bool {
	fields := make(map[string]bool)
	for _, list := range []string{
		// browsers
		"Accept Accept-Encoding Accept-Language Access-Control-Request-Headers Access-Control-Request-Local-Network " +
			"Access-Control-Request-Method Access-Control-Request-Private-Network Alt-Used Cache-Control Connection " +
			"Content-Length Dnt Host Keep-Alive Origin Pragma Priority Referer Save-Data Te User-Agent",
		// proxies
		"Forwarded Via X-Forwarded-By X-Forwarded-For X-Forwarded-Host X-Forwarded-Port X-Forwarded-Proto " +
			"X-Forwarded-Scheme X-Forwarded-Server X-Forwarded-Ssl X-Original-Forwarded-For X-Real-Ip X-Client-Ip " +
			"X-Cluster-Client-Ip True-Client-Ip X-Scheme X-Request-Id X-Correlation-Id X-Request-Start X-Queue-Start Early-Data",
		// tracing
		"Traceparent Tracestate Baggage B3 X-Cloud-Trace-Context X-Trace-Id Uber-Trace-Id",
		// networks that deliver
		"Cdn-Loop Cf-Ray Cf-Visitor Cf-Worker Cf-Ew-Via Cf-Request-Id Cf-Pseudo-Ipv4 Cf-Region Cf-Region-Code Cf-Timezone " +
			"Cf-Metro-Code Cf-Postal-Code Cf-Device-Type X-Varnish Rndr-Id X-Country-Code X-Geo-Country",
	} {
		for _, name := range strings.Fields(list) {
			fields[name] = true
		}
	}
	return fields
}()

// preflightPrefixes begin the names of whole families of such fields.
var preflightPrefixes = []string{
	"Sec-", "Cf-Connecting-", "Cf-Ip", "Cloudfront-", "X-Amz-Cf-", "X-Amzn-", "X-Azure-", "X-Fd-", "Fly-", "X-B3-",
	"X-Envoy-", "X-Datadog-", "X-Vercel-", "X-Nf-", "X-Akamai-", "Akamai-", "X-Appengine-", "X-Railway-",
}

// methodFields are header fields out of which frameworks take the method of a request, by their canonical names.
var methodFields = [...]string{"X-Http-Method-Override", "X-Http-Method", "X-Method-Override", "X-Http-Verb"}

// decidingFields are the header fields whose values decide, beside those of keys, matchers and forwarding chains.
func decidingFields() []string {
	return slices.Concat(originFields[:], methodFields[:], pathFields[:])
}

// overridesMethod reports whether a request has a field or a parameter out of which frameworks take its method.
func overridesMethod(r *http.Request) bool {
	for _, field := range methodFields {
		if _, there := r.Header[field]; there {
			return true
		}
	}
	return namesMethod(r.URL.RawQuery)
}

// namesMethod reports whether a query has a parameter out of which frameworks take the method of a request.
func namesMethod(query string) bool {
	for query != "" {
		var pair string
		if end := strings.IndexAny(query, "&;"); end >= 0 {
			pair, query = query[:end], query[end+1:]
		} else {
			pair, query = query, ""
		}
		key, _, _ := strings.Cut(pair, "=")
		if len(key) < len("_method") {
			continue
		}
		for _, name := range [...]string{"_method", "_httpmethod", "$httpmethod", "x-http-method-override", "x-http-method",
			"x-method-override", "x-http-verb", "http_method"} {
			if couldBeName(key, name, true) {
				return true
			}
		}
	}
	return false
}
