package tieredlimit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("tiered_limit", parseDirective)
	httpcaddyfile.RegisterDirectiveOrder("tiered_limit", httpcaddyfile.Before, "basic_auth")
}

// directiveParser reads one tiered_limit block.
type directiveParser struct {
	httpcaddyfile.Helper
	handler *Handler
	seen    map[string]bool // subdirectives of the block, and tiers by name
}

// parseDirective reads the tiered_limit directive:
//
//	tiered_limit [<matcher>] [<name>] {
//		trusted_hops     [<count> [<header>]]
//		ipv4_prefix      <bits>
//		ipv6_prefix      <bits>
//		nat64_prefix     <cidr>...
//		tier <name> <count>/<window>...|off {
//			key      [fold] <part>...
//			match    @name | <matcher> <args...> | { <matchers> }
//			clients  [not] <cidr>...
//			share    <percent> <matcher>
//			charge   served|checked
//			dry_run  [header]
//		}
//		charge           served|checked
//		exempt           <path>...
//		exempt_clients   <cidr>...
//		preflight        exempt|count
//		headers          x-ratelimit|draft-11... | none
//		body             problem|graphql|grpc|text|none
//		cors             <origin>... | * [{
//			credentials
//		}]
//		jitter           <percent>
//		log_keys
//		dry_run          [header]
//		events
//		store            <backend> [{ ... }]
//	}
func parseDirective(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	p := &directiveParser{Helper: helper, handler: new(Handler), seen: make(map[string]bool)}
	p.Next() // the directive itself
	if p.NextArg() {
		p.handler.Name = p.Val()
		if err := checkName("stack", p.handler.Name); err != nil {
			return nil, p.WrapErr(err)
		}
		if p.NextArg() {
			return nil, p.Errf("unexpected %q: tiered_limit takes one name", p.Val())
		}
	}
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		if err := p.parseSubdirective(); err != nil {
			return nil, cureEnvironment(err)
		}
	}
	if err := p.handler.check(); err != nil {
		return nil, p.WrapErr(err)
	}
	return p.handler, nil
}

// parseSubdirective reads one line or block of the directive. The dispenser stands on its name.
func (p *directiveParser) parseSubdirective() error {
	word := p.Val()
	parse, known := map[string]func() error{
		"trusted_hops":   p.parseTrustedHops,
		"ipv4_prefix":    func() error { return p.parseBits(&p.handler.IPv4Prefix, 32) },
		"ipv6_prefix":    func() error { return p.parseBits(&p.handler.IPv6Prefix, 128) },
		"nat64_prefix":   p.parseNAT64Prefix,
		"tier":           p.parseTier,
		"charge":         func() error { return p.parseWord(&p.handler.Charge, "served", "checked") },
		"exempt":         p.parseExempt,
		"exempt_clients": p.parseExemptClients,
		"preflight":      func() error { return p.parseWord(&p.handler.Preflight, "exempt", "count") },
		"headers":        p.parseHeaders,
		"body":           func() error { return p.parseWord(&p.handler.Body, "problem", "graphql", "grpc", "text", "none") },
		"cors":           p.parseCORS,
		"jitter":         p.parseJitter,
		"log_keys":       func() error { return p.parseFlag(&p.handler.LogKeys) },
		"dry_run":        func() error { return p.parseDryRun(&p.handler.DryRun, &p.handler.DryRunHeader) },
		"events":         func() error { return p.parseFlag(&p.handler.Events) },
		"store":          p.parseStore,
	}[word]
	if !known {
		if advice := migration[word]; advice != "" {
			return p.Errf("unknown subdirective %q of tiered_limit: %s", word, advice)
		}
		return p.Errf("unknown subdirective %q of tiered_limit; expected trusted_hops, ipv4_prefix, ipv6_prefix, nat64_prefix, tier, charge, "+
			"exempt, exempt_clients, preflight, headers, body, cors, jitter, log_keys, dry_run, events or store", word)
	}
	if word != "tier" {
		if err := p.once(word); err != nil {
			return err
		}
	}
	return parse()
}

// migrating says where words of other limiters are explained.
const migrating = `; see "Migrating from rate_limit" in the README`

// migration says what stands for words that other limiters have, and where those belong that stand in the wrong place.
var migration = map[string]string{
	"rate_limit":     "write tiers into tiered_limit" + migrating,
	"zone":           "a zone is a tier, such as: tier api 100/m" + migrating,
	"window":         "count and window stand together, such as: tier ip 100/m" + migrating,
	"rate":           "count and window stand together, such as: tier ip 100/m" + migrating,
	"max_events":     "count and window stand together, such as: tier ip 100/m" + migrating,
	"log_key":        "write log_keys" + migrating,
	"sweep_interval": "there is no sweep, so leave it out" + migrating,
	"distributed":    "write store redis" + migrating,
	"storage":        "write store redis" + migrating,
	"burst":          "add a limit with a shorter window, such as: tier ip 20/s 600/m",
	"key":            "a key belongs into a tier",
	"match":          "match belongs into a tier",
	"match_mode":     "match_mode belongs into a tier",
	"clients":        "clients belongs into a tier",
	"share":          "share belongs into a tier",
}

// once refuses a subdirective that the block has already.
func (p *directiveParser) once(word string) error {
	if p.seen[word] {
		return p.Errf("%s is given twice", word)
	}
	p.seen[word] = true
	return nil
}

// noBlock refuses a block where none belongs, even an empty one.
func (p *directiveParser) noBlock(word string) error {
	if !p.Next() {
		return nil
	}
	if p.Val() == "{" && !p.Token().Quoted() {
		return p.Errf("%s takes no block", word)
	}
	p.Prev()
	return nil
}

// argument reads the only argument of a line.
func (p *directiveParser) argument(what string) (string, error) {
	word := p.Val()
	if !p.NextArg() {
		return "", p.Errf("%s takes %s", word, what)
	}
	arg := p.Val()
	if p.NextArg() {
		return "", p.Errf("unexpected %q: %s takes %s", p.Val(), word, what)
	}
	return arg, nil
}

// about says what an error is about, and where it is if the error does not say so.
func (p *directiveParser) about(what string, err error) error {
	err = fmt.Errorf("%s: %w", what, err)
	if strings.Contains(err.Error(), ", at "+p.File()+":") {
		return err
	}
	return p.WrapErr(err)
}

func (p *directiveParser) parseTrustedHops() error {
	args := p.RemainingArgs()
	if len(args) > 2 {
		return p.Errf("unexpected %q: trusted_hops takes a count and a header", args[2])
	}
	if len(args) == 0 || args[0] == "" {
		if len(args) == 2 {
			return p.Errf("trusted_hops has a header %q but no count", args[1])
		}
		return p.noBlock("trusted_hops") // not stated
	}
	if !digitsOnly(args[0]) {
		return p.Errf("trusted_hops %q is not a whole number from 0 to %d", args[0], clientip.MaxHops)
	}
	n, err := strconv.Atoi(args[0])
	if err != nil || n > clientip.MaxHops {
		return p.Errf("trusted_hops %q is not a whole number from 0 to %d", args[0], clientip.MaxHops)
	}
	p.handler.TrustedHops = &n
	if len(args) == 2 {
		p.handler.ClientIPHeader = args[1]
	}
	if err := p.handler.checkClient(); err != nil {
		return p.WrapErr(err)
	}
	return p.noBlock("trusted_hops")
}

func (p *directiveParser) parseBits(into **int, most int) error {
	word := p.Val()
	arg, err := p.argument("one number of bits")
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(arg)
	if err != nil || !digitsOnly(arg) || n < 1 || n > most {
		return p.Errf("%s %q is not a whole number from 1 to %d", word, arg, most)
	}
	*into = &n
	return p.noBlock(word)
}

func (p *directiveParser) parseWord(into *string, allowed ...string) error {
	word := p.Val()
	arg, err := p.argument("one of " + strings.Join(allowed, ", "))
	if err != nil {
		return err
	}
	if err := oneOf(word, arg, allowed...); err != nil {
		return p.WrapErr(err)
	}
	*into = arg
	return p.noBlock(word)
}

func (p *directiveParser) parseFlag(into *bool) error {
	word := p.Val()
	if p.NextArg() {
		if word == "events" {
			return p.Errf("unexpected %q: events takes no argument; a count stands with its window, such as: tier ip %[1]s/m%[2]s", p.Val(), migrating)
		}
		return p.Errf("unexpected %q: %s takes no argument", p.Val(), word)
	}
	*into = true
	return p.noBlock(word)
}

// parseDryRun reads dry_run, which may ask for a response header.
func (p *directiveParser) parseDryRun(on, header *bool) error {
	if p.CountRemainingArgs() > 0 {
		word, err := p.argument("no argument but header")
		if err != nil {
			return err
		}
		if word != "header" {
			return p.Errf("unexpected %q: dry_run takes no argument but header", word)
		}
		*header = true
	}
	*on = true
	return p.noBlock("dry_run")
}

// parseList reads the arguments of a line that needs at least one, and checks each.
func (p *directiveParser) parseList(check func(string) error) ([]string, error) {
	word := p.Val()
	var list []string
	for p.NextArg() {
		if err := check(p.Val()); err != nil {
			return nil, p.WrapErr(err)
		}
		if slices.Contains(list, p.Val()) {
			return nil, p.Errf("%s names %q twice", word, p.Val())
		}
		list = append(list, p.Val())
	}
	if len(list) == 0 {
		return nil, p.Errf("%s needs at least one argument", word)
	}
	return list, nil
}

func (p *directiveParser) parseExempt() (err error) {
	if p.handler.Exempt, err = p.parseList(checkExemptPath); err != nil {
		return err
	}
	return p.noBlock("exempt")
}

func (p *directiveParser) parseExemptClients() (err error) {
	p.handler.ExemptClients, err = p.parseList(func(s string) error {
		return checkClients("exempt_clients", []string{s})
	})
	if err != nil {
		return err
	}
	return p.noBlock("exempt_clients")
}

func (p *directiveParser) parseNAT64Prefix() (err error) {
	p.handler.NAT64Prefix, err = p.parseList(func(s string) error { return checkNAT64(s) })
	if err != nil {
		return err
	}
	return p.noBlock("nat64_prefix")
}

func (p *directiveParser) parseHeaders() (err error) {
	p.handler.Headers, err = p.parseList(func(s string) error { return checkHeaderSets([]string{s}) })
	if err != nil {
		return err
	}
	if err := checkHeaderSets(p.handler.Headers); err != nil {
		return p.WrapErr(err)
	}
	return p.noBlock("headers")
}

func (p *directiveParser) parseCORS() (err error) {
	cors := new(CORS)
	cors.Origins, err = p.parseList(func(s string) error { return (&CORS{Origins: []string{s}}).check() })
	if err != nil {
		return err
	}
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		if p.Val() != "credentials" {
			return p.Errf("unknown word %q in cors; expected credentials", p.Val())
		}
		if cors.Credentials {
			return p.Err("credentials is given twice")
		}
		if err := p.parseFlag(&cors.Credentials); err != nil {
			return err
		}
	}
	if err := cors.check(); err != nil {
		return p.WrapErr(err)
	}
	p.handler.CORS = cors
	return nil
}

func (p *directiveParser) parseJitter() error {
	arg, err := p.argument("one percentage")
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(arg)
	if err != nil || !digitsOnly(arg) || n > 100 {
		return p.Errf("jitter %q is not a whole number of percent from 0 to 100", arg)
	}
	p.handler.Jitter = n
	return p.noBlock("jitter")
}

// parseTier reads a tier's line and block.
func (p *directiveParser) parseTier() error {
	if !p.NextArg() {
		return p.Err("tier needs a name and a limit, such as: tier ip 600/m")
	}
	t, line := &Tier{Name: p.Val(), Limits: []TierLimit{}}, p.Line()
	if err := checkName("tier", t.Name); err != nil {
		return p.WrapErr(err)
	}
	if p.seen["tier "+t.Name] {
		return p.Errf("tier %q is given twice; several limits of a tier stand on one line, such as: tier %[1]s 20/s 600/m", t.Name)
	}
	p.seen["tier "+t.Name] = true
	args := 0
	for ; p.NextArg(); args++ {
		if p.Val() == "off" {
			if args > 0 || p.NextArg() {
				return p.Errf("tier %q: off cannot stand beside limits", t.Name)
			}
			continue
		}
		limit, err := parseLimit(p.Val())
		if err != nil {
			return p.Errf("tier %q: %w", t.Name, err)
		}
		t.Limits = append(t.Limits, limit)
	}
	if args == 0 {
		return p.Errf("tier %q needs at least one limit, such as 600/m, or off", t.Name)
	}
	if err := t.checkLimits(); err != nil {
		return p.WrapErr(err)
	}
	inTier := make(map[string]bool)
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		if err := p.parseTierLine(t, inTier); err != nil {
			return err
		}
	}
	if err := t.check(); err != nil {
		return fmt.Errorf("%w, at %s:%d", err, p.File(), line)
	}
	p.handler.Tiers = append(p.handler.Tiers, t)
	return nil
}

// parseTierLine reads one line of a tier's block.
func (p *directiveParser) parseTierLine(t *Tier, seen map[string]bool) error {
	word := p.Val()
	if seen[word] && word != "key" && word != "clients" && word != "share" {
		return p.Errf("tier %q: %s is given twice", t.Name, word)
	}
	seen[word] = true
	switch word {
	case "key":
		parts := p.RemainingArgs()
		if len(parts) == 0 {
			return p.Errf("tier %q: key needs at least one part", t.Name)
		}
		if slices.Contains(parts, "") {
			return p.Errf("tier %q: key has an empty part; %w", t.Name, errEmptyVariable)
		}
		for _, part := range parts {
			if _, err := parsePart(part); err != nil {
				return p.Errf("tier %q: key part %q: %w", t.Name, part, err)
			}
		}
		t.Keys = append(t.Keys, parts)
		return p.noBlock("key")
	case "match":
		return p.parseMatch(fmt.Sprintf("tier %q: match", t.Name), &t.MatcherSetsRaw)
	case "share":
		return p.parseShare(t)
	case "clients":
		return p.parseClients(t)
	case "match_mode":
		return p.parseWord(&t.MatchMode, "careful", "literal")
	case "charge":
		return p.parseWord(&t.Charge, "served", "checked")
	case "dry_run":
		return p.parseDryRun(&t.DryRun, &t.DryRunHeader)
	}
	if word == "events" || word == "window" || word == "rate" {
		return p.Errf("unknown word %q in tier %q: count and window stand on the tier's line, such as: tier %[2]s 100/m%[3]s", word, t.Name, migrating)
	}
	return p.Errf("unknown word %q in tier %q; expected key, match, match_mode, clients, share, charge or dry_run", word, t.Name)
}

// parseClients reads whom a tier concerns, or whom it does not.
func (p *directiveParser) parseClients(t *Tier) error {
	into, field := &t.Clients, "clients"
	if p.NextArg() {
		if p.Val() == "not" {
			into, field = &t.NotClients, "clients not"
		} else {
			p.Prev()
		}
	}
	if *into != nil {
		return p.Errf("tier %q: %s is given twice", t.Name, field)
	}
	list := p.RemainingArgs()
	if len(list) == 0 {
		return p.Errf("tier %q: %s needs at least one address or range", t.Name, field)
	}
	if err := checkClients(field, list); err != nil {
		return p.Errf("tier %q: %w", t.Name, err)
	}
	*into = list
	return p.noBlock("clients")
}

// parseMatch reads a named matcher, a path, a matcher on the line, or a block of matchers, of what it says.
func (p *directiveParser) parseMatch(what string, into *caddyhttp.RawMatcherSets) error {
	onLine := p.CountRemainingArgs() > 0
	set, found, err := p.MatcherToken()
	if err != nil {
		return p.about(what, err)
	}
	if found {
		if p.NextArg() {
			return p.Errf("%s: unexpected %q", what, p.Val())
		}
		if set == nil {
			return p.noBlock("match") // * matches everything
		}
		*into = caddyhttp.RawMatcherSets{set}
		return p.noBlock("match")
	}
	if onLine {
		p.Prev() // back to what is in front of the matcher
	}
	set, err = caddyhttp.ParseCaddyfileNestedMatcherSet(p.Dispenser)
	if err != nil {
		return p.about(what, err)
	}
	if len(set) == 0 {
		return p.Errf("%s needs a matcher", what)
	}
	*into = caddyhttp.RawMatcherSets{set}
	return nil
}

// parseShare reads how much of the tier some requests may use, and which.
func (p *directiveParser) parseShare(t *Tier) error {
	if !p.NextArg() {
		return p.Errf("tier %q: share needs a percentage and a matcher, such as: share 80%% not path /checkout", t.Name)
	}
	percent, err := parsePercent(p.Val())
	if err != nil {
		return p.Errf("tier %q: %w", t.Name, err)
	}
	s := &Share{Percent: percent}
	t.Shares = append(t.Shares, s)
	return p.parseMatch(fmt.Sprintf("tier %q: share %d%%", t.Name, percent), &s.MatcherSetsRaw)
}

// storeNames lists the stores that this Caddy has.
func storeNames() []string {
	var names []string
	for _, module := range caddy.GetModules("http.tiered_limit.stores") {
		names = append(names, module.ID.Name())
	}
	return names
}

// parseStore reads the name of a store module and hands it the rest of the line and the block.
func (p *directiveParser) parseStore() error {
	if !p.NextArg() {
		return p.Err("store needs a backend, such as memory")
	}
	name := p.Val()
	id := "http.tiered_limit.stores." + name
	if _, err := caddy.GetModule(id); err != nil {
		return p.Errf("there is no store %q in this Caddy; there are %s", name, strings.Join(storeNames(), ", "))
	}
	module, err := caddyfile.UnmarshalModule(p.Dispenser, id)
	if err != nil {
		return p.about(fmt.Sprintf("store %q", name), err)
	}
	store, ok := module.(Store)
	if !ok {
		return p.Errf("store %q: module %T is not a store", name, module)
	}
	if _, shared := module.(SharedStore); shared && p.handler.Name == "" {
		return p.Errf("store %q is shared by instances, so the stack needs a name, which says that its counters are the same everywhere: "+
			"tiered_limit api { ... }", name)
	}
	p.handler.StoreRaw = caddyconfig.JSONModuleObject(store, "backend", name, nil)
	return nil
}
