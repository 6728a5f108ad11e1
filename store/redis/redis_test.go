package redis

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// certificate makes a certificate for 127.0.0.1 that is its own authority, and returns the names of its files.
func certificate(t testing.TB) (certFile, keyFile string, pool *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: []string{"redis.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{{127, 0, 0, 1}},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	require.NoError(t, os.WriteFile(certFile, certPEM, 0o600))
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
	require.NoError(t, os.WriteFile(keyFile, keyPEM, 0o600))
	pool = x509.NewCertPool()
	pool.AppendCertsFromPEM(certPEM)
	return certFile, keyFile, pool
}

// unmarshalRedis reads a store block.
func unmarshalRedis(block string) (*Redis, error) {
	r := new(Redis)
	err := r.UnmarshalCaddyfile(caddyfile.NewTestDispenser("redis " + block))
	return r, err
}

// provisionRedis provisions a copy of a store, as Caddy would from JSON.
func provisionRedis(t testing.TB, r *Redis) (*Redis, error) {
	t.Helper()
	raw, err := json.Marshal(r)
	require.NoError(t, err)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	s, err := ctx.LoadModuleByID("http.tiered_limit.stores.redis", raw)
	if err != nil {
		return nil, err
	}
	return s.(*Redis), nil
}

func TestCaddyfile(t *testing.T) {
	r, err := unmarshalRedis(`{
		address     10.0.0.1:26379 10.0.0.2:26379
		mode        sentinel
		master_name limits
		sentinel_username watcher
		sentinel_password {env.SENTINEL}
		username    limiter
		password    {env.SECRET}
		db          3
		tls {
			ca                   ca.pem
			cert                 cert.pem key.pem
			server_name          redis.test
			insecure_skip_verify
		}
		key_prefix  edge
		key_secret  {file./run/secret}
		timeout     250ms
		on_error    local
	}`)
	require.NoError(t, err)
	timeout := caddy.Duration(250 * time.Millisecond)
	assert.Equal(t, &Redis{
		Address: []string{"10.0.0.1:26379", "10.0.0.2:26379"}, Mode: "sentinel", MasterName: "limits",
		SentinelUsername: "watcher", SentinelPassword: "{env.SENTINEL}",
		Username: "limiter", Password: "{env.SECRET}", DB: 3,
		TLS: &TLS{
			CA: "ca.pem", Certificate: "cert.pem", Key: "key.pem", ServerName: "redis.test", InsecureSkipVerify: true,
		},
		KeyPrefix: "edge", KeySecret: "{file./run/secret}", Timeout: &timeout, OnError: "local",
	}, r)
}

func TestDefaults(t *testing.T) {
	for _, block := range []string{"", "{\n}"} {
		r, err := unmarshalRedis(block)
		require.NoError(t, err)
		s, err := provisionRedis(t, r)
		require.NoError(t, err)
		assert.Equal(t, []string{"127.0.0.1:6379"}, s.Address)
		assert.Equal(t, "single", s.Mode)
		assert.Equal(t, "tieredlimit", s.KeyPrefix)
		assert.Equal(t, "deny", s.OnError)
		assert.Equal(t, caddy.Duration(100*time.Millisecond), *s.Timeout)
		assert.Nil(t, s.setup.option.TLSConfig)
		assert.True(t, s.setup.option.DisableRetry, "a script that may have run must not run again")
	}
}

func TestCaddyfileRefusals(t *testing.T) {
	for _, test := range []struct{ block, want string }{
		{"10.0.0.1:6379", `Testfile:1`},
		{"10.0.0.1:6379", `unexpected argument "10.0.0.1:6379"`},
		{"{\nbogus x\n}", `unknown setting "bogus"`},
		{"{\nbogus x\n}", `Testfile:2`},
		{"{\naddress\n}", `address: want at least one`},
		{"{\nmode\n}", `mode: an argument is missing`},
		{"{\nmode replicated\n}", `mode: unknown word "replicated"; want single, sentinel or cluster`},
		{"{\nmode single sentinel\n}", `mode: takes one argument, not 2`},
		{"{\nmode single\nmode single\n}", `mode is stated twice`},
		{"{\npassword \"\"\n}", `password: the argument is empty`},
		{"{\nsentinel_password \"\"\n}", `sentinel_password: the argument is empty`},
		{"{\nsentinel_password\n}", `sentinel_password: an argument is missing`},
		{"{\nsentinel_username a b\n}", `sentinel_username: takes one argument, not 2`},
		{"{\nsentinel_username a\nsentinel_username a\n}", `sentinel_username is stated twice`},
		{"{\ndb x\n}", `db: "x" is not a number from 0`},
		{"{\ndb -1\n}", `db: "-1" is not a number from 0`},
		{"{\ndb 99999999999\n}", `db: "99999999999" is not a number from 0`},
		{"{\ntimeout 0\n}", `timeout: 0 is too short`},
		{"{\ntimeout 0s\n}", `timeout: 0s is too short`},
		{"{\ntimeout -1s\n}", `timeout: -1s is too short`},
		{"{\ntimeout soon\n}", `timeout: "soon" is not a duration`},
		{"{\non_error panic\n}", `on_error: unknown word "panic"; want deny, allow or local`},
		{"{\nkey_prefix a{b\n}", `key_prefix: "a{b" holds a character`},
		{"{\ntls on\n}", `tls: unexpected argument "on"`},
		{"{\ntls {\nca\n}\n}", `tls: ca: an argument is missing`},
		{"{\ntls {\ncert a\n}\n}", `tls: cert: want <file> <key>`},
		{"{\ntls {\ncert a b c\n}\n}", `tls: cert: want <file> <key>`},
		{"{\ntls {\nciphers x\n}\n}", `tls: unknown setting "ciphers"`},
		{"{\ntls {\nciphers x\n}\n}", `Testfile:3`},
		{"{\ntls {\ninsecure_skip_verify yes\n}\n}", `insecure_skip_verify takes no argument, not "yes"`},
		{"{\ntls {\nserver_name a\nserver_name b\n}\n}", `tls: server_name is stated twice`},
	} {
		_, err := unmarshalRedis(test.block)
		assert.ErrorContains(t, err, test.want, "%s", test.block)
	}
}

func TestProvisionRefusals(t *testing.T) {
	certFile, keyFile, _ := certificate(t)
	broken := filepath.Join(t.TempDir(), "broken.pem")
	require.NoError(t, os.WriteFile(broken, []byte("not a certificate"), 0o600))
	short := caddy.Duration(0)
	negative := caddy.Duration(-time.Second)
	for _, test := range []struct {
		want  string
		store Redis
	}{
		{`mode: unknown mode "ring"`, Redis{Mode: "ring"}},
		{`master_name: mode sentinel needs`, Redis{Mode: "sentinel", Address: []string{"a:1"}}},
		{`master_name: only for mode sentinel`, Redis{MasterName: "x"}},
		{`sentinel_password: only for mode sentinel, not single`, Redis{SentinelPassword: "x"}},
		{`sentinel_password: only for mode sentinel, not cluster`, Redis{Mode: "cluster", SentinelPassword: "x"}},
		{`sentinel_username: only for mode sentinel, not single`, Redis{SentinelUsername: "x", SentinelPassword: "y"}},
		{`sentinel_username: a user needs a password`, Redis{Mode: "sentinel", MasterName: "x", SentinelUsername: "y"}},
		{`sentinel_password: `, Redis{Mode: "sentinel", MasterName: "x", SentinelPassword: "{env.TIEREDLIMIT_UNSET}"}},
		{`sentinel_username: `, Redis{Mode: "sentinel", MasterName: "x", SentinelUsername: "{env.TIEREDLIMIT_UNSET}"}},
		{`address: mode single takes one address, not 2`, Redis{Address: []string{"a:1", "b:1"}}},
		{`address: "localhost"`, Redis{Address: []string{"localhost"}}},
		{`address: ":6379"`, Redis{Address: []string{":6379"}}},
		{`address: "a:0"`, Redis{Address: []string{"a:0"}}},
		{`address: "a:65536"`, Redis{Address: []string{"a:65536"}}},
		{`address: "a:x"`, Redis{Address: []string{"a:x"}}},
		{`address: "a b:1"`, Redis{Address: []string{"a b:1"}}},
		{`address: "::1:1"`, Redis{Address: []string{"::1:1"}}},
		{`address: "unix/run"`, Redis{Address: []string{"unix/run"}}},
		{`a unix socket is for mode single`, Redis{Mode: "cluster", Address: []string{"unix//run/x.sock"}}},
		{`want the scheme redis or rediss`, Redis{Address: []string{"http://a:1"}}},
		{`db "x" is not a number`, Redis{Address: []string{"redis://a:1/x"}}},
		{`a query is not understood`, Redis{Address: []string{"redis://a:1/0?x=y"}}},
		{`"" is not a host`, Redis{Address: []string{"redis://:1"}}},
		{`password: the address states another one`, Redis{Address: []string{"redis://:p@a:1"}, Password: "q"}},
		{`username: the address states another one`, Redis{Address: []string{"redis://u:p@a:1"}, Username: "v"}},
		{`db: 1 is stated, but 2 in the address`, Redis{Address: []string{"redis://a:1/2"}, DB: 1}},
		{`db: -1 is out of range`, Redis{DB: -1}},
		{`db: a cluster has only database 0, not 1`, Redis{Mode: "cluster", DB: 1}},
		{`db: a cluster has only database 0, not 2`, Redis{Mode: "cluster", Address: []string{"redis://a:1/2"}}},
		{`timeout: 0s is too short`, Redis{Timeout: &short}},
		{`timeout: -1s is too short`, Redis{Timeout: &negative}},
		{`on_error: unknown answer "retry"`, Redis{OnError: "retry"}},
		{`key_prefix: "a b"`, Redis{KeyPrefix: "a b"}},
		{`key_prefix: "{a}"`, Redis{KeyPrefix: "{a}"}},
		{`tls: ca: open /nowhere/ca.pem`, Redis{TLS: &TLS{CA: "/nowhere/ca.pem"}}},
		{`tls: ca: ` + broken + ` holds no certificate`, Redis{TLS: &TLS{CA: broken}}},
		{`tls: cert: want both`, Redis{TLS: &TLS{Certificate: certFile}}},
		{`tls: cert: want both`, Redis{TLS: &TLS{Key: keyFile}}},
		{`tls: cert: `, Redis{TLS: &TLS{Certificate: keyFile, Key: certFile}}},
		{`password: `, Redis{Password: "{env.TIEREDLIMIT_UNSET}"}},
		{`key_secret: `, Redis{KeySecret: "{file./nowhere/secret}"}},
		{`username: `, Redis{Username: "{unknown.placeholder}"}},
		{`address: `, Redis{Address: []string{"{env.TIEREDLIMIT_UNSET}"}}},
	} {
		_, err := provisionRedis(t, &test.store)
		assert.ErrorContains(t, err, test.want)
	}
}

func TestErrorsShowNoPassword(t *testing.T) {
	for _, address := range []string{
		"redis://u:hunter2@a:1/x", "redis://u:hunter2@a:x/", "http://u:hunter2@a:1", "redis://u:hunter2@:1",
		"redis://u:hunter2@a:1/0?q=1", "redis://u:hunter2@a b:1", "redis://u:hunter2%zz@a:1", "redis://u:hunter2\x7f@a:1",
	} {
		_, err := provisionRedis(t, &Redis{Address: []string{address}})
		if assert.Error(t, err, address) {
			assert.NotContains(t, err.Error(), "hunter2")
		}
	}
}

func TestResolvesPlaceholders(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(file, []byte("from the file\n"), 0o600))
	t.Setenv("TIEREDLIMIT_PASSWORD", "from the environment")
	t.Setenv("TIEREDLIMIT_HOST", "10.1.2.3")
	s, err := provisionRedis(t, &Redis{
		Address: []string{"{env.TIEREDLIMIT_HOST}:6380"}, Password: "{env.TIEREDLIMIT_PASSWORD}",
		KeySecret: "{file." + file + "}", Username: "u",
	})
	require.NoError(t, err)
	assert.Equal(t, []string{"10.1.2.3:6380"}, s.setup.option.InitAddress)
	assert.Equal(t, "from the environment", s.setup.option.Password)
	assert.Equal(t, "u", s.setup.option.Username)
	assert.Equal(t, "from the file", s.KeySecret)
}

func TestAddresses(t *testing.T) {
	for _, test := range []struct {
		address, mode string
		want          endpoint
	}{
		{"localhost:6379", "single", endpoint{network: "tcp", target: "localhost:6379"}},
		{"[::1]:6379", "single", endpoint{network: "tcp", target: "[::1]:6379"}},
		{"unix//run/redis.sock", "single", endpoint{network: "unix", target: "/run/redis.sock"}},
		{"unix:///run/redis.sock", "single", endpoint{network: "unix", target: "/run/redis.sock"}},
		{"redis://a", "single", endpoint{network: "tcp", target: "a:6379"}},
		{"redis://a", "sentinel", endpoint{network: "tcp", target: "a:26379"}},
		{"rediss://u:p%40ss@[::1]:1/7", "single", endpoint{
			network: "tcp", target: "[::1]:1", tls: true, username: "u", password: "p@ss", db: 7,
		}},
		{"redis://:p@a:1/", "cluster", endpoint{network: "tcp", target: "a:1", password: "p"}},
	} {
		got, err := parseAddress(test.address, test.mode)
		require.NoError(t, err, test.address)
		assert.Equal(t, test.want, got, test.address)
	}
}

func TestURLTurnsOnTLS(t *testing.T) {
	s, err := provisionRedis(t, &Redis{Address: []string{"rediss://a:1"}})
	require.NoError(t, err)
	require.NotNil(t, s.setup.option.TLSConfig)
	assert.Equal(t, uint16(tls.VersionTLS12), s.setup.option.TLSConfig.MinVersion)
}

func TestNeedsANamedStack(t *testing.T) {
	s, err := provisionRedis(t, new(Redis))
	require.NoError(t, err)
	_, err = s.Open(store.StackSpec{Name: ".0123", Tiers: []store.TierSpec{plainTier("ip", 1, day)}})
	assert.ErrorContains(t, err, "the stack needs a name")
}

// TestOpensNothingWithAnError tells whether what comes with an error is nil, and not a handle that looks like one.
func TestOpensNothingWithAnError(t *testing.T) {
	s, err := provisionRedis(t, &Redis{OnError: "local"})
	require.NoError(t, err)
	for name, spec := range map[string]store.StackSpec{
		"no name":                   {Name: ".0123", Tiers: []store.TierSpec{plainTier("ip", 1, day)}},
		"refused by local counters": stackOf(store.TierSpec{Name: "ip"}),
		"a tier that occurs twice":  stackOf(plainTier("ip", 1, day), plainTier("ip", 1, day)),
	} {
		counters, err := s.Open(spec)
		require.Error(t, err, name)
		assert.True(t, counters == nil, "%s: got %T, want nil", name, counters)
	}
}

// TestSharesConnections tells which settings share a connection: all that the connection depends on are equal.
func TestSharesConnections(t *testing.T) {
	certFile, keyFile, _ := certificate(t)
	base := Redis{Address: []string{"127.0.0.1:1"}, Password: "p", TLS: &TLS{CA: certFile}}
	digest := func(change func(*Redis)) string {
		r := base
		tls := *base.TLS
		r.TLS = &tls
		change(&r)
		s, err := provisionRedis(t, &r)
		require.NoError(t, err)
		return s.setup.digest
	}
	same := digest(func(*Redis) {})
	for name, change := range map[string]func(*Redis){
		"on_error":   func(r *Redis) { r.OnError = "allow" },
		"key_prefix": func(r *Redis) { r.KeyPrefix = "other" },
		"key_secret": func(r *Redis) { r.KeySecret = "other" },
	} {
		assert.Equal(t, same, digest(change), "%s must not matter", name)
	}
	longer := caddy.Duration(time.Second)
	seen := map[string]string{same: "base"}
	for name, change := range map[string]func(*Redis){
		"address":     func(r *Redis) { r.Address = []string{"127.0.0.1:2"} },
		"mode":        func(r *Redis) { r.Mode = "cluster" },
		"username":    func(r *Redis) { r.Username = "u" },
		"password":    func(r *Redis) { r.Password = "q" },
		"db":          func(r *Redis) { r.DB = 1 },
		"timeout":     func(r *Redis) { r.Timeout = &longer },
		"no tls":      func(r *Redis) { r.TLS = nil },
		"server_name": func(r *Redis) { r.TLS.ServerName = "x" },
		"insecure":    func(r *Redis) { r.TLS.InsecureSkipVerify = true },
		"cert":        func(r *Redis) { r.TLS.Certificate, r.TLS.Key = certFile, keyFile },
		"ca":          func(r *Redis) { r.TLS.CA = "" },
	} {
		got := digest(change)
		assert.Empty(t, seen[got], "%s must matter", name)
		seen[got] = name
	}
	sentinels := func(user, password string) func(*Redis) {
		return func(r *Redis) {
			r.Mode, r.MasterName, r.SentinelUsername, r.SentinelPassword = "sentinel", "m", user, password
		}
	}
	assert.Equal(t, digest(sentinels("u", "p")), digest(sentinels("u", "p")))
	for _, login := range [][2]string{{"", ""}, {"", "p"}, {"u", "p"}, {"u", "q"}, {"v", "p"}} {
		got := digest(sentinels(login[0], login[1]))
		assert.Empty(t, seen[got], "the sentinels' login must matter: %v", login)
		seen[got] = fmt.Sprint(login)
	}
	other, _, _ := certificate(t)
	content, err := os.ReadFile(other)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(certFile, content, 0o600))
	assert.Empty(t, seen[digest(func(*Redis) {})], "the content of the CA file must matter")
}

func TestValidationDoesNotDial(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	accepted := make(chan struct{}, 1)
	go func() {
		if conn, err := listener.Accept(); err == nil {
			conn.Close()
			accepted <- struct{}{}
		}
	}()
	for _, r := range []*Redis{
		{Address: []string{listener.Addr().String()}},
		{Address: []string{listener.Addr().String()}, Mode: "cluster"},
		{Address: []string{listener.Addr().String()}, Mode: "sentinel", MasterName: "m"},
		{Address: []string{listener.Addr().String()}, OnError: "local"},
	} {
		s, err := provisionRedis(t, r)
		require.NoError(t, err)
		c, err := s.Open(stackOf(plainTier("ip", 1, day)))
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	select {
	case <-accepted:
		t.Error("a connection was made before the first decision")
	default:
	}
}
