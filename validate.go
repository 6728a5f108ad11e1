package tieredlimit

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// check refuses a configuration that cannot work, whichever way it came in. It needs no Caddy context.
func (h *Handler) check() error {
	if h.Name != "" {
		if err := checkName("stack", h.Name); err != nil {
			return err
		}
	}
	if err := h.checkClient(); err != nil {
		return err
	}
	if len(h.Tiers) == 0 {
		return errors.New("the stack has no tier; write at least one, such as: tier ip 600/m")
	}
	if len(h.Tiers) > maxTiers {
		return fmt.Errorf("the stack has %d tiers; at most %d are possible", len(h.Tiers), maxTiers)
	}
	seen := make(map[string]bool)
	for i, t := range h.Tiers {
		if t == nil {
			return fmt.Errorf("tier %d is null", i+1)
		}
		if err := t.check(); err != nil {
			return err
		}
		if seen[t.Name] {
			return fmt.Errorf("tier %q is defined twice", t.Name)
		}
		seen[t.Name] = true
	}
	if h.DryRunHeader && !h.DryRun {
		return errDryRunHeader
	}
	return h.checkAnswer()
}

// checkClient refuses what cannot say who the client is.
func (h *Handler) checkClient() error {
	if h.TrustedHops != nil && (*h.TrustedHops < 0 || *h.TrustedHops > clientip.MaxHops) {
		return fmt.Errorf("trusted_hops %d is not between 0 and %d", *h.TrustedHops, clientip.MaxHops)
	}
	if h.ClientIPHeader != "" {
		if h.TrustedHops == nil {
			return fmt.Errorf("client_ip_header %q needs trusted_hops", h.ClientIPHeader)
		}
		if !httpguts.ValidHeaderFieldName(h.ClientIPHeader) {
			return fmt.Errorf("client_ip_header %q is not a header field name", h.ClientIPHeader)
		}
		if neverAField(h.ClientIPHeader) {
			return fmt.Errorf("client_ip_header %q never reaches a handler, so no client could be read from it", h.ClientIPHeader)
		}
	}
	if bits := intOr(h.IPv4Prefix, 32); bits < 1 || bits > 32 {
		return fmt.Errorf("ipv4_prefix %d is not between 1 and 32", bits)
	}
	if bits := intOr(h.IPv6Prefix, 64); bits < 1 || bits > 128 {
		return fmt.Errorf("ipv6_prefix %d is not between 1 and 128", bits)
	}
	if err := noneTwice("nat64_prefix", h.NAT64Prefix); err != nil {
		return err
	}
	if err := checkNAT64(h.NAT64Prefix...); err != nil {
		return err
	}
	if err := checkClients("exempt_clients", h.ExemptClients); err != nil {
		return err
	}
	if err := noneTwice("exempt", h.Exempt); err != nil {
		return err
	}
	for _, s := range h.Exempt {
		if err := checkExemptPath(s); err != nil {
			return err
		}
	}
	return nil
}

// checkNAT64 refuses what cannot be the prefixes of translators.
func checkNAT64(list ...string) error {
	if _, err := clientip.ParseNAT64(list); err != nil {
		return fmt.Errorf("nat64_prefix: %w", err)
	}
	return nil
}

// checkAnswer refuses unknown ways to charge and to answer.
func (h *Handler) checkAnswer() error {
	for _, c := range []struct {
		field, value string
		allowed      []string
	}{
		{"charge", h.Charge, []string{"served", "checked"}},
		{"preflight", h.Preflight, []string{"exempt", "count"}},
		{"body", h.Body, []string{"problem", "graphql", "grpc", "text", "none"}},
	} {
		if c.value == "" {
			continue
		}
		if err := oneOf(c.field, c.value, c.allowed...); err != nil {
			return err
		}
	}
	if err := checkHeaderSets(h.Headers); err != nil {
		return err
	}
	if h.Jitter < 0 || h.Jitter > 100 {
		return fmt.Errorf("jitter %d is not between 0 and 100 percent", h.Jitter)
	}
	return h.CORS.check()
}

// checkHeaderSets refuses unknown and repeated sets of header fields, and none beside others.
func checkHeaderSets(sets []string) error {
	for _, s := range sets {
		if err := oneOf("headers", s, "x-ratelimit", "draft-11", "none"); err != nil {
			return err
		}
	}
	if err := noneTwice("headers", sets); err != nil {
		return err
	}
	if len(sets) > 1 && slices.Contains(sets, "none") {
		return errors.New("headers none cannot stand beside other sets")
	}
	return nil
}

// noneTwice refuses a list that names something twice.
func noneTwice(field string, list []string) error {
	seen := make(map[string]bool, len(list))
	for _, s := range list {
		if seen[s] {
			return fmt.Errorf("%s names %q twice", field, s)
		}
		seen[s] = true
	}
	return nil
}

// checkExemptPath refuses a pattern that could never match a path.
func checkExemptPath(s string) error {
	if !strings.HasPrefix(s, "/") && !strings.HasPrefix(s, "*") && !strings.HasPrefix(s, "{") {
		return fmt.Errorf("exempt %q is not a path: it must begin with / or *", s)
	}
	return nil
}

// checkName refuses names that could not stand in a header field, a metric and a store's key alike.
func checkName(kind, s string) error {
	if len(s) < 1 || len(s) > 64 {
		return fmt.Errorf("%s name %q is not 1 to 64 characters long", kind, s)
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return fmt.Errorf("%s name %q has characters other than a-z, 0-9, _ and -", kind, s)
		}
	}
	return nil
}

// oneOf refuses a value that is not among the allowed ones.
func oneOf(field, value string, allowed ...string) error {
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	return fmt.Errorf("%s %q is not one of %s", field, value, strings.Join(allowed, ", "))
}

// digitsOnly tells whether s is made of decimal digits, at least one.
func digitsOnly(s string) bool {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}
