package redis

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"strconv"
	"sync"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// keyspace names the counters on the server:
//
//	<prefix>:{<stack>}:<tier>:<window in ms>:<fingerprint>
//
// The stack in braces is the hash tag, so that one decision is one slot of a cluster. The fingerprint is the first half
// of the SHA-256 of the identity in hexadecimal, or of its HMAC-SHA-256 (RFC 2104) if there is a secret.
//
// Beside the counters there is <prefix>:{<stack>}:reset, the stack's reset generation, for a minute after a reset, and
// <prefix>:{<stack>}:probe, the counter of the probes that find out whether the server is back, for two seconds after
// one. No counter of a tier is called so: those have two more parts.
type keyspace struct {
	prefix string
	hashes *sync.Pool
}

// fingerprint is the length of a fingerprint in bytes.
const fingerprint = 16

func newKeyspace(prefix, secret string) keyspace {
	newHash := func() any { return sha256.New() }
	if secret != "" {
		newHash = func() any { return hmac.New(sha256.New, []byte(secret)) }
	}
	return keyspace{prefix: prefix, hashes: &sync.Pool{New: newHash}}
}

// stack begins every key of a stack.
func (k keyspace) stack(name string) string {
	return k.prefix + ":{" + name + "}:"
}

// infix is what stands between the stack and the fingerprint.
func infix(tier string, limit store.Limit) string {
	return tier + ":" + strconv.FormatInt(limit.Window.Milliseconds(), 10) + ":"
}

// appendFingerprint appends the fingerprint of an identity.
func (k keyspace) appendFingerprint(to, identity []byte) []byte {
	h := k.hashes.Get().(hash.Hash)
	h.Reset()
	h.Write(identity)
	var sum [sha256.Size]byte
	to = hex.AppendEncode(to, h.Sum(sum[:0])[:fingerprint])
	k.hashes.Put(h)
	return to
}
