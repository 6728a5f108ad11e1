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
	//go:embed take.lua
	takeText string

	//go:embed reset.lua
	resetText string

	takeScript  = newScript(takeText)
	resetScript = newScript(resetText)
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
	modeTake = "T"
	modePeek = "P"
)

// tierSpecText describes a tier to the take script.
func tierSpecText(tier store.TierSpec) string {
	letter := byte('s')
	switch {
	case tier.DryRun && tier.Charge == store.ChargeChecked:
		letter = 'e'
	case tier.DryRun:
		letter = 'd'
	case tier.Charge == store.ChargeChecked:
		letter = 'c'
	}
	var spec []byte
	for i, limit := range tier.Limits {
		if i == 0 {
			spec = append(spec, letter-'a'+'A')
		} else {
			spec = append(spec, letter)
		}
		spec = appendNumber(spec, limit.Count)
		spec = appendNumber(spec, limit.Window.Milliseconds())
	}
	return string(spec)
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
	if len(text) != 8*(1+limits) && len(text) != 8*(3+2*limits) {
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
				exceeded = exceeded || r.within(1+n, -mostNumber, -1)
			}
			n++
		}
		if ok && r.refusedBy() == i {
			ok = exceeded && !tier.dry
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

// state is what a reply says of one limit.
func (r reply) state(n int, window time.Duration) store.State {
	s := store.State{Used: r.number(1 + n)}
	if s.Used < 0 {
		s.Used, s.Exceeded = -s.Used, true
	}
	if r.short() {
		s.Left = left(r.now(), window)
	} else {
		s.Left = time.Duration(r.number(3+r.limits+n)) * time.Millisecond
	}
	return s
}

// left is the time from now, in milliseconds, until an aligned window ends.
func left(now int64, window time.Duration) time.Duration {
	length := window.Milliseconds()
	return time.Duration(length-now%length) * time.Millisecond
}
