package tieredlimit

import (
	"encoding/json"
	"net/textproto"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// setter is a directive that gives something a value on the way of a request.
type setter struct {
	name      string // of the placeholder; one that ends in a dot stands for all that begin so
	directive string // for people
}

// settersOf lists what raw handlers set, by themselves and inside.
func settersOf(handlers []json.RawMessage, within string) []setter {
	var list []setter
	for _, raw := range handlers {
		handler := readRaw(raw)
		add := func(name, directive string) {
			if within != "" {
				directive = within
			}
			list = append(list, setter{name, directive})
		}
		inside := within
		switch handler.Handler {
		case "headers":
			for _, fields := range []map[string]json.RawMessage{handler.Request.Add, handler.Request.Set, handler.Request.Replace} {
				for field := range fields {
					add(headerPrefix+textproto.CanonicalMIMEHeaderKey(field), "request_header")
				}
			}
		case "authentication":
			add(authPrefix, "authentication (such as basic_auth)")
		case "map":
			for _, destination := range handler.Destinations {
				add(strings.Trim(destination, "{}"), "map")
			}
		case "vars":
			for _, name := range varsOf(raw) {
				add("http.vars."+name, "vars")
			}
		case "reverse_proxy":
			inside = "forward_auth"
		}
		list = append(list, settersOf(handler.inside(), inside)...)
	}
	return list
}

// varsOf lists the variables that a raw vars handler sets.
func varsOf(raw json.RawMessage) []string {
	var vars map[string]json.RawMessage
	_ = json.Unmarshal(raw, &vars)
	var names []string
	for name := range vars {
		if name != "handler" {
			names = append(names, name)
		}
	}
	return names
}

// settersInFront lists what is set on the way to the handler. It is not known of a forward_auth that Caddy has loaded which
// fields it sets: it stands for all.
func (p place) settersInFront() []setter {
	loaded, raw := p.inFront()
	for _, handler := range loaded {
		module, ok := handler.(caddy.Module)
		if !ok {
			continue
		}
		config := caddy.ModuleMap{}
		text, err := json.Marshal(handler)
		if err != nil || json.Unmarshal(text, &config) != nil {
			continue
		}
		name := module.CaddyModule().ID.Name()
		config["handler"], _ = json.Marshal(name)
		if name == "reverse_proxy" && len(config["handle_response"]) > 0 {
			raw = append(raw, json.RawMessage(`{"handler":"vars","*":""}`))
		}
		text, _ = json.Marshal(config)
		raw = append(raw, text)
	}
	return settersOf(raw, "")
}

// sets reports whether one of the setters gives a value to what another one does.
func sets(list []setter, s setter) bool {
	return slices.ContainsFunc(list, func(other setter) bool {
		return other.name == s.name || other.name == "http.vars.*" && strings.HasPrefix(s.name, headerPrefix)
	})
}

// goesBy reports whether the tier's keys or matchers look at what a setter gives a value to, and calls it by its name.
func (t *tier) goesBy(s setter, matchers string) (placeholder string, found bool) {
	all := strings.HasSuffix(s.name, ".")
	for i := range t.keys {
		for _, part := range t.keys[i].parts {
			for j := range part {
				name := part[j].name()
				if part[j].kind != segmentLiteral && (name == s.name || all && strings.HasPrefix(name, s.name)) {
					return "{" + name + "}", true
				}
			}
		}
	}
	matchers = strings.ToLower(matchers)
	name := strings.ToLower(s.name)
	if strings.Contains(matchers, "{"+name) {
		if all {
			return "{" + s.name + "*}", true
		}
		return "{" + s.name + "}", true
	}
	for _, kind := range [...]string{headerPrefix, "http.vars."} { // matchers that name a field or a variable alone
		if bare, ok := strings.CutPrefix(name, strings.ToLower(kind)); ok {
			word := map[string]string{headerPrefix: "header", "http.vars.": "vars"}[kind]
			if strings.Contains(matchers, word) && (strings.Contains(matchers, `"`+bare+`"`) || strings.Contains(matchers, `'`+bare+`'`)) {
				return "{" + s.name + "}", true
			}
		}
	}
	return "", false
}

// warnOrder reports tiers that go by what only a directive behind the handler sets: what they see instead is what the caller
// has sent, or nothing.
func (h *Handler) warnOrder(p place) {
	behind := settersOf(p.behind(), "")
	if len(behind) == 0 {
		return
	}
	inFront := p.settersInFront()
	for _, t := range h.tiers {
		matchers := h.matchText[t.name] + h.shareText[t.name]
		for _, s := range behind {
			placeholder, found := t.goesBy(s, matchers)
			if !found || sets(inFront, s) {
				continue
			}
			t.later = "; " + placeholder + " is set by " + s.directive + " behind tiered_limit: put both into a route block, " +
				s.directive + " first"
			if h.app.firstWarning("order " + h.stackLabel + " " + t.name + " " + placeholder) {
				h.logger.Warn("a tier goes by "+placeholder+", which "+s.directive+" sets behind tiered_limit: the tier sees what the "+
					"caller sent instead, or nothing, and so limits nobody. Put both into a route block, "+s.directive+" first",
					zap.String("stack", h.stackLabel), zap.String("tier", t.name), zap.String("placeholder", placeholder),
					zap.String("directive", s.directive))
			}
		}
	}
}

// warnApart reports a second unnamed stack that requests may meet behind another: each decides alone, so the first is charged
// for what the second refuses.
func (h *Handler) warnApart(p place) {
	if h.Name != "" {
		return
	}
	if other := h.app.metBefore(p, h); other != nil && h.app.firstWarning("apart "+h.serverName()) {
		h.logger.Warn("requests may meet two unnamed stacks, one behind the other: each decides alone, so the first one counts what the "+
			"second refuses. Write one stack whose tiers say with match which requests they concern, or give both handlers one name",
			zap.String("stack", other.stackLabel), zap.String("behind", h.stackLabel))
	}
}

// metBefore returns a handler of an unnamed stack that requests may meet in front of another one, and notes that one.
func (a *App) metBefore(p place, h *Handler) *Handler {
	a.mu.Lock()
	defer a.mu.Unlock()
	defer func() { a.unnamed = append(a.unnamed, h) }()
	for _, other := range a.unnamed {
		if other.server == h.server && p.meets(other.place) {
			return other
		}
	}
	return nil
}
