package redis

import (
	"context"
	"crypto/sha1" //nolint:gosec // the name that the server gives to a script
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"time"

	"github.com/redis/rueidis"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// script is a script that the server runs atomically.
type script struct {
	text   string
	digest string
}

var (
	//go:embed known.lua
	knownText string // how a decision begins

	//go:embed window.lua
	windowText string // what the windows of counters are

	//go:embed take.lua
	takeText string

	//go:embed settle.lua
	settleText string // how a correction begins

	//go:embed correct.lua
	correctText string

	//go:embed reset.lua
	resetText string

	takeScript   = newScript(knownText + windowText + takeText)
	settleScript = newScript(settleText + windowText + correctText)
	resetScript  = newScript(resetText)
)

func newScript(text string) script {
	sum := sha1.Sum([]byte(text)) //nolint:gosec // see the import
	return script{text: text, digest: hex.EncodeToString(sum[:])}
}

// run runs the script, and sends its text only to a server that does not have it. It tries nothing again that may have
// run.
func (s script) run(ctx context.Context, client rueidis.Client, keys []string, arg string) rueidis.RedisResult {
	n := int64(len(keys))
	result := client.Do(ctx, client.B().Evalsha().Sha1(s.digest).Numkeys(n).Key(keys...).Arg(arg).Build())
	if failure, ok := rueidis.IsRedisErr(result.Error()); ok && failure.IsNoScript() {
		result = client.Do(ctx, client.B().Eval().Script(s.text).Numkeys(n).Key(keys...).Arg(arg).Build())
	}
	return result
}

// Modes of the take script.
const (
	modeTake    = "T"
	modeRefused = "R" // take, but a tier refuses whatever its counters say
	modePeek    = "P"
)

// Places of a limit.
const (
	placeFurther byte = iota // one more limit of the same claim
	placeClaim               // the first one of a further claim of the same tier
	placeTier                // the first one of a tier
)

// appendSpec describes what is claimed of a tier to the take script.
func (t *counterTier) appendSpec(spec []byte, claim *store.Claim, place byte) []byte {
	letter := t.letter
	if claim.Refused {
		letter -= 'a' - 'A'
	}
	for i, limit := range t.limits {
		spec = append(spec, letter, place)
		spec = appendNumber(spec, claim.Count(i, limit.count))
		spec = appendNumber(spec, limit.window.Milliseconds())
		spec = appendNumber(spec, claim.Hits)
		place = placeFurther
	}
	return spec
}

// letterOf says how a tier is charged, and whether it is a dry one.
func letterOf(tier store.TierSpec) byte {
	switch {
	case tier.DryRun && tier.Charge == store.ChargeChecked:
		return 'e'
	case tier.DryRun:
		return 'd'
	case tier.Charge == store.ChargeChecked:
		return 'c'
	}
	return 's'
}

// appendNumber packs a number as scripts do.
func appendNumber(to []byte, n int64) []byte {
	return binary.BigEndian.AppendUint64(to, math.Float64bits(float64(n)))
}

// reply is what the take script returns: packed numbers.
type reply struct {
	text   string
	limits int
}

// parseReply checks the form of a reply about so many limits.
func parseReply(result rueidis.RedisResult, limits int) (reply, error) {
	text, err := result.ToString()
	if err != nil {
		return reply{}, err
	}
	if len(text) != 8*(1+limits) && len(text) != 8*(3+3*limits) {
		return reply{}, fmt.Errorf("the script returned %d bytes for %d limits", len(text), limits)
	}
	return reply{text: text, limits: limits}, nil
}

// number is the nth number.
func (r reply) number(n int) int64 { return int64(r.float(n)) }

// float is the nth number as the script has packed it.
func (r reply) float(n int) float64 {
	var word [8]byte
	copy(word[:], r.text[8*n:])
	return math.Float64frombits(binary.BigEndian.Uint64(word[:]))
}

// mostNumber is where numbers of the script's end.
const mostNumber = 1 << 53

// within tells whether the nth number is one from least to most.
func (r reply) within(n int, least, most float64) bool {
	f := r.float(n)
	return f >= least && f <= most // NaN is not
}

// check refuses what the script cannot have said of claims: what is at the address need not be what it should be.
func (r reply) check(tiers []counterTier, claims []store.Claim) error {
	ok := r.within(0, 1, mostNumber)
	if !r.short() {
		ok = ok && r.within(1+r.limits, -1, float64(len(claims)-1)) && r.within(2+r.limits, 0, mostNumber)
	}
	n := 0
	for i := range claims {
		tier := &tiers[claims[i].Tier]
		exceeded := false
		for j := range tier.limits {
			if r.short() {
				ok = ok && r.within(1+n, 1, mostNumber)
			} else {
				ok = ok && r.within(1+n, -mostNumber, mostNumber)
				ok = ok && r.within(3+r.limits+n, 1, float64(tier.limits[j].window.Milliseconds()))
				ok = ok && r.within(3+2*r.limits+n, 0, mostNumber)
				exceeded = exceeded || r.within(1+n, -mostNumber, -1)
			}
			n++
		}
		if ok && r.refusedBy() == i {
			ok = (exceeded || claims[i].Refused) && !tier.dry
		}
	}
	if !ok {
		return fmt.Errorf("the script returned what cannot be for %d limits", r.limits)
	}
	return nil
}

// now is the time of the decision in milliseconds.
func (r reply) now() int64 { return r.number(0) }

// short tells that every limit admits the hit, in an aligned window, and that there was no reset.
func (r reply) short() bool { return len(r.text) == 8*(1+r.limits) }

// refusedBy is the claim that was refused, or -1.
func (r reply) refusedBy() int {
	if r.short() {
		return -1
	}
	return int(r.number(1 + r.limits))
}

// generation is the stack's reset generation, or 0.
func (r reply) generation() int64 {
	if r.short() {
		return 0
	}
	return r.number(2 + r.limits)
}

// state is what a reply says of the nth limit, but for when hits could pass.
func (r reply) state(n int, window time.Duration) store.State {
	s := store.State{Used: r.number(1 + n)}
	if s.Used < 0 {
		s.Used, s.Exceeded = -1-s.Used, true
	}
	if r.short() {
		s.ResetAfter, s.Window = left(r.now(), window), numberOf(r.now(), window)
	} else {
		s.ResetAfter = time.Duration(r.number(3+r.limits+n)) * time.Millisecond
		s.Window = r.number(3 + 2*r.limits + n)
	}
	return s
}

// left is the time from now, in milliseconds, until an aligned window ends.
func left(now int64, window time.Duration) time.Duration {
	length := window.Milliseconds()
	return time.Duration(length-now%length) * time.Millisecond
}

// numberOf is the number of the aligned window that holds now, in milliseconds.
func numberOf(now int64, window time.Duration) int64 { return now / window.Milliseconds() }
