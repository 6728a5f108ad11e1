package tieredlimit

import (
	"net/http"
	"net/netip"
	"net/textproto"
	"reflect"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// topologyOf reads what the configuration states about the proxies in front: trusted_hops of the handler, and
// trusted_proxies of the server.
func topologyOf(h *Handler, server *caddyhttp.Server) (clientip.Topology, error) {
	t := clientip.Topology{Hops: -1, Header: clientip.DefaultHeader}
	if h.TrustedHops != nil {
		t.Hops = *h.TrustedHops
	}
	if h.ClientIPHeader != "" {
		t.Header = textproto.CanonicalMIMEHeaderKey(h.ClientIPHeader)
	}
	var err error
	if t.NAT64, err = clientip.ParseNAT64(h.NAT64Prefix); err != nil {
		return t, err
	}
	if server == nil {
		return t, nil
	}
	t.Unix = server.TrustedProxiesUnix
	for _, name := range server.ClientIPHeaders {
		t.Headers = append(t.Headers, textproto.CanonicalMIMEHeaderKey(name))
	}
	stated, ranges, static := serverRanges(server)
	switch {
	case !stated:
	case static && len(ranges) == 0 && t.Hops < 0:
		// An empty list, as an empty variable leaves it, states nothing.
	case static:
		trusted, err := parseClients("trusted_proxies", ranges, t.NAT64)
		if err != nil {
			return t, err
		}
		t.Trusted = func(_ *http.Request, addr netip.Addr) bool { return anyContains(trusted, addr) }
	default:
		t.Trusted = func(r *http.Request, addr netip.Addr) bool { return serverTrusts(server, r, addr) }
	}
	return t, nil
}

// rangesField is the field of [caddyhttp.Server] that holds the source of the trusted ranges. Caddy does not export
// it and has emptied TrustedProxiesRaw by the time a handler is provisioned.
const rangesField = "trustedProxies"

// serverRanges reports whether the server states trusted_proxies and, if the source is Caddy's static one, which ranges.
// It only reads, by reflection; a test fails if Caddy renames the field.
func serverRanges(server *caddyhttp.Server) (stated bool, ranges []string, static bool) {
	field := reflect.ValueOf(server).Elem().FieldByName(rangesField)
	if !field.IsValid() || field.Kind() != reflect.Interface || field.IsNil() {
		return false, nil, false
	}
	source := field.Elem()
	if source.Type() != reflect.TypeFor[*caddyhttp.StaticIPRange]() || source.IsNil() {
		return true, nil, false
	}
	list := source.Elem().FieldByName("Ranges")
	if !list.IsValid() {
		return true, nil, false
	}
	for i := range list.Len() {
		ranges = append(ranges, list.Index(i).String())
	}
	return true, ranges, true
}

// serverTrusts asks the server whether it trusts a canonical address. It serves sources whose ranges change. An IPv4
// address is looked for in IPv4 ranges and in v4-mapped ones.
func serverTrusts(server *caddyhttp.Server, r *http.Request, addr netip.Addr) bool {
	return asksServer(server, r, addr) || addr.Is4() && asksServer(server, r, netip.AddrFrom16(addr.As16()))
}

// asksServer puts the question through Caddy's own preparation of a request that comes from the address.
func asksServer(server *caddyhttp.Server, r *http.Request, addr netip.Addr) bool {
	probe := probeRequest(netip.AddrPortFrom(addr, 1).String())
	probe = probe.WithContext(r.Context())
	probe = caddyhttp.PrepareRequest(probe, caddy.NewReplacer(), nil, server)
	trusted, _ := caddyhttp.GetVar(probe.Context(), caddyhttp.TrustedProxyVarKey).(bool)
	return trusted
}

func anyContains(ranges []netip.Prefix, addr netip.Addr) bool {
	for _, p := range ranges {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}
