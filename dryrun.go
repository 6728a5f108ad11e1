package tieredlimit

import "net/http"

// fieldDryRun is the canonical name of the response header field that tells of a refusal that was not made.
const fieldDryRun = "X-Ratelimit-Dry-Run"

// dryRunRefused is its value.
const dryRunRefused = "refused"

// tellsDryRun tells whether the response is to say that the request would have been refused: the dry stack or one of
// the dry tiers that would have refused it asks for that.
func (rec *record) tellsDryRun() bool {
	return rec.dryHeader || rec.h.DryRunHeader && rec.verdict.refused
}

// dryRunAnswer has the one field that tells of a refusal that was not made.
var dryRunAnswer = &answer{names: []string{fieldDryRun}, exposeServed: []string{"X-RateLimit-Dry-Run"}}

// newDryRunWriter wraps a response so that it gets the field, in the place of one that an upstream may send.
func newDryRunWriter(w http.ResponseWriter, r *http.Request) *fieldWriter {
	f := &fieldWriter{answer: dryRunAnswer}
	f.values[0] = dryRunRefused
	if _, cross := r.Header["Origin"]; cross {
		f.more = &moreFields{expose: dryRunAnswer.exposeServed}
	}
	f.ResponseWriter = w
	f.set(w.Header())
	return f
}
