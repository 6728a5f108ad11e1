package tieredlimit

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
)

// T1: what one client is refused is not charged to the service.
func TestT1RefusedRequestsLeaveOtherTiersAlone(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t1 {
		trusted_hops 0
		tier ip 2/m
		tier global 10/m
	}
	respond ok
}`)
	a, b := request{peer: "198.51.100.1:1"}, request{peer: "198.51.100.2:1"}
	assert.Equal(t, 2, e.served(20, a))
	refused := e.send(a)
	assert.Equal(t, http.StatusTooManyRequests, refused.Code)
	assert.Equal(t, "ip", refused.Header().Get("X-RateLimit-Resource"))
	assert.Equal(t, 1, e.served(1, b))
	assert.Equal(t, []int64{3}, e.used("t1", "global", a))
}
