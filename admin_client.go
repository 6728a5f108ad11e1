package tieredlimit

import (
	"net/http"
	"slices"
	"strings"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
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
const shownEntries = clientip.MaxHops + 1

// viewClient describes how the client of a request is found.
func (h *Handler) viewClient(r *http.Request) *clientView {
	t := &h.topology
	v := &clientView{Source: t.Source()}
	peer := t.Peer(r)
	if peer.IsValid() {
		v.Peer = peer.String()
	}
	c, decided := t.Find(r)
	v.showChain(r, t, c, decided)
	if !t.Stated() {
		v.Note = "it is not stated which proxies stand in front of the server, so no address is used"
		return v
	}
	v.Fallback = c.Fallback.String()
	if c.Addr.IsValid() {
		v.Address = c.Addr.String()
	}
	v.Counted = string(c.AppendIdentity(nil, h.prefixes))
	switch {
	case c.Fallback == clientip.ShortChain:
		v.Note = "the chain is shorter than trusted_hops"
	case c.Fallback == clientip.AllTrusted:
		v.Note = "every entry is a trusted proxy"
	case c.Fallback == clientip.BadEntry && decided == 0:
		v.Note = "the header does not follow RFC 7239, so none of it is used"
	case t.Hops != 0 && t.Limited() && !t.Trusts(r, peer):
		v.Note = "the peer is not a trusted proxy, so its header is not believed; if it is a proxy of yours, add it to trusted_proxies"
		if !peer.IsValid() {
			v.Note = "peers without an address are not trusted, so the header is not believed; if it is a proxy of yours, set " +
				"trusted_proxies_unix"
		}
	case t.Hops == 0 && len(v.Chain) > 0:
		v.Note = "trusted_hops is 0, so headers are ignored"
	}
	v.noteFallback(c)
	return v
}

// noteFallback adds to the note whom the request is counted for where its chain was to name the client.
func (v *clientView) noteFallback(c clientip.Client) {
	if !c.Fallback.OfChain() {
		return
	}
	if v.Note != "" {
		v.Note += "; "
	}
	if c.Apart {
		v.Note += "counted for the peer together with other requests whose chain is of no use for this reason"
		return
	}
	v.Note += "counted for the peer, since there is no chain at all"
}

// showChain lists the entries of the chain, and what was made of each: one of them decided, by its place from the right, or none.
func (v *clientView) showChain(r *http.Request, t *clientip.Topology, c clientip.Client, decided int) {
	name, lines := t.Present(r)
	v.Header = name
	var f clientip.Forwarded
	chain, parsed := f.Open(name, lines)
	if !parsed { // there are no entries to be told apart
		for _, line := range lines[max(0, len(lines)-shownEntries):] {
			v.Chain = append(v.Chain, entryView{Entry: shortened(line), Use: useIgnored})
		}
		v.Omitted = max(0, len(lines)-shownEntries)
		return
	}
	for place := 1; place <= shownEntries; place++ {
		entry, ok := chain.Next()
		if !ok {
			break
		}
		v.Chain = append(v.Chain, entryView{Entry: shortened(strings.Trim(entry, " \t")), Use: useOf(t, c, place, decided)})
	}
	slices.Reverse(v.Chain)
	v.Omitted = chain.Len()
}

// useOf says what was made of an entry of the chain, by its place from the right and that of the entry that decided.
func useOf(t *clientip.Topology, c clientip.Client, place, decided int) string {
	passed := useTrusted
	if t.Hops > 0 {
		passed = useHop
	}
	switch {
	case decided == 0 && !c.Apart:
		return useIgnored // the whole chain is
	case place < decided || decided == 0 && place <= clientip.MaxHops:
		return passed
	case place > decided:
		return useUnread
	case c.Fallback == clientip.BadEntry:
		return useBad
	}
	return useClient
}
