package tieredlimit

import (
	"fmt"
	"regexp"
	"strings"
	"unicode"

	"github.com/caddyserver/caddy/v2"
)

// expandLists puts in the placeholders in lists of clients and origins, such as {env.OFFICE}. They must have a value at
// load, which may be several entries with blanks or commas between.
func (h *Handler) expandLists() error {
	lists := map[string][]*[]string{"exempt_clients": {&h.ExemptClients}}
	if h.CORS != nil {
		lists["cors"] = append(lists["cors"], &h.CORS.Origins)
	}
	for _, t := range h.Tiers {
		what := fmt.Sprintf("tier %q: clients", t.Name)
		lists[what] = append(lists[what], &t.Clients, &t.NotClients)
	}
	for what, pointers := range lists {
		for _, list := range pointers {
			expanded, err := expandList(*list)
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			*list = expanded
		}
	}
	return h.check()
}

func expandList(list []string) ([]string, error) {
	var expanded []string
	for _, entry := range list {
		if !isPlaceholder(entry) {
			expanded = append(expanded, entry)
			continue
		}
		value, err := caddy.NewReplacer().ReplaceOrErr(entry, true, true)
		if err != nil {
			return nil, fmt.Errorf("%q: only placeholders that have a value at load can be used: %w", entry, err)
		}
		expanded = append(expanded, strings.FieldsFunc(value, func(c rune) bool { return c == ',' || unicode.IsSpace(c) })...)
	}
	return expanded, nil
}

// isPlaceholder reports whether an entry of a list gets its value at load.
func isPlaceholder(entry string) bool { return strings.Contains(entry, "{") }

// withoutPlaceholders is what can be checked of a list before it is expanded.
func withoutPlaceholders(list []string) []string {
	var plain []string
	for _, entry := range list {
		if !isPlaceholder(entry) {
			plain = append(plain, entry)
		}
	}
	return plain
}

// environmentName finds a variable in the form that Caddy expands while it runs.
var environmentName = regexp.MustCompile(`\{env\.([^{}"\s]+)\}`)

// cureEnvironment adds to an error about a value with {env.NAME} in it how a Caddyfile writes it.
func cureEnvironment(err error) error {
	if err == nil {
		return nil
	}
	if name := environmentName.FindStringSubmatch(err.Error()); name != nil {
		return fmt.Errorf("%w; {env.%s} has no value yet where a value is read: write {$%s}", err, name[1], name[1])
	}
	return err
}
