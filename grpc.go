package tieredlimit

import (
	"net/http"
	"strings"
)

// Status codes of gRPC that stand for 429 and 503 (https://grpc.github.io/grpc/core/md_doc_statuscodes.html).
const (
	grpcResourceExhausted = "8"
	grpcUnavailable       = "14"
)

// typeGRPC is the media type of calls and their answers. The name of a message format may stand behind a plus sign.
const typeGRPC = "application/grpc"

// speaksGRPC reports whether a refusal is to be written as gRPC clients read it: where nothing else is asked for, or grpc
// is, and the request is a call.
func (a *answer) speaksGRPC(r *http.Request) bool {
	return (a.body == bodyGRPC || a.body == bodyChosen) && isGRPC(r)
}

// isGRPC reports whether a request is a gRPC call: a POST over HTTP/2 or later whose content type is gRPC's (gRPC over
// HTTP2, "Requests"). What browsers send as grpc-web is none: its clients read the HTTP status.
func isGRPC(r *http.Request) bool {
	values := r.Header["Content-Type"]
	if r.ProtoMajor < 2 || r.Method != http.MethodPost || len(values) != 1 || len(values[0]) < len(typeGRPC) {
		return false
	}
	head, rest := values[0][:len(typeGRPC)], values[0][len(typeGRPC):]
	return strings.EqualFold(head, typeGRPC) && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// writeGRPC answers a call with a status and nothing else, "Trailers-Only": HTTP status 200, without a body, and the
// outcome in fields. Clients whose service config lets them retry wait for as long as the pushback says (gRPC retry
// design, "Pushback"), which is what Retry-After says. The message is printable ASCII without a percent sign, so it needs
// no encoding.
func writeGRPC(w http.ResponseWriter, status string, message []byte) error {
	header := w.Header()
	delete(header, "Content-Length")
	delete(header, "Content-Encoding")
	header["Content-Type"] = []string{typeGRPC}
	header["Grpc-Status"] = []string{status}
	header["Grpc-Message"] = []string{string(message)}
	header["Grpc-Retry-Pushback-Ms"] = []string{header[fieldRetry][0] + "000"}
	w.WriteHeader(http.StatusOK)
	return nil
}
