package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// certificate writes a certificate for localhost and its key, and returns their files and who trusts it.
func certificate(t *testing.T) (certFile, keyFile string, trust *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		DNSNames:     []string{"localhost"},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		IsCA:         true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	keyBytes, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	dir := tempDir(t)
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	require.NoError(t, os.WriteFile(certFile, certPEM, 0o600))
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyBytes}), 0o600))
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(certPEM))
	return certFile, keyFile, &tls.Config{RootCAs: pool, ServerName: "localhost"}
}

// clientsByProtocol are clients at one address that each speak one version of HTTP.
func clientsByProtocol(t *testing.T, source string, trust *tls.Config) map[string]*http.Client {
	t.Helper()
	over := func(set func(*http.Protocols)) *http.Client {
		c := clientFrom(t, source)
		transport := c.Transport.(*http.Transport)
		transport.TLSClientConfig = trust.Clone()
		transport.Protocols = new(http.Protocols)
		set(transport.Protocols)
		return c
	}
	return map[string]*http.Client{
		"h1":  over(func(p *http.Protocols) { p.SetHTTP1(true) }),
		"h2":  over(func(p *http.Protocols) { p.SetHTTP2(true) }),
		"h2c": over(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }),
		"h3":  clientOverQUIC(t, source, trust),
	}
}

// clientOverQUIC is a client that speaks HTTP/3 from a loopback address.
func clientOverQUIC(t *testing.T, source string, trust *tls.Config) *http.Client {
	t.Helper()
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(source)})
	require.NoError(t, err)
	over := &quic.Transport{Conn: socket}
	transport := &http3.Transport{
		TLSClientConfig: trust.Clone(),
		Dial: func(ctx context.Context, addr string, tlsConf *tls.Config, conf *quic.Config) (*quic.Conn, error) {
			target, err := net.ResolveUDPAddr("udp", addr)
			if err != nil {
				return nil, err
			}
			return over.DialEarly(ctx, target, tlsConf, conf)
		},
	}
	t.Cleanup(func() {
		_ = transport.Close()
		_ = over.Close()
		_ = socket.Close()
	})
	return &http.Client{Transport: transport, Timeout: patience}
}

// A client has one budget, whichever version of HTTP it speaks, and each of them carries the same fields.
func TestProtocolsShareABudget(t *testing.T) {
	certFile, keyFile, trust := certificate(t)
	plain, secure := ports.Free(t), ports.Free(t)
	startCaddy(t, fmt.Sprintf(`
		{
			auto_https off
			servers {
				protocols h1 h2 h2c h3
			}
		}
		(site) {
			bind 127.0.0.1
			tiered_limit api {
				trusted_hops 0
				tier ip 8/%[5]s
			}
			respond {http.request.proto}
		}
		http://localhost:%[1]d {
			import site
		}
		https://localhost:%[2]d {
			tls %[3]s %[4]s
			import site
		}`, plain, secure, certFile, keyFile, always))
	clients := clientsByProtocol(t, "127.0.0.11", trust)
	others := clientsByProtocol(t, "127.0.0.12", trust)
	order := []struct{ name, proto, url string }{
		{"h1", "HTTP/1.1", fmt.Sprintf("https://127.0.0.1:%d/", secure)},
		{"h2", "HTTP/2.0", fmt.Sprintf("https://127.0.0.1:%d/", secure)},
		{"h2c", "HTTP/2.0", fmt.Sprintf("http://127.0.0.1:%d/", plain)},
		{"h3", "HTTP/3.0", fmt.Sprintf("https://127.0.0.1:%d/", secure)},
	}
	left := 8
	for range 2 {
		for _, p := range order {
			a := get(t, clients[p.name], p.url, "Host", "localhost")
			left--
			require.Equal(t, 200, a.status, p.name)
			assert.Equal(t, p.proto, a.body, "the version that Caddy saw")
			assert.Equal(t, p.proto, a.proto, "the version of the answer")
			assert.Equal(t, fmt.Sprint(left), a.field(t, "X-Ratelimit-Remaining"), p.name)
		}
	}
	for _, p := range order {
		a := get(t, clients[p.name], p.url, "Host", "localhost")
		assert.Equal(t, "429 ip", a.told(), p.name)
		assert.Equal(t, "0", a.field(t, "X-Ratelimit-Remaining"), p.name)
		assert.NotEmpty(t, a.field(t, "Retry-After"), p.name)
		assert.Contains(t, a.body, "quota-exceeded", p.name)
		assert.Equal(t, "200 ip", get(t, others[p.name], p.url, "Host", "localhost").told(), "another client, %s", p.name)
	}
}
