package redis

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

func init() {
	caddy.RegisterModule(new(Redis))
}

// Redis keeps the counters in Redis or Valkey, so that several instances share one limit.
//
// A request is decided in one round trip, by a script that runs atomically on the server and by the server's clock. A
// client that was refused is refused again from memory until its window ends, asking anew at least every 5 seconds.
// Connections are made at the first request, never at load, and are shared by all stacks with equal settings.
//
// The stack needs a name, which says on every instance that the counters are the same ones. Server version 5 or later.
type Redis struct {
	// Address lists where to connect: host:port, a redis:// or rediss:// URL, or unix//path for a socket. One in mode
	// single, several in the others: the sentinels, or some nodes of the cluster. Placeholders are resolved at load.
	// Default: 127.0.0.1:6379.
	Address []string `json:"address,omitempty"`

	// Mode is how the servers are arranged: single, sentinel or cluster. Default: single.
	Mode string `json:"mode,omitempty"`

	// MasterName is the name under which the sentinels know the master. Required in mode sentinel.
	MasterName string `json:"master_name,omitempty"`

	// SentinelUsername is the user to log in to the sentinels as. Placeholders are resolved at load. Only for mode
	// sentinel. Default: the sentinels' default user.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// SentinelPassword is the password of the sentinels, which need not be that of the servers. Placeholders are resolved
	// at load. Only for mode sentinel. Default: none.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// Username is the user to log in as. Placeholders are resolved at load. Default: the server's default user.
	Username string `json:"username,omitempty"`

	// Password is the password to log in with. Placeholders are resolved at load, so that it can come from the
	// environment or from a file. Default: none.
	Password string `json:"password,omitempty"`

	// DB is the number of the database. A cluster has only 0. Default: 0.
	DB int `json:"db,omitempty"`

	// TLS turns on encryption and says whom to trust. Default: off, unless the address is a rediss:// URL.
	TLS *TLS `json:"tls,omitempty"`

	// KeyPrefix begins every key, before a colon. Default: tieredlimit.
	KeyPrefix string `json:"key_prefix,omitempty"`

	// KeySecret keys the fingerprints of clients and users in the keys' names, so that nobody who can read those can
	// search for an identity. It must be the same on every instance. Placeholders are resolved at load. Default: none;
	// fingerprints are then plain hashes.
	KeySecret string `json:"key_secret,omitempty"`

	// Timeout is how long a decision may take, connecting included. Default: 100ms.
	Timeout *caddy.Duration `json:"timeout,omitempty"`

	// OnError says what becomes of a request when the server cannot decide in time: deny answers 503 with Retry-After,
	// allow serves it, local limits it by counters in this process. Default: deny.
	OnError string `json:"on_error,omitempty"`

	logger *zap.Logger
	keys   keyspace
	setup  *setup

	// forgetful turns off the memory of refusals, for tests that compare every counter.
	forgetful bool
}

const (
	modeSingle   = "single"
	modeSentinel = "sentinel"
	modeCluster  = "cluster"

	onErrorDeny  = "deny"
	onErrorAllow = "allow"
	onErrorLocal = "local"

	defaultPrefix  = "tieredlimit"
	defaultTimeout = 100 * time.Millisecond
	lastDB         = 1<<31 - 1
)

// CaddyModule returns the module's information.
func (*Redis) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.tiered_limit.stores.redis",
		New: func() caddy.Module { return new(Redis) },
	}
}

// Provision sets defaults, resolves placeholders and reads the files of the TLS block. It does not connect.
func (r *Redis) Provision(ctx caddy.Context) error {
	r.logger = ctx.Logger()
	r.setDefaults()
	if err := r.resolve(caddy.NewReplacer()); err != nil {
		return err
	}
	if err := r.Validate(); err != nil {
		return err
	}
	var err error
	if r.setup, err = r.newSetup(); err != nil {
		return err
	}
	r.keys = newKeyspace(r.KeyPrefix, r.KeySecret)
	return nil
}

// setDefaults fills in what was not stated.
func (r *Redis) setDefaults() {
	if len(r.Address) == 0 {
		r.Address = []string{"127.0.0.1:6379"}
	}
	if r.Mode == "" {
		r.Mode = modeSingle
	}
	if r.KeyPrefix == "" {
		r.KeyPrefix = defaultPrefix
	}
	if r.OnError == "" {
		r.OnError = onErrorDeny
	}
	if r.Timeout == nil {
		timeout := caddy.Duration(defaultTimeout)
		r.Timeout = &timeout
	}
}

// resolve replaces the placeholders, which must be known and have a value.
func (r *Redis) resolve(repl *caddy.Replacer) error {
	fields := []struct {
		name  string
		value *string
	}{
		{"master_name", &r.MasterName},
		{"sentinel_username", &r.SentinelUsername},
		{"sentinel_password", &r.SentinelPassword},
		{"username", &r.Username},
		{"password", &r.Password},
		{"key_secret", &r.KeySecret},
	}
	for _, field := range fields {
		value, err := repl.ReplaceOrErr(*field.value, true, true)
		if err != nil {
			return fmt.Errorf("%s: %w", field.name, err)
		}
		*field.value = value
	}
	for i := range r.Address {
		value, err := repl.ReplaceOrErr(r.Address[i], true, true)
		if err != nil {
			return fmt.Errorf("address: %w", err)
		}
		r.Address[i] = value
	}
	return nil
}

// Validate refuses settings that cannot work.
func (r *Redis) Validate() error {
	if err := r.checkMode(); err != nil {
		return err
	}
	if r.DB < 0 || r.DB > lastDB {
		return fmt.Errorf("db: %d is out of range; want 0 to %d", r.DB, lastDB)
	}
	if time.Duration(*r.Timeout) < time.Millisecond {
		return fmt.Errorf("timeout: %v is too short; want at least 1ms", time.Duration(*r.Timeout))
	}
	switch r.OnError {
	case onErrorDeny, onErrorAllow, onErrorLocal:
	default:
		return fmt.Errorf("on_error: unknown answer %q; want deny, allow or local", r.OnError)
	}
	return checkPrefix(r.KeyPrefix)
}

// checkMode refuses what does not go with the mode.
func (r *Redis) checkMode() error {
	switch r.Mode {
	case modeSingle:
		if len(r.Address) > 1 {
			return fmt.Errorf("address: mode single takes one address, not %d; several are for mode sentinel or cluster",
				len(r.Address))
		}
	case modeSentinel:
		if r.MasterName == "" {
			return errors.New("master_name: mode sentinel needs the name under which the sentinels know the master")
		}
		if r.SentinelUsername != "" && r.SentinelPassword == "" {
			return errors.New("sentinel_username: a user needs a password; want sentinel_password too")
		}
		return nil
	case modeCluster:
		if r.DB != 0 {
			return fmt.Errorf("db: a cluster has only database 0, not %d", r.DB)
		}
	default:
		return fmt.Errorf("mode: unknown mode %q; want single, sentinel or cluster", r.Mode)
	}
	for _, field := range []struct{ name, value string }{
		{"master_name", r.MasterName},
		{"sentinel_username", r.SentinelUsername},
		{"sentinel_password", r.SentinelPassword},
	} {
		if field.value != "" {
			return fmt.Errorf("%s: only for mode sentinel, not %s", field.name, r.Mode)
		}
	}
	return nil
}

// checkPrefix refuses prefixes that would take the stack's part as the hash tag of the key, or hide in a listing.
func checkPrefix(prefix string) error {
	if len(prefix) > 128 {
		return fmt.Errorf("key_prefix: %d bytes is too long; want at most 128", len(prefix))
	}
	bad := strings.IndexFunc(prefix, func(c rune) bool { return c <= ' ' || c > '~' || c == '{' || c == '}' })
	if bad >= 0 {
		return fmt.Errorf("key_prefix: %q holds a character other than printable ASCII without space and braces", prefix)
	}
	return nil
}

// Shared implements [store.Shared].
func (*Redis) Shared() {}

// Open returns the counters of a stack. It does not connect.
func (r *Redis) Open(spec store.StackSpec) (store.Counters, error) {
	if !spec.Named {
		return nil, errors.New("redis: the stack needs a name, as in \"tiered_limit api { ... }\": " +
			"it says on every instance that these are the same counters")
	}
	c, err := openCounters(r, spec)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Interface guards
var (
	_ caddy.Module      = (*Redis)(nil)
	_ caddy.Provisioner = (*Redis)(nil)
	_ caddy.Validator   = (*Redis)(nil)
	_ store.Store       = (*Redis)(nil)
	_ store.Shared      = (*Redis)(nil)
)
