package clientip

import (
	"net/netip"
	"strings"
)

// Unknown is what requests are counted as whose peer has no address.
const Unknown = "unknown"

// Client is what a topology says about who sent a request. It has four fields so that it is passed in registers.
type Client struct {
	// Addr is the canonical address (no port, no zone, no IPv4 address in an IPv6 one), not yet masked. The zero Addr: no
	// address is known, and the client is one of those that are counted as Unknown.
	Addr netip.Addr

	// Fallback says why the peer is used though a proxy's entry was to be read.
	Fallback Reason

	// Apart tells that the request had a chain, and that it was of no use. A caller can bring that about, so such
	// requests are counted for the peer and the reason together, and never drain the budget that is the peer's own.
	Apart bool

	// Longer tells that the header has entries to the left of the one that the hops led to. Only then is there
	// something for a [HopCheck] to see.
	Longer bool
}

// Reason says why the client of a request is its peer, or nobody, where a header was to name it.
type Reason uint8

const (
	// None: what the config says to use was there.
	None Reason = iota

	// ShortChain: the chain has fewer entries than hops are stated. No header at all is such a chain.
	ShortChain

	// BadEntry: the entry that counts is not an IP address, or the Forwarded header does not parse.
	BadEntry

	// AllTrusted: every entry is a trusted proxy.
	AllTrusted

	// NoPeer: the peer has no address and no header was read in its place. A peer without an address whose
	// header was read and was of no use has the reason of the header.
	NoPeer

	// UntrustedPeer: the peer sends a chain and is no trusted proxy, so that it counts as the client. It may be a caller that
	// makes a chain up, or a proxy that the config does not know.
	UntrustedPeer

	// Reasons is how many reasons there are.
	Reasons
)

// String is the name of the reason in metrics and logs. None has the empty name.
func (f Reason) String() string {
	switch f {
	case ShortChain:
		return "short_chain"
	case BadEntry:
		return "bad_entry"
	case AllTrusted:
		return "all_trusted"
	case NoPeer:
		return "no_peer"
	case UntrustedPeer:
		return "untrusted_peer"
	}
	return ""
}

// OfChain reports whether the reason is that a chain was of no use.
func (f Reason) OfChain() bool { return f == ShortChain || f == BadEntry || f == AllTrusted }

// direct is the client where the peer is what the config says to use.
func direct(peer netip.Addr) Client {
	if !peer.IsValid() {
		return Client{Fallback: NoPeer}
	}
	return Client{Addr: peer}
}

// Known reports whether the address is that of the client, and not of a proxy whose chain was of no use.
func (c Client) Known() bool { return c.Addr.IsValid() && !c.Apart }

// Network is the masked address, by which clients that a store has no room for are grouped. Requests whose chain was of
// no use are no part of the peer's network, and have none.
func (c Client) Network(p Prefixes) netip.Addr {
	if !c.Known() {
		return netip.Addr{}
	}
	return p.Mask(c.Addr)
}

// AppendAddress appends the masked address, or Unknown.
func (c Client) AppendAddress(buf []byte, p Prefixes) []byte {
	if !c.Addr.IsValid() {
		return append(buf, Unknown...)
	}
	return p.Mask(c.Addr).AppendTo(buf)
}

// AppendIdentity appends what the client is counted as: the masked address, or Unknown, and in front of it the reason
// if a chain was of no use, as in bad_entry@10.0.0.1.
func (c Client) AppendIdentity(buf []byte, p Prefixes) []byte {
	if c.Apart {
		buf = append(append(buf, c.Fallback.String()...), '@')
	}
	return c.AppendAddress(buf, p)
}

// ParseIdentity reads what a client is counted as, and reports whether it could be. The address may be written in any way
// that a proxy may write it, and need not be masked.
func (n NAT64) ParseIdentity(s string) (Client, bool) {
	var c Client
	if reason, rest, found := strings.Cut(s, "@"); found {
		for f := None + 1; f < Reasons; f++ {
			if f.OfChain() && f.String() == reason {
				c.Fallback, c.Apart, s = f, true, rest
			}
		}
	}
	if s == Unknown {
		return c, true
	}
	var ok bool
	c.Addr, ok = n.ParseAddr(s)
	return c, ok
}
