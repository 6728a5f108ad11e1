package harness

import (
	"fmt"
	"math/rand"
)

// clients are the addresses and user names that requests carry. They are made before the clock runs.
type clients struct {
	first int // the number of the first
	ip    []string
	user  []string
}

func makeClients(first, n int) *clients {
	c := &clients{first: first, ip: make([]string, n), user: make([]string, n)}
	for i := range n {
		k := first + i
		c.ip[i] = fmt.Sprintf("%d.%d.%d.%d", 11+k>>24, k>>16&255, k>>8&255, k&255)
		c.user[i] = fmt.Sprintf("user-%d", k)
	}
	return c
}

// at returns the address and the user of the n-th client.
func (c *clients) at(n int) (ip, user string) { return c.ip[n-c.first], c.user[n-c.first] }

// order is the clients that come one after the other, over and over.
type order []uint32

// orderLength is the length of an order, a power of 2.
const orderLength = 1 << 20

func makeOrder(c Case, seed int64) order {
	o := make(order, orderLength)
	if c.Keys == 1 {
		return o
	}
	random := rand.New(rand.NewSource(seed))
	switch c.Spread {
	case Zipf:
		z := rand.NewZipf(random, 1.1, 1, uint64(c.Keys-1))
		names := random.Perm(c.Keys) // so that those who come often are not neighbours
		for i := range o {
			o[i] = uint32(names[z.Uint64()])
		}
	default:
		for i := range o {
			o[i] = uint32(random.Intn(c.Keys))
		}
	}
	return o
}
