package tieredlimit

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/textproto"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// Placeholders with a meaning of their own in a key.
const (
	clientPlaceholder = "http.tiered_limit.client_ip"
	userPlaceholder   = "http.auth.user.id"
	headerPrefix      = "http.request.header."
	queryPrefix       = "http.request.uri.query."
	cookiePrefix      = "http.request.cookie."
	hostPlaceholder   = "http.request.host"
	authPrefix        = "http.auth."
)

// key is one way to say who is counted together: parts that are one identity.
//
// An identity begins with a digest of the tier's key definition, so that a changed definition starts anew, and the
// ordinal of the key among the alternatives, so that a user called 203.0.113.1 is not that client. Then come the
// parts, each behind its length, so that (a:b, c) and (a, b:c) differ. A part of more than maxPart bytes is replaced by
// its SHA-256, which keeps identities short without making any two of them equal.
type key struct {
	digest      [8]byte
	ordinal     byte
	parts       [][]segment
	fixed       bool // no placeholder: one bucket for everybody
	usesClient  bool // it has the client's address in it
	usesAddress bool // it has that or another address in it that only a finished handshake proves
	captured    bool // it has something in it that a matcher has found in the request
	grouped     bool // the client's address can be found in its identities
	client      clientPlace
}

const maxPart = 256

// segment is a stretch of a part: literal text, or the value of a placeholder.
type segment struct {
	kind segmentKind
	text string // the literal, the name of the header field, parameter or cookie, or that of the placeholder
	fold bool   // the part that it stands in is folded
}

type segmentKind uint8

const (
	segmentLiteral segmentKind = iota
	segmentClient
	segmentHeader
	segmentQuery
	segmentCookie
	segmentHost
	segmentPlaceholder
)

// defaultKeys are the keys of a tier that states none, or nil if its name has no default. The global tier's empty key
// is one bucket for everybody.
func defaultKeys(name string) [][]string {
	switch name {
	case "ip":
		return [][]string{{"{" + clientPlaceholder + "}"}}
	case "user":
		return [][]string{{"{" + userPlaceholder + "}"}}
	case "global":
		return [][]string{{}}
	}
	return nil
}

// compileKeys compiles the keys of a tier, refusing placeholders that do not exist or can never limit.
func compileKeys(t *Tier, masks clientip.Prefixes, probe *placeholderProbe) ([]key, error) {
	lines := t.keyLines()
	if len(lines) > uncertainOrdinal {
		return nil, fmt.Errorf("has %d keys; at most %d are possible", len(lines), uncertainOrdinal)
	}
	keys := make([]key, 0, len(lines))
	usesClient := false
	for i, line := range lines {
		k, err := compileKey(line, probe)
		if err != nil {
			return nil, err
		}
		k.ordinal = byte(i)
		usesClient = usesClient || k.usesClient
		keys = append(keys, k)
	}
	definition, err := json.Marshal(lines)
	if err != nil {
		return nil, fmt.Errorf("encoding the key: %w", err)
	}
	if usesClient {
		definition = fmt.Appendf(definition, " v4/%d v6/%d", masks.V4, masks.V6)
	}
	sum := sha256.Sum256(definition)
	for i := range keys {
		copy(keys[i].digest[:], sum[:])
	}
	return keys, nil
}

// compileKey compiles one key of a tier.
func compileKey(line []string, probe *placeholderProbe) (key, error) {
	k := key{fixed: true}
	fold, line := cutFold(line)
	for _, part := range line {
		segments, err := parsePart(part)
		if err == nil && fold {
			err = foldSegments(segments)
		}
		if err != nil {
			return k, fmt.Errorf("key part %q: %w", part, err)
		}
		for _, s := range segments {
			if s.kind == segmentLiteral {
				continue
			}
			if err := probe.check(s.name()); err != nil {
				return k, fmt.Errorf("key part %q: %w", part, err)
			}
			k.fixed = false
			k.usesClient = k.usesClient || s.kind == segmentClient
			k.usesAddress = k.usesAddress || s.isAddress()
			k.captured = k.captured || strings.HasPrefix(s.name(), "http.regexp.")
		}
		k.parts = append(k.parts, segments)
	}
	if fold && k.fixed {
		return k, fmt.Errorf("key %q has nothing to fold: it is the same text for every request", strings.Join(line, " "))
	}
	k.client, k.grouped = k.placeOfClient()
	return k, nil
}

// parsePart splits a part at its placeholders, with Caddy's escapes: \{ and \} are literal braces.
func parsePart(part string) ([]segment, error) {
	var segments []segment
	var literal strings.Builder
	flush := func() {
		if literal.Len() > 0 {
			segments = append(segments, segment{kind: segmentLiteral, text: literal.String()})
			literal.Reset()
		}
	}
	for i := 0; i < len(part); i++ {
		c := part[i]
		if c == '\\' && i+1 < len(part) && (part[i+1] == '{' || part[i+1] == '}') {
			i++
			literal.WriteByte(part[i])
			continue
		}
		if c != '{' {
			literal.WriteByte(c)
			continue
		}
		end := strings.IndexByte(part[i:], '}')
		if end < 0 {
			return nil, errors.New("a placeholder is not closed; write \\{ for a literal brace")
		}
		name := part[i+1 : i+end]
		if name == "" {
			return nil, errors.New("a placeholder has no name; write \\{ for a literal brace")
		}
		flush()
		segments = append(segments, placeholderSegment(name))
		i += end
	}
	flush()
	return segments, nil
}

func placeholderSegment(name string) segment {
	if name == clientPlaceholder {
		return segment{kind: segmentClient}
	}
	if field, ok := strings.CutPrefix(name, headerPrefix); ok && field != "" {
		return segment{kind: segmentHeader, text: textproto.CanonicalMIMEHeaderKey(field)}
	}
	if param, ok := strings.CutPrefix(name, queryPrefix); ok && param != "" {
		return segment{kind: segmentQuery, text: param}
	}
	if cookie, ok := strings.CutPrefix(name, cookiePrefix); ok && cookie != "" {
		return segment{kind: segmentCookie, text: cookie}
	}
	if name == hostPlaceholder {
		return segment{kind: segmentHost}
	}
	return segment{kind: segmentPlaceholder, text: name}
}

// isAddress tells whether the segment holds the address of the peer or what was made of it.
func (s segment) isAddress() bool {
	return s.kind == segmentClient || s.kind == segmentPlaceholder && (s.text == "http.vars.client_ip" || isPeerHost(s.text))
}

// name is the placeholder's name.
func (s segment) name() string {
	switch s.kind {
	case segmentClient:
		return clientPlaceholder
	case segmentHeader:
		return headerPrefix + s.text
	case segmentQuery:
		return queryPrefix + s.text
	case segmentCookie:
		return cookiePrefix + s.text
	case segmentHost:
		return hostPlaceholder
	}
	return s.text
}

// appendPrefix appends what every identity of this key begins with. It is the whole identity of a fixed key.
func (k *key) appendPrefix(buf []byte) []byte {
	buf = append(buf, k.digest[:]...)
	return append(buf, k.ordinal)
}

// keySource is where a key's values come from.
type keySource interface {
	// appendClient appends what the client is counted as.
	appendClient(buf []byte) []byte
	request() *http.Request
	replacer() *caddy.Replacer
	// unknownPlaceholder is told the name of a placeholder that the replacer does not know.
	unknownPlaceholder(name string)
}

// appendIdentity appends the identity of a request under this key. If every placeholder of the key is empty, the identity
// is absent, and no more than garbage is left behind buf's length. If one is uncertain, the identity is that of all such
// requests of the tier: parts beside it are what the caller likes, and would be budgets beside that of the real value.
func (k *key) appendIdentity(buf []byte, src keySource) ([]byte, presence) {
	begin := len(buf)
	buf = k.appendPrefix(buf)
	if k.fixed {
		return buf, present
	}
	found := absent
	for _, part := range k.parts {
		start := len(buf)
		buf = append(buf, 0, 0, 0, 0)
		for i := range part {
			var p presence
			buf, p = part[i].appendValue(buf, src)
			if p == uncertain {
				return k.appendUncertain(buf[:begin]), uncertain
			}
			found = found.add(p)
		}
		if part[0].fold {
			buf = foldText(buf, start+4)
		}
		buf = closePart(buf, start)
	}
	return buf, found
}

// appendUncertain appends the identity of all requests of a tier whose key cannot be read with certainty, whichever of
// its keys that is.
func (k *key) appendUncertain(buf []byte) []byte {
	buf = append(buf, k.digest[:]...)
	return append(buf, uncertainOrdinal)
}

// uncertainOrdinal stands in place of a key's ordinal.
const uncertainOrdinal = math.MaxUint8

// uncertainKey is the identity of appendUncertain as people see it.
const uncertainKey = "(uncertain)"

// isUncertain reports whether an identity of the tier is that of requests with an uncertain key.
func (t *tier) isUncertain(identity []byte) bool {
	return t.fixed == nil && identity[len(t.keys[0].digest)] == uncertainOrdinal
}

// closePart writes the length of a part that begins at start into the four bytes that were left there, and replaces a
// long part by its digest.
func closePart(buf []byte, start int) []byte {
	content := buf[start+4:]
	binary.BigEndian.PutUint32(buf[start:], uint32(len(content)))
	if len(content) > maxPart {
		sum := sha256.Sum256(content)
		buf = append(buf[:start+4], sum[:]...)
	}
	return buf
}

// appendTexts appends the identity that parts with these values have under the key.
func (k *key) appendTexts(buf []byte, parts []string) []byte {
	buf = k.appendPrefix(buf)
	for i, text := range parts {
		start := len(buf)
		buf = append(append(buf, 0, 0, 0, 0), text...)
		if k.parts[i][0].fold {
			buf = foldText(buf, start+4)
		}
		buf = closePart(buf, start)
	}
	return buf
}

// appendValue appends the value that a request gives for the segment, in the form in which values are compared. Nothing
// is appended that is not present.
func (s *segment) appendValue(buf []byte, src keySource) ([]byte, presence) {
	switch s.kind {
	case segmentLiteral:
		return append(buf, s.text...), absent
	case segmentClient:
		return src.appendClient(buf), present
	case segmentHeader:
		return appendHeader(buf, src.request().Header[s.text], s.text, s.fold)
	case segmentQuery:
		return appendQuery(buf, src.request().URL.RawQuery, s.text, s.fold)
	case segmentCookie:
		return appendCookie(buf, src.request().Header["Cookie"], s.text)
	}
	start := len(buf)
	if s.kind == segmentHost {
		buf = appendHost(buf, src.request().Host)
	} else {
		buf = s.appendPlaceholder(buf, src)
	}
	if len(buf) == start {
		return buf, absent
	}
	return buf, present
}

// appendPlaceholder appends what the replacer says of a placeholder.
func (s *segment) appendPlaceholder(buf []byte, src keySource) []byte {
	repl := src.replacer()
	if repl == nil {
		return buf
	}
	value, known := repl.Get(s.text)
	if !known {
		src.unknownPlaceholder(s.text)
		return buf
	}
	if text, ok := value.(string); ok {
		return append(buf, text...)
	}
	return append(buf, caddy.ToString(value)...)
}

// appendText appends a value that an operator writes, in the form in which values are compared. It reports false for one
// that no request could have.
func (s *segment) appendText(buf []byte, text string) ([]byte, bool) {
	switch s.kind {
	case segmentHeader:
		return headerWriter(s.text, s.fold)(buf, text)
	case segmentQuery:
		return paramWriter(s.fold)(buf, text)
	case segmentCookie:
		return appendCookieValue(buf, text)
	case segmentHost:
		return appendHost(buf, text), true
	}
	return append(buf, text...), true
}

// appendHost appends the host that a request is for, in lower case and without the port, since neither those
// nor the dot of a complete name lead to another site.
func appendHost(buf []byte, host string) []byte {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(host, ".")
	return appendLower(buf, host)
}

func appendLower(buf []byte, text string) []byte {
	for i := range len(text) {
		buf = append(buf, lower(text[i]))
	}
	return buf
}
