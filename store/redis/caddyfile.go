package redis

import (
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// UnmarshalCaddyfile reads the block of a store line:
//
//	store redis {
//		address           <host:port>...
//		mode              single|sentinel|cluster
//		master_name       <name>
//		sentinel_username <user>
//		sentinel_password <password>
//		username          <user>
//		password          <password>
//		db                <n>
//		tls {
//			ca                   <file>
//			cert                 <file> <key>
//			server_name          <name>
//			insecure_skip_verify
//		}
//		key_prefix        <prefix>
//		key_secret        <secret>
//		timeout           <duration>
//		on_error          deny|allow|local
//	}
func (r *Redis) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name of the store
	if d.NextArg() {
		return d.Errf("redis: unexpected argument %q; settings go into a block", d.Val())
	}
	seen := make(map[string]bool)
	for d.NextBlock(0) {
		option := d.Val()
		if seen[option] {
			return d.Errf("redis: %s is stated twice", option)
		}
		seen[option] = true
		if err := r.unmarshalOption(d, option); err != nil {
			return err
		}
	}
	return nil
}

// unmarshalOption reads one line, or the tls block.
func (r *Redis) unmarshalOption(d *caddyfile.Dispenser, option string) error {
	switch option {
	case "address":
		r.Address = d.RemainingArgs()
		if len(r.Address) == 0 {
			return d.Err("redis: address: want at least one <host:port>")
		}
		return nil
	case "tls":
		r.TLS = new(TLS)
		return r.TLS.unmarshal(d)
	}
	text := map[string]*string{
		"mode": &r.Mode, "master_name": &r.MasterName, "username": &r.Username, "password": &r.Password,
		"sentinel_username": &r.SentinelUsername, "sentinel_password": &r.SentinelPassword,
		"key_prefix": &r.KeyPrefix, "key_secret": &r.KeySecret, "on_error": &r.OnError,
	}
	into, known := text[option]
	if !known && option != "db" && option != "timeout" {
		return d.Errf("redis: unknown setting %q; want address, mode, master_name, sentinel_username, "+
			"sentinel_password, username, password, db, tls, key_prefix, key_secret, timeout or on_error", option)
	}
	value, err := argument(d, option)
	if err != nil {
		return err
	}
	if known {
		*into = value
		return r.checkWord(d, option, value)
	}
	if option == "db" {
		return r.unmarshalDB(d, value)
	}
	return r.unmarshalTimeout(d, value)
}

// checkWord refuses unknown words where the line can still be named.
func (r *Redis) checkWord(d *caddyfile.Dispenser, option, value string) error {
	words := map[string][]string{
		"mode":     {modeSingle, modeSentinel, modeCluster},
		"on_error": {onErrorDeny, onErrorAllow, onErrorLocal},
	}[option]
	for _, word := range words {
		if value == word {
			return nil
		}
	}
	if words != nil {
		return d.Errf("redis: %s: unknown word %q; want %s, %s or %s", option, value, words[0], words[1], words[2])
	}
	if option == "key_prefix" {
		if err := checkPrefix(value); err != nil {
			return d.Errf("redis: %v", err)
		}
	}
	return nil
}

func (r *Redis) unmarshalDB(d *caddyfile.Dispenser, value string) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 || n > lastDB {
		return d.Errf("redis: db: %q is not a number from 0 to %d", value, lastDB)
	}
	r.DB = n
	return nil
}

func (r *Redis) unmarshalTimeout(d *caddyfile.Dispenser, value string) error {
	length, err := caddy.ParseDuration(value)
	if err != nil {
		return d.Errf("redis: timeout: %q is not a duration", value)
	}
	if length < time.Millisecond {
		return d.Errf("redis: timeout: %s is too short; want at least 1ms", value)
	}
	timeout := caddy.Duration(length)
	r.Timeout = &timeout
	return nil
}

// unmarshal reads the tls block.
func (t *TLS) unmarshal(d *caddyfile.Dispenser) error {
	if d.NextArg() {
		return d.Errf("redis: tls: unexpected argument %q; settings go into a block", d.Val())
	}
	seen := make(map[string]bool)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		if seen[option] {
			return d.Errf("redis: tls: %s is stated twice", option)
		}
		seen[option] = true
		var err error
		switch option {
		case "ca":
			t.CA, err = argument(d, "tls: ca")
		case "server_name":
			t.ServerName, err = argument(d, "tls: server_name")
		case "cert":
			if !d.AllArgs(&t.Certificate, &t.Key) {
				err = d.Err("redis: tls: cert: want <file> <key>")
			}
		case "insecure_skip_verify":
			t.InsecureSkipVerify = true
			if d.NextArg() {
				err = d.Errf("redis: tls: insecure_skip_verify takes no argument, not %q", d.Val())
			}
		default:
			err = d.Errf("redis: tls: unknown setting %q; want ca, cert, server_name or insecure_skip_verify", option)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// argument reads the one argument of a line. It never repeats the argument, which may be a secret.
func argument(d *caddyfile.Dispenser, option string) (string, error) {
	if !d.NextArg() {
		return "", d.Errf("redis: %s: an argument is missing", option)
	}
	value := d.Val()
	if value == "" {
		return "", d.Errf("redis: %s: the argument is empty; is a variable set but empty?", option)
	}
	if d.CountRemainingArgs() > 0 {
		return "", d.Errf("redis: %s: takes one argument, not %d", option, 1+d.CountRemainingArgs())
	}
	return value, nil
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Redis)(nil)
