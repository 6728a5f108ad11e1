package tieredlimit

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Share is how much of a tier's counts some requests may use, so that the rest stays for others.
type Share struct {
	// How much of each count the requests may use, in percent, 1 to 100. It is rounded down, but at least 1 request.
	Percent int `json:"percent"`

	// The requests that may use no more. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`
}

// quota is how much of a tier's limits a request may use: the whole, or a share.
type quota struct {
	percent  int
	counts   []int64 // of the limits
	texts    []string
	policies string // the items of RateLimit-Policy
}

// share is a compiled [Share].
type share struct {
	quota
	match tierMatch
}

// compileQuota makes the quota of so many percent of the tier's counts.
func (t *tier) compileQuota(percent int) quota {
	q := quota{percent: percent}
	for _, l := range t.spec.Limits {
		count := max(1, l.Count*int64(percent)/100)
		q.counts = append(q.counts, count)
		q.texts = append(q.texts, strconv.FormatInt(count, 10))
	}
	q.policies = policyItems(t, q.counts)
	return q
}

// compileShares makes the quotas of a tier.
func (t *tier) compileShares(ctx caddy.Context, spec *Tier) error {
	t.whole = t.compileQuota(100)
	for _, s := range spec.Shares {
		match, err := compileMatch(ctx, s, s.MatcherSetsRaw, spec.MatchMode)
		if err != nil {
			return fmt.Errorf("share: %w", err)
		}
		t.shares = append(t.shares, share{quota: t.compileQuota(s.Percent), match: match})
	}
	return nil
}

// lower finds the first share of a tier that a request is in, and lowers what its claim may find used to that. The error is
// a matcher's.
func (rec *record) lower(t *tier, claim *Claim) error {
	for i := range t.shares {
		s := &t.shares[i]
		mine, err := s.match.concerns(rec.r)
		if err != nil {
			return err
		}
		if !mine {
			continue
		}
		claim.Counts = s.counts
		if rec.shares == nil {
			rec.shares = new([maxTiers]*quota)
		}
		rec.shares[t.index] = &s.quota
		return nil
	}
	return nil
}

// quotaOf is how much of a tier's limits the request may use.
func (rec *record) quotaOf(t *tier) *quota {
	if rec.shares != nil && rec.shares[t.index] != nil {
		return rec.shares[t.index]
	}
	return &t.whole
}

// checkShares refuses shares that are none.
func (t *Tier) checkShares() error {
	for i, s := range t.Shares {
		switch {
		case s == nil:
			return fmt.Errorf("share %d is null", i+1)
		case s.Percent < 1 || s.Percent > 100:
			return fmt.Errorf("share %d%% is not between 1%% and 100%%", s.Percent)
		}
		if err := checkPaths(rawSets(s.MatcherSetsRaw)); err != nil {
			return fmt.Errorf("share %d%%: %w", s.Percent, err)
		}
	}
	return nil
}

// parsePercent reads a share, with or without its sign.
func parsePercent(s string) (int, error) {
	digits := strings.TrimSuffix(s, "%")
	n, err := strconv.Atoi(digits)
	if err != nil || !digitsOnly(digits) || n < 1 || n > 100 {
		return 0, fmt.Errorf("share %q is not a whole number of percent from 1%% to 100%%", s)
	}
	return n, nil
}
