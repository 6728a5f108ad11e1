package clientip

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
)

// What a client is counted as can be read back, by whoever asks for its counter; and the address alone is what logs show.
func TestClientIdentity(t *testing.T) {
	v4, v6 := netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("2001:db8:1:2:3::4")
	masks := Prefixes{24, 64}
	for identity, c := range map[string]Client{
		"203.0.113.0":              {Addr: v4},
		"2001:db8:1:2::":           {Addr: v6},
		"unknown":                  {},
		"short_chain@203.0.113.0":  {Addr: v4, Fallback: ShortChain, Apart: true},
		"bad_entry@2001:db8:1:2::": {Addr: v6, Fallback: BadEntry, Apart: true},
		"all_trusted@203.0.113.0":  {Addr: v4, Fallback: AllTrusted, Apart: true},
		"bad_entry@unknown":        {Fallback: BadEntry, Apart: true},
		"short_chain@unknown":      {Fallback: ShortChain, Apart: true},
	} {
		assert.Equal(t, identity, string(c.AppendIdentity(nil, masks)))
		assert.Equal(t, "key "+identity, string(c.AppendIdentity([]byte("key "), masks)))
		read, ok := NAT64(nil).ParseIdentity(identity)
		assert.True(t, ok, identity)
		masked := c
		masked.Addr = masks.Mask(c.Addr)
		assert.Equal(t, masked, read, identity)
		assert.Equal(t, identity, string(read.AppendIdentity(nil, masks)), "what is masked stays")
	}
	for want, c := range map[string]Client{
		"203.0.113.0": {Addr: v4, Fallback: BadEntry, Apart: true}, "2001:db8:1:2::": {Addr: v6, Fallback: AllTrusted, Apart: true},
		"unknown": {Fallback: ShortChain, Apart: true},
	} {
		assert.Equal(t, want, string(c.AppendAddress(nil, masks)))
	}
	// Reasons that are no fault of a chain, and a chain that is not there, leave the peer's own identity.
	for _, c := range []Client{{Addr: v4, Fallback: ShortChain}, {Addr: v4, Fallback: UntrustedPeer}} {
		assert.Equal(t, "203.0.113.0", string(c.AppendIdentity(nil, masks)))
	}
	assert.Equal(t, "unknown", string(Client{Fallback: NoPeer}.AppendIdentity(nil, masks)))
}

// An identity is read with the address in any notation; what is no identity is not read.
func TestParseIdentity(t *testing.T) {
	n := nat64(t, "2001:db8:64::/96")
	v4 := netip.MustParseAddr("203.0.113.7")
	for s, want := range map[string]Client{
		"203.0.113.7:443": {Addr: v4}, "[::ffff:203.0.113.7]:443": {Addr: v4}, "2001:db8:64::203.0.113.7": {Addr: v4},
		"bad_entry@[64:ff9b::203.0.113.7]:1": {Addr: v4, Fallback: BadEntry, Apart: true},
		"all_trusted@2001:db8:64::cb00:7107": {Addr: v4, Fallback: AllTrusted, Apart: true},
		"short_chain@203.0.113.7":            {Addr: v4, Fallback: ShortChain, Apart: true},
	} {
		got, ok := n.ParseIdentity(s)
		assert.True(t, ok, s)
		assert.Equal(t, want, got, s)
	}
	for _, s := range []string{
		"", "@", "@203.0.113.7", "bad_entry@", "bad_entry", "bad_entry@x", "no_peer@203.0.113.7", "untrusted_peer@203.0.113.7", "x@203.0.113.7",
		"203.0.113.7@bad_entry", "bad_entry@bad_entry@203.0.113.7", "bad_entry@short_chain@203.0.113.7", "BAD_ENTRY@203.0.113.7", "Unknown",
		"bad_entry @203.0.113.7", "unknown@203.0.113.7", "bad_entry@Unknown", "bad_entry@unknown ",
	} {
		_, ok := n.ParseIdentity(s)
		assert.False(t, ok, s)
	}
}

// Only a chain can be of no use; a missing peer or an untrusted one is not about a chain's contents.
func TestReasonOfChain(t *testing.T) {
	var of []Reason
	for f := range Reasons + 1 {
		if f.OfChain() {
			of = append(of, f)
		}
	}
	assert.Equal(t, []Reason{ShortChain, BadEntry, AllTrusted}, of)
	assert.Equal(t, "", Reasons.String())
}

// An address is the client's unless its chain was of no use, and only then it belongs to its network.
func TestClientKnown(t *testing.T) {
	v4 := netip.MustParseAddr("203.0.113.7")
	masks := Prefixes{16, 64}
	network := netip.MustParseAddr("203.0.0.0")
	for _, c := range []Client{{Addr: v4}, {Addr: v4, Fallback: UntrustedPeer}, {Addr: v4, Fallback: ShortChain}} {
		assert.True(t, c.Known(), "%+v", c)
		assert.Equal(t, network, c.Network(masks), "%+v", c)
	}
	for _, c := range []Client{{}, {Fallback: NoPeer}, {Addr: v4, Fallback: BadEntry, Apart: true}, {Fallback: ShortChain, Apart: true}} {
		assert.False(t, c.Known(), "%+v", c)
		assert.Equal(t, netip.Addr{}, c.Network(masks), "%+v", c)
	}
}

// Where the client comes from in a word, for every combination.
func TestTopologySource(t *testing.T) {
	trusted := trustRanges("10.0.0.0/8")
	for _, c := range []struct {
		topology Topology
		want     string
	}{
		{Topology{Hops: -1}, "not_stated"}, {Topology{Hops: 0}, "peer"}, {Topology{Hops: 0, Trusted: trusted}, "peer"},
		{Topology{Hops: 0, Unix: true}, "peer"}, {Topology{Hops: 1}, "trusted_hops"}, {Topology{Hops: 64}, "trusted_hops"},
		{Topology{Hops: 1, Trusted: trusted}, "both"}, {Topology{Hops: 2, Unix: true}, "both"},
		{Topology{Hops: -1, Trusted: trusted}, "trusted_proxies"}, {Topology{Hops: -1, Unix: true}, "trusted_proxies"},
	} {
		assert.Equal(t, c.want, c.topology.Source())
		assert.Equal(t, c.topology.Trusted != nil || c.topology.Unix, c.topology.Limited())
	}
}
