package tieredlimit

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"hash/maphash"
	"math"
	"net/netip"
	"strings"
)

// clientPlace says where in an identity the client's address is.
type clientPlace struct {
	part   int
	before string // literal text in front of it
	after  string // and behind it
	first  bool   // nothing but literal text stands in front of it in its part
	last   bool   // or behind it
}

// placeOfClient finds the client's address in a key. It reports false if that cannot be told from other values beside it.
func (k *key) placeOfClient() (clientPlace, bool) {
	for i, part := range k.parts {
		for j, s := range part {
			if s.kind != segmentClient {
				continue
			}
			p := clientPlace{part: i, first: true, last: true}
			if j > 0 && part[j-1].kind == segmentLiteral {
				p.before, p.first = part[j-1].text, j == 1
			} else {
				p.first = j == 0
			}
			if n := len(part) - 1; j < n && part[j+1].kind == segmentLiteral {
				p.after, p.last = part[j+1].text, j+1 == n
			} else {
				p.last = j == n
			}
			return p, p.first && p.last || p.first && separates(p.after) || p.last && separates(p.before)
		}
	}
	return clientPlace{}, false
}

// separates reports whether a text cannot be a stretch of what a client is counted as.
func separates(text string) bool {
	return strings.ContainsFunc(text, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < '0' || c > '9') && !strings.ContainsRune(".:_@", c)
	})
}

// find returns the client's address in an identity of the key.
func (p *clientPlace) find(identity []byte, header int) (netip.Addr, bool) {
	rest := identity[header:]
	for range p.part {
		rest = rest[partLength(rest):]
	}
	if binary.BigEndian.Uint32(rest) > maxPart {
		return netip.Addr{}, false
	}
	text := rest[4:partLength(rest)]
	if p.first {
		text = text[len(p.before):]
	}
	if p.last {
		text = text[:len(text)-len(p.after)]
	}
	if !p.first {
		text = text[bytes.LastIndex(text, []byte(p.before))+len(p.before):]
	}
	if !p.last {
		text = text[:bytes.Index(text, []byte(p.after))]
	}
	addr, err := netip.ParseAddr(string(text))
	return addr, err == nil
}

// partLength is how many bytes the first part of an identity's rest takes. Of a long part only the digest is there.
func partLength(rest []byte) int {
	n := int(binary.BigEndian.Uint32(rest))
	if n > maxPart {
		n = sha256.Size
	}
	return 4 + n
}

// groupSeed makes groups unpredictable, so that nobody can pick identities that share somebody's group.
var groupSeed = maphash.MakeSeed()

// group is the coarser identity that counts where a store has no room: the /16 of an IPv4 address, else a hash of the
// /32 of an IPv6 address or of the identity. Requests whose chain was of no use are no part of the peer's network, and
// those whose key is uncertain of none.
func (t *tier) group(identity []byte) uint64 {
	header := len(t.keys[0].digest) + 1
	if ordinal := int(identity[header-1]); ordinal < len(t.keys) {
		if k := &t.keys[ordinal]; k.grouped {
			if addr, ok := k.client.find(identity, header); ok {
				if addr.Is4() {
					b := addr.As4()
					return uint64(b[0])<<8 | uint64(b[1])
				}
				b := addr.As16()
				identity = b[:4]
			}
		}
	}
	return maphash.Bytes(groupSeed, identity) | (math.MaxUint16 + 1)
}
