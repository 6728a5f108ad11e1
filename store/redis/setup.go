package redis

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

// setup is everything that a connection depends on. Stacks whose setups are equal share their connections.
type setup struct {
	mode    string
	timeout time.Duration
	option  rueidis.ClientOption
	secrets []string // never to be logged

	// digest identifies the setup, secrets and files included, without telling them.
	digest string
}

const (
	// dialTimeout bounds a connection attempt, log-in included. Attempts go on in the background when the decision
	// that began them has given up, so a server that is slow to reach is reached in the end.
	dialTimeout = 5 * time.Second

	// idlePing is the time without traffic after which a connection is tested, and deadAfter how long the
	// answer may take before the connection counts as lost.
	idlePing  = time.Second
	deadAfter = 2 * time.Second

	// queueScale is the binary logarithm of the commands that may wait for an answer on one connection.
	queueScale = 10

	buffer = 64 << 10
)

// newSetup combines the settings with what the addresses say.
func (r *Redis) newSetup() (*setup, error) {
	s := &setup{mode: r.Mode, timeout: time.Duration(*r.Timeout)}
	login := endpoint{username: r.Username, password: r.Password, db: r.DB}
	encrypted := r.TLS != nil
	networks := make(map[string]string)
	for _, text := range r.Address {
		a, err := parseAddress(text, r.Mode)
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
	if r.Mode == modeCluster && login.db != 0 {
		return nil, fmt.Errorf("db: a cluster has only database 0, not %d", login.db)
	}
	var material []byte
	if encrypted {
		settings := r.TLS
		if settings == nil {
			settings = new(TLS)
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
func (a *endpoint) merge(b endpoint) error {
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
func (s *setup) fill(r *Redis, login endpoint, networks map[string]string) {
	o := &s.option
	o.Username, o.Password, o.SelectDB = login.username, login.password, login.db
	for _, secret := range []string{o.Password, r.SentinelPassword} {
		if secret != "" {
			s.secrets = append(s.secrets, secret)
		}
	}
	o.Dialer = net.Dialer{Timeout: dialTimeout, KeepAlive: idlePing}
	o.ConnWriteTimeout = deadAfter
	o.DialCtxFn = dial(networks)
	// A script that may have run must not run again.
	o.DisableRetry = true
	o.DisableCache = true
	o.ClientSetInfo = rueidis.DisableClientSetInfo
	o.PipelineMultiplex = -1
	o.RingScaleEachConn = queueScale
	o.ReadBufferEachConn, o.WriteBufferEachConn = buffer, buffer
	switch s.mode {
	case modeSingle:
		o.ForceSingleClient = true
	case modeSentinel:
		o.Sentinel = rueidis.SentinelOption{
			MasterSet: r.MasterName, Username: r.SentinelUsername, Password: r.SentinelPassword,
			Dialer: o.Dialer, TLSConfig: o.TLSConfig, TopologyRefreshInterval: 2 * time.Second,
		}
	case modeCluster:
		o.ShuffleInit = true
		o.ClusterOption.MaxMovedRedirections = 3
	}
}

// dial connects, also to sockets, which the client does not know.
func dial(networks map[string]string) func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) {
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
func (s *setup) sum(login endpoint, settings *TLS, material []byte) string {
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
func (s *setup) redact(err error) string {
	text := err.Error()
	for _, secret := range s.secrets {
		text = strings.ReplaceAll(text, secret, "***")
	}
	return text
}
