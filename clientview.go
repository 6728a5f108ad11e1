package tieredlimit

import (
	"net/http"
	"net/netip"
	"slices"
)

// clientView is how the client of a request was found.
type clientView struct {
	Peer     string      `json:"peer"`             // empty: it has no address
	Source   string      `json:"source"`           // as in the status
	Header   string      `json:"header,omitempty"` // that was read, or would be
	Chain    []entryView `json:"chain,omitempty"`  // its entries from left to right
	Omitted  int         `json:"omitted,omitempty"`
	Note     string      `json:"note,omitempty"`
	Fallback string      `json:"fallback,omitempty"` // why the peer is used although an entry was to be
	Address  string      `json:"address,omitempty"`  // the client's; absent: nobody is known
	Counted  string      `json:"counted"`            // what it is counted as: masked or unknown, behind a reason and @ if the chain was of no use
}

// entryView is one entry of the chain and what was made of it.
type entryView struct {
	Entry string `json:"entry"`
	Use   string `json:"use"`
}

// What can be made of an entry.
const (
	useClient  = "the client"
	useHop     = "own proxy, by trusted_hops"
	useTrusted = "trusted proxy"
	useUnread  = "not read: written by the client, or by proxies further out"
	useBad     = "not an IP address, so the chain is not used"
	useIgnored = "ignored"
)

// shownEntries is how many entries of a chain are shown, the rightmost ones. One more than is ever walked.
const shownEntries = maxHops + 1

// viewClient describes how the client of a request is found.
func (h *Handler) viewClient(r *http.Request) *clientView {
	t := &h.topology
	v := &clientView{Source: t.source()}
	peer := peerOf(r)
	if peer.IsValid() {
		v.Peer = peer.String()
	}
	name, lines := t.present(r)
	v.Header = name
	entries, parsed := chainEntries(name, lines)
	c := t.client(r)
	if !t.stated() {
		v.Note, v.Counted = "it is not stated which proxies stand in front of the server, so no address is used", ""
	} else {
		v.Fallback = c.fallback.String()
		if c.addr.IsValid() {
			v.Address = c.addr.String()
		}
		v.Counted = string(c.appendIdentity(nil, h.prefixes))
	}
	uses := t.uses(r, peer, entries)
	switch {
	case c.fallback == fallbackShortChain:
		v.Note = "the chain is shorter than trusted_hops"
	case c.fallback == fallbackAllTrusted:
		v.Note = "every entry is a trusted proxy"
	case !parsed:
		v.Note = "the header does not follow RFC 7239, so none of it is used"
	case t.hops != 0 && t.limited() && !t.trusts(r, peer):
		v.Note = "the peer is not a trusted proxy, so its header is not believed"
	case t.hops == 0 && len(entries) > 0:
		v.Note = "trusted_hops is 0, so headers are ignored"
	}
	v.noteFallback(c)
	v.Omitted = max(0, len(entries)-shownEntries)
	for i := v.Omitted; i < len(entries); i++ {
		v.Chain = append(v.Chain, entryView{Entry: shortened(entries[i]), Use: uses[i]})
	}
	return v
}

// noteFallback adds to the note whom the request is counted for where its chain was to name the client.
func (v *clientView) noteFallback(c client) {
	if !c.fallback.ofChain() {
		return
	}
	if v.Note != "" {
		v.Note += "; "
	}
	if c.apart {
		v.Note += "counted for the peer together with other requests whose chain is of no use for this reason"
		return
	}
	v.Note += "counted for the peer, since there is no chain at all"
}

// chainEntries lists the entries of a header from left to right, and tells whether it could be read.
func chainEntries(name string, lines []string) (entries []string, parsed bool) {
	if name == forwardedHeader {
		for _, line := range lines {
			for more := true; more; {
				node, rest, comma, ok := forwardedElement(line)
				if !ok {
					return lines, false
				}
				entries = append(entries, unescape(node))
				line, more = rest, comma
			}
		}
		return entries, true
	}
	c := chain{lines: lines}
	for {
		entry, ok := c.next()
		if !ok {
			slices.Reverse(entries)
			return entries, true
		}
		entries = append(entries, trimBlanks(entry))
	}
}

// uses says what is made of each entry.
func (t *topology) uses(r *http.Request, peer netip.Addr, entries []string) []string {
	uses := make([]string, len(entries))
	believed := t.stated() && t.hops != 0 && (!t.limited() || t.trusts(r, peer))
	if name, lines := t.present(r); believed {
		_, believed = chainEntries(name, lines)
	}
	for i := range uses {
		uses[i] = useUnread
		if !believed {
			uses[i] = useIgnored
		}
	}
	if !believed {
		return uses
	}
	for i, n := len(entries)-1, 1; i >= 0 && n <= maxHops; i, n = i-1, n+1 {
		addr, ok := canonicalAddr(entries[i])
		switch {
		case t.hops > n:
			uses[i] = useHop
			continue
		case !ok:
			uses[i] = useBad
		case t.hops < 0 && t.trusted != nil && t.trusted(r, addr):
			uses[i] = useTrusted
			continue
		default:
			uses[i] = useClient
		}
		break
	}
	return uses
}
