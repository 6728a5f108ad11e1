package replay

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// stackTally is what is counted of a stack.
type stackTally struct {
	outcomes  [outcomes]int64
	fallbacks map[string]int64
	untrusted map[string]int64 // requests with a chain, by peers that the config does not trust; at most maxPeers
	tiers     []*tierTally
	times     *timeline
}

// tierTally is what is counted of a tier.
type tierTally struct {
	info     TierInfo
	showKeys bool
	requests int64 // that concerned the tier, whether or not an earlier one refused them
	refused  int64
	dry      int64 // that would have been refused
	hidden   int64 // that could not be judged, since the log has the key redacted
	exceeded []int64
	clients  *census
	worst    *worst
	times    *timeline
}

func newStackTally(info StackInfo) *stackTally {
	t := &stackTally{fallbacks: make(map[string]int64), untrusted: make(map[string]int64), times: newTimeline()}
	for _, tier := range info.Tiers {
		t.tiers = append(t.tiers, &tierTally{
			info: tier, showKeys: info.LogKeys, exceeded: make([]int64, len(tier.Limits)), clients: newCensus(tier.Limits),
			worst: newWorst(maxWorst), times: newTimeline(),
		})
	}
	return t
}

// add counts a verdict.
func (t *stackTally) add(w *walk, s *stage) {
	v := &w.verdict
	at := w.trip.at
	t.outcomes[v.Outcome]++
	if v.Fallback != "" {
		t.fallbacks[v.Fallback]++
	}
	if v.Fallback == clientip.UntrustedPeer.String() {
		t.distrust(host(w.trip.batch.get(w.trip.entry.peer)))
	}
	refused := v.Outcome == Refused || v.Outcome == DryRefused
	t.times.add(at, refused)
	for _, i := range v.Hidden {
		t.tiers[i].hidden++
	}
	for i := range v.Claims {
		c := &v.Claims[i]
		tier := t.tiers[c.Tier]
		tier.requests++
		hit := c.Exceeded != 0 && (v.RefusedBy < 0 || i <= v.RefusedBy)
		tier.times.add(at, hit)
		client := tier.clients.add(c.Identity, at, hit)
		if !hit {
			continue
		}
		if i == v.RefusedBy && v.Outcome == Refused {
			tier.refused++
		} else {
			tier.dry++
		}
		for j := range tier.exceeded {
			if c.Exceeded&(1<<j) != 0 {
				tier.exceeded[j]++
			}
		}
		tier.worst.add(client, func() string { return tier.name(s, v, c) })
	}
}

// distrust counts a request with a chain of a peer that is not trusted.
func (t *stackTally) distrust(peer string) {
	if _, known := t.untrusted[peer]; known || len(t.untrusted) < maxPeers {
		t.untrusted[strings.Clone(peer)]++
	}
}

// judged is how many requests the stack has decided.
func (t *stackTally) judged() int64 {
	return t.outcomes[Served] + t.outcomes[Refused] + t.outcomes[DryRefused]
}

// misplaced reports whether so many requests have a chain and a peer that is not trusted that this peer is more likely a
// proxy, which the config does not know, than a caller who makes chains up.
func (t *stackTally) misplaced() bool {
	n := t.fallbacks[clientip.UntrustedPeer.String()]
	return n >= leastRequests && n*20 >= t.judged()
}

// name tells people who a tier has counted: an address or a user, else a fingerprint unless keys may be shown.
func (t *tierTally) name(s *stage, v *Verdict, c *Claim) string {
	switch {
	case t.info.Single:
		return "everybody"
	case t.info.Client || t.info.User || t.showKeys:
		return shorten(strings.Join(s.KeyText(c.Tier), " "))
	}
	sum := sha256.Sum256(c.Identity)
	return "key " + hex.EncodeToString(sum[:6])
}

// shorten keeps a name to a length that fits a table.
func shorten(s string) string {
	const most = 60
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}

// windowOf is the number of the window that holds a time.
func windowOf(at int64, window time.Duration) int64 {
	ms, length := at/1e6, window.Milliseconds()
	return ms / length
}
