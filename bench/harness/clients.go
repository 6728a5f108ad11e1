package harness

import (
	"fmt"
	"math/rand"
)

// visits are the addresses and user names of requests, in the order in which they come. They are made before the clock
// runs, in one piece that the garbage collector has no work with and the processor reads ahead, as a server finds a
// request's fields in the cache, having just read them off the connection.
type visits struct {
	n    int
	text string
	at   []uint32 // where each text begins: an address, a user, the next address, ...
}

// makeVisits makes n requests, of which the i-th is of the client that is returned for i.
func makeVisits(n int, client func(i int) int) *visits {
	v := &visits{n: n, at: make([]uint32, 0, 2*n+1)}
	buf := make([]byte, 0, n*28)
	mark := func() { v.at = append(v.at, uint32(len(buf))) }
	for i := range n {
		k := client(i)
		mark()
		buf = fmt.Appendf(buf, "%d.%d.%d.%d", 11+k>>24, k>>16&255, k>>8&255, k&255)
		mark()
		buf = fmt.Appendf(buf, "user-%d", k)
	}
	mark()
	v.text = string(buf)
	return v
}

// from makes a request of each of so many clients, one after the other.
func from(first, n int) *visits { return makeVisits(n, func(i int) int { return first + i }) }

// of returns the address and the user of the i-th request.
func (v *visits) of(i int) (ip, user string) {
	at := v.at[2*i:]
	return v.text[at[0]:at[1]], v.text[at[1]:at[2]]
}

// visitsLength is how many requests there are of a case, a power of 2. Then the first one comes again.
const visitsLength = 1 << 19

// visitsOf makes the requests of a case.
func visitsOf(c Case, seed int64) *visits {
	return makeVisits(visitsLength, clientsOf(c, rand.New(rand.NewSource(seed))))
}

// clientsOf says which client comes next.
func clientsOf(c Case, random *rand.Rand) func(int) int {
	if c.Spread == Zipf {
		z := rand.NewZipf(random, 1.1, 1, uint64(c.Keys-1))
		names := random.Perm(c.Keys) // so that those who come often are not neighbours
		return func(int) int { return names[z.Uint64()] }
	}
	return func(int) int { return random.Intn(c.Keys) }
}
