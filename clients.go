package tieredlimit

import (
	"fmt"
	"net/http"
	"net/netip"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// privateRanges stands for all private and loopback ranges in a list of clients, as in Caddy's own options.
const privateRanges = "private_ranges"

// tierClients say whom a tier concerns, by the client's address whole and not masked.
type tierClients struct {
	in  []netip.Prefix // empty: everybody
	out []netip.Prefix // but these
}

func compileClients(t *Tier, n clientip.NAT64) (c tierClients, err error) {
	if c.in, err = parseClients("clients", t.Clients, n); err != nil {
		return c, err
	}
	c.out, err = parseClients("not_clients", t.NotClients, n)
	return c, err
}

// any reports whether it matters who the client is.
func (c *tierClients) any() bool { return len(c.in)+len(c.out) > 0 }

// include reports whether a tier concerns a client. One that is not known, since its chain was no use, is in no range.
func (c *tierClients) include(client clientip.Client) bool {
	if !client.Known() {
		return len(c.in) == 0
	}
	return (len(c.in) == 0 || anyContains(c.in, client.Addr)) && !anyContains(c.out, client.Addr)
}

// concerns reports whether a tier is to be asked about the request, as far as the request and its client say. The error is
// a matcher's, or that the client is not proven yet.
func (rec *record) concerns(t *tier) (bool, error) {
	concerned, err := t.match.concerns(rec.r)
	if err != nil || !concerned || !t.clients.any() {
		return concerned, err
	}
	if earlyData(rec.r) {
		return false, caddyhttp.Error(http.StatusTooEarly, errEarlyData)
	}
	rec.resolve()
	return t.clients.include(rec.client), nil
}

// parseClients reads a list of addresses, ranges and private_ranges.
func parseClients(field string, list []string, n clientip.NAT64) ([]netip.Prefix, error) {
	var ranges []netip.Prefix
	for _, s := range list {
		parts := []string{s}
		if s == privateRanges {
			parts = caddyhttp.PrivateRangesCIDR()
		}
		for _, part := range parts {
			p, err := caddyhttp.CIDRExpressionToPrefix(part)
			if err != nil {
				return nil, fmt.Errorf("%s: %q is neither an IP address nor a CIDR range nor %s", field, s, privateRanges)
			}
			ranges = append(ranges, n.CanonicalPrefix(p))
		}
	}
	return ranges, nil
}

// checkClients refuses a list that has a client twice, or something that is none.
func checkClients(field string, list []string) error {
	if err := noneTwice(field, list); err != nil {
		return err
	}
	_, err := parseClients(field, withoutPlaceholders(list), nil)
	return err
}
