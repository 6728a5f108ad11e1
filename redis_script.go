package tieredlimit

import (
	"context"
	"crypto/sha1" //nolint:gosec // the name that the server gives to a script
	_ "embed"
	"encoding/hex"
	"fmt"

	"github.com/redis/rueidis"
)

// redisScript is a script that the server runs atomically.
type redisScript struct {
	text   string
	digest string
}

var (
	//go:embed take.lua
	redisTakeText string

	//go:embed reset.lua
	redisResetText string

	redisTake  = newRedisScript(redisTakeText)
	redisReset = newRedisScript(redisResetText)
)

func newRedisScript(text string) redisScript {
	sum := sha1.Sum([]byte(text)) //nolint:gosec // see the import
	return redisScript{text: text, digest: hex.EncodeToString(sum[:])}
}

// run runs the script, and sends its text only to a server that does not have it. It tries nothing again that may have
// run.
func (s redisScript) run(ctx context.Context, client rueidis.Client, keys, args []string) rueidis.RedisResult {
	n := int64(len(keys))
	result := client.Do(ctx, client.B().Evalsha().Sha1(s.digest).Numkeys(n).Key(keys...).Arg(args...).Build())
	if failure, ok := rueidis.IsRedisErr(result.Error()); ok && failure.IsNoScript() {
		result = client.Do(ctx, client.B().Eval().Script(s.text).Numkeys(n).Key(keys...).Arg(args...).Build())
	}
	return result
}

// Modes and letters of the take script.
const (
	redisModeTake = "T"
	redisModePeek = "P"
)

// redisLetters describes the limits of a tier to the script.
func redisLetters(tier TierSpec) string {
	letter := byte('s')
	switch {
	case tier.DryRun && tier.Charge == ChargeChecked:
		letter = 'e'
	case tier.DryRun:
		letter = 'd'
	case tier.Charge == ChargeChecked:
		letter = 'c'
	}
	letters := make([]byte, len(tier.Limits))
	for i := range letters {
		letters[i] = letter
	}
	letters[0] -= 'a' - 'A'
	return string(letters)
}

// redisReply is what the take script returns.
type redisReply struct {
	generation int64
	now        int64 // milliseconds
	refusedBy  int
	limits     []rueidis.RedisMessage // two for each limit
}

// parseRedisReply checks the form of a reply about so many limits.
func parseRedisReply(result rueidis.RedisResult, limits int) (reply redisReply, err error) {
	values, err := result.ToArray()
	if err != nil {
		return reply, err
	}
	if len(values) != 3+2*limits {
		return reply, fmt.Errorf("the script returned %d values for %d limits", len(values), limits)
	}
	var refusedBy int64
	for i, into := range []*int64{&reply.generation, &reply.now, &refusedBy} {
		if *into, err = values[i].AsInt64(); err != nil {
			return reply, err
		}
	}
	reply.refusedBy = int(refusedBy)
	reply.limits = values[3:]
	return reply, nil
}
