package redis

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// TLS is how to encrypt the connections to a [Redis] store, and whom to trust.
type TLS struct {
	// CA is a file with the certificates to trust, in PEM form. Default: those of the system.
	CA string `json:"ca,omitempty"`

	// Certificate is a file with the certificate to show to the server, in PEM form. Default: none.
	Certificate string `json:"certificate,omitempty"`

	// Key is a file with the certificate's key, in PEM form.
	Key string `json:"key,omitempty"`

	// ServerName is the name that the server's certificate must hold. Default: the host of the address.
	ServerName string `json:"server_name,omitempty"`

	// InsecureSkipVerify accepts any certificate: whoever sits between can then read and forge everything.
	// Default: false.
	InsecureSkipVerify bool `json:"insecure_skip_verify,omitempty"`
}

// config reads the files. The material is what was read, so that changed files can be told from unchanged ones.
func (t *TLS) config() (config *tls.Config, material []byte, err error) {
	config = &tls.Config{
		MinVersion:         tls.VersionTLS12,
		ServerName:         t.ServerName,
		InsecureSkipVerify: t.InsecureSkipVerify, //nolint:gosec // stated by the user
	}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, nil, fmt.Errorf("tls: ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, nil, fmt.Errorf("tls: ca: %s holds no certificate in PEM form", t.CA)
		}
		material = append(material, pem...)
	}
	if t.Certificate == "" && t.Key == "" {
		return config, material, nil
	}
	if t.Certificate == "" || t.Key == "" {
		return nil, nil, errors.New("tls: cert: want both the certificate's file and the key's")
	}
	certificate, err := tls.LoadX509KeyPair(t.Certificate, t.Key)
	if err != nil {
		return nil, nil, fmt.Errorf("tls: cert: %w", err)
	}
	config.Certificates = []tls.Certificate{certificate}
	for _, part := range certificate.Certificate {
		material = append(material, part...)
	}
	return config, material, nil
}
