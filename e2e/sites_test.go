package e2e

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A snippet in two sites makes two stacks; a name in both makes one.
func TestTwoSites(t *testing.T) {
	for _, test := range []struct {
		name, stack string
		second      int // served to the client of the first site by the second
	}{
		{"a snippet", "", 2},
		{"a name", "both", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			port := ports.Free(t)
			startCaddy(t, fmt.Sprintf(`
				(limits) {
					tiered_limit %[2]s {
						trusted_hops 0
						tier ip 2/%[3]s
					}
				}
				http://one.test:%[1]d {
					bind 127.0.0.1
					import limits
					respond one
				}
				http://two.test:%[1]d {
					bind 127.0.0.1
					import limits
					respond two
				}`, port, test.stack, always))
			url := fmt.Sprintf("http://127.0.0.1:%d/", port)
			a, b := clientFrom(t, "127.0.0.11"), clientFrom(t, "127.0.0.12")
			assert.Equal(t, 2, served(t, 4, a, url, "Host", "one.test"), "A, first site")
			assert.Equal(t, test.second, served(t, 4, a, url, "Host", "two.test"), "A, second site")
			assert.Equal(t, "two", get(t, b, url, "Host", "two.test").body, "B, second site")
		})
	}
}

// Nothing is limited where it is not stated who stands in front, and the log says so once.
func TestNothingStated(t *testing.T) {
	port := ports.Free(t)
	c := startCaddy(t, fmt.Sprintf(":%d {\n\tbind 127.0.0.1\n\ttiered_limit {\n\t\ttier ip 1/d\n\t}\n\trespond ok\n}\n", port))
	client := clientFrom(t, "127.0.0.10")
	assert.Equal(t, 20, served(t, 20, client, fmt.Sprintf("http://127.0.0.1:%d/", port), "X-Forwarded-For", "203.0.113.1"))
	if warnings := c.warnings(); assert.Len(t, warnings, 1) {
		assert.Contains(t, warnings[0], "DISABLED")
		assert.Contains(t, warnings[0], "trusted_hops 0")
	}
}
