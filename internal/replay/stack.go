package replay

import (
	"net/http"
	"net/netip"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Stack is one compiled handler, which judges requests without serving them. It serves one goroutine.
type Stack interface {
	// Info describes the stack.
	Info() StackInfo

	// Judge decides a request, charging what a server would charge. What it fills into v is valid until the next call.
	// An error comes from a matcher that cannot tell.
	Judge(q *Query, v *Verdict) error

	// KeyText is the parts of the key under which a tier has counted the request of the last call to Judge.
	KeyText(tier int) []string

	// Skipped is for how many requests a tier was skipped, because every key was empty.
	Skipped(tier int) int64

	// Close gives back what the handler holds.
	Close() error
}

// StackInfo describes a stack.
type StackInfo struct {
	Label   string // as logs and metrics name it
	Mode    Mode
	DryRun  bool
	LogKeys bool
	Hops    int // the hops stated; -1: not stated
	Header  string
	Trusted bool // the server states trusted proxies
	Tiers   []TierInfo

	// Headers are the canonical names of the fields that the client address is read from: Header, and then those of the
	// server.
	Headers []string

	// Fields are the canonical names of further fields whose values the decision looks at, whatever the config says.
	Fields []string

	// Telling reports whether a header field makes an OPTIONS request more than a preflight, whatever its value is.
	Telling func(name string) bool
}

// clientHeaders are those of the Headers in which a client can be.
func (i *StackInfo) clientHeaders() []string {
	switch {
	case i.Hops > 0:
		return []string{i.Header}
	case i.Hops < 0 && i.Trusted && len(i.Headers) > 1:
		return i.Headers[1:]
	}
	return nil
}

// Mode says whether a stack limits at all.
type Mode uint8

const (
	Limiting Mode = iota
	Off           // every tier is switched off
	Inert         // the client address is needed and the topology is not stated
)

// TierInfo describes a tier.
type TierInfo struct {
	Name     string
	Limits   []LimitInfo
	Charge   string
	DryRun   bool
	Single   bool // one bucket for everybody
	Client   bool // the key is the client address and nothing else
	User     bool // the key is the authenticated user and nothing else
	Matchers caddyhttp.MatcherSets

	// Placeholders are the names of those in the keys.
	Placeholders []string
}

// LimitInfo is one limit of a tier.
type LimitInfo struct {
	Count  int64
	Window time.Duration
}

// Query is a request to be judged at a time.
type Query struct {
	Request  *http.Request
	Replacer *caddy.Replacer
	Now      time.Time

	// Fresh tells that the replacer is for this request alone, so that a stack may add to it.
	Fresh bool

	// Hidden tells whether the value of a header field is not known, since the log has it redacted. Tiers whose keys
	// need it are left out.
	Hidden func(name string) bool

	// Met is for the stacks: what the one that the request met before has left. It is nil for the first.
	Met any
}

// Outcome is what became of a request at a stack.
type Outcome uint8

const (
	Served Outcome = iota
	Refused
	DryRefused
	Exempt
	Preflight
	InertServed
	OffServed
	Failed // a matcher or the store could not tell
	outcomes
)

var outcomeNames = [outcomes]string{"served", "refused", "dry_refused", "exempt", "preflight", "inert", "off", "error"}

// String is the outcome as metrics name it.
func (o Outcome) String() string { return outcomeNames[o] }

// Verdict is what a stack has decided.
type Verdict struct {
	Outcome   Outcome
	RefusedBy int // index of the claim that was refused, or -1; also in a dry run
	Claims    []Claim
	Hidden    []int // tiers that were left out
	Fallback  string
	Client    netip.Addr
}

// Claim is a tier that concerned the request.
type Claim struct {
	Tier     int
	Identity []byte
	Exceeded uint64 // limits of the tier that did not admit the request, as a set of indexes
}
