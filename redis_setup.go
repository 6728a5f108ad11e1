package tieredlimit

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/redis/rueidis"
)

// redisSetup is everything that a connection depends on. Stacks whose setups are equal share their connections.
type redisSetup struct {
	mode    string
	timeout time.Duration
	option  rueidis.ClientOption
	secrets []string // never to be logged

	// digest identifies the setup, secrets and files included, without telling them.
	digest string
}

const (
	// redisDialTimeout bounds a connection attempt, log-in included. Attempts go on in the background when the decision
	// that began them has given up, so a server that is slow to reach is reached in the end.
	redisDialTimeout = 5 * time.Second

	// redisIdlePing is the time without traffic after which a connection is tested, and redisDeadAfter how long the
	// answer may take before the connection counts as lost.
	redisIdlePing  = time.Second
	redisDeadAfter = 2 * time.Second

	// redisQueueScale is the binary logarithm of the commands that may wait for an answer on one connection.
	redisQueueScale = 10

	redisBuffer = 64 << 10
)

// newSetup combines the settings with what the addresses say.
func (r *Redis) newSetup() (*redisSetup, error) {
	s := &redisSetup{mode: r.Mode, timeout: time.Duration(*r.Timeout)}
	login := redisAddress{username: r.Username, password: r.Password, db: r.DB}
	encrypted := r.TLS != nil
	networks := make(map[string]string)
	for _, text := range r.Address {
		a, err := parseRedisAddress(text, r.Mode)
		if err != nil {
			return nil, err
		}
		if err := login.merge(a); err != nil {
			return nil, err
		}
		encrypted = encrypted || a.tls
		networks[a.target] = a.network
		s.option.InitAddress = append(s.option.InitAddress, a.target)
	}
	if r.Mode == redisCluster && login.db != 0 {
		return nil, fmt.Errorf("db: a cluster has only database 0, not %d", login.db)
	}
	var material []byte
	if encrypted {
		settings := r.TLS
		if settings == nil {
			settings = new(RedisTLS)
		}
		var err error
		if s.option.TLSConfig, material, err = settings.config(); err != nil {
			return nil, err
		}
	}
	s.fill(r, login, networks)
	s.digest = s.sum(login, r.TLS, material)
	return s, nil
}

// merge adds what a URL says, which must not contradict what is known.
func (a *redisAddress) merge(b redisAddress) error {
	if b.username != "" {
		if a.username != "" && a.username != b.username {
			return errors.New("username: the address states another one")
		}
		a.username = b.username
	}
	if b.password != "" {
		if a.password != "" && a.password != b.password {
			return errors.New("password: the address states another one")
		}
		a.password = b.password
	}
	if b.db != 0 {
		if a.db != 0 && a.db != b.db {
			return fmt.Errorf("db: %d is stated, but %d in the address", a.db, b.db)
		}
		a.db = b.db
	}
	return nil
}

// fill sets the client's options.
func (s *redisSetup) fill(r *Redis, login redisAddress, networks map[string]string) {
	o := &s.option
	o.Username, o.Password, o.SelectDB = login.username, login.password, login.db
	for _, secret := range []string{o.Password, r.SentinelPassword} {
		if secret != "" {
			s.secrets = append(s.secrets, secret)
		}
	}
	o.Dialer = net.Dialer{Timeout: redisDialTimeout, KeepAlive: redisIdlePing}
	o.ConnWriteTimeout = redisDeadAfter
	o.DialCtxFn = redisDial(networks)
	// A script that may have run must not run again.
	o.DisableRetry = true
	o.DisableCache = true
	o.ClientSetInfo = rueidis.DisableClientSetInfo
	o.PipelineMultiplex = -1
	o.RingScaleEachConn = redisQueueScale
	o.ReadBufferEachConn, o.WriteBufferEachConn = redisBuffer, redisBuffer
	switch s.mode {
	case redisSingle:
		o.ForceSingleClient = true
	case redisSentinel:
		o.Sentinel = rueidis.SentinelOption{
			MasterSet: r.MasterName, Username: r.SentinelUsername, Password: r.SentinelPassword,
			Dialer: o.Dialer, TLSConfig: o.TLSConfig, TopologyRefreshInterval: 2 * time.Second,
		}
	case redisCluster:
		o.ShuffleInit = true
		o.ClusterOption.MaxMovedRedirections = 3
	}
}

// redisDial connects, also to sockets, which the client does not know.
func redisDial(networks map[string]string) func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) {
	return func(ctx context.Context, target string, dialer *net.Dialer, config *tls.Config) (net.Conn, error) {
		network := networks[target]
		if network == "" {
			network = "tcp" // a node that another one told of
		}
		if config == nil {
			return dialer.DialContext(ctx, network, target)
		}
		encrypted := tls.Dialer{NetDialer: dialer, Config: config}
		return encrypted.DialContext(ctx, network, target)
	}
}

// sum is the digest.
func (s *redisSetup) sum(login redisAddress, settings *RedisTLS, material []byte) string {
	h := sha256.New()
	o := &s.option
	fmt.Fprintf(h, "%q %q %q %q %q %d %v", s.mode, o.InitAddress, o.Sentinel.MasterSet, login.username, login.password,
		login.db, s.timeout)
	fmt.Fprintf(h, " sentinel %q %q", o.Sentinel.Username, o.Sentinel.Password)
	if o.TLSConfig != nil {
		fmt.Fprintf(h, " tls %t %q %q", o.TLSConfig.InsecureSkipVerify, o.TLSConfig.ServerName, material)
	}
	if settings != nil {
		fmt.Fprintf(h, " %q %q %q", settings.CA, settings.Certificate, settings.Key)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// redact makes an error fit for the log.
func (s *redisSetup) redact(err error) string {
	text := err.Error()
	for _, secret := range s.secrets {
		text = strings.ReplaceAll(text, secret, "***")
	}
	return text
}
