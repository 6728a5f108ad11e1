package replay

import (
	"hash/maphash"
	"math"
	"slices"
)

// census counts how much each client uses of each limit in each window. It is exact up to maxClients clients; beyond, it
// goes on with a random half of them, and again, so that its memory is bounded and its shares stay right on average.
type census struct {
	limits  []LimitInfo
	index   []uint32 // open addressing by hash: index of the client plus 1; 0: free
	clients []censusClient
	uses    []censusUse // of client i and limit j at i*len(limits)+j
	use     []*spread   // by limit: uses of a client in a window
	halved  uint        // how often the clients were halved
}

// censusClient is one client.
type censusClient struct {
	hash     uint64
	requests int64
	refused  int64
}

// censusUse is what a client has used of a limit.
type censusUse struct {
	window int64 // number of the current window
	count  uint32
	most   uint32 // in any window
}

// maxClients is how many clients a census counts one by one.
const maxClients = 1 << 19

var censusSeed = maphash.MakeSeed()

func newCensus(limits []LimitInfo) *census {
	c := &census{limits: limits, index: make([]uint32, 64)}
	for range limits {
		c.use = append(c.use, new(spread))
	}
	return c
}

// add counts a request of a client, and returns the client's fingerprint.
func (c *census) add(identity []byte, at int64, refused bool) uint64 {
	hash := maphash.Bytes(censusSeed, identity)
	if !c.sampled(hash) {
		return hash
	}
	i := c.find(hash)
	if i < 0 {
		if i = c.insert(hash); i < 0 {
			return hash
		}
	}
	client := &c.clients[i]
	client.requests++
	if refused {
		client.refused++
	}
	for j := range c.limits {
		u := &c.uses[i*len(c.limits)+j]
		if window := windowOf(at, c.limits[j].Window); window != u.window {
			c.fold(u, j)
			u.window, u.count = window, 0
		}
		u.count++
	}
	return hash
}

// find is the index of a client, or -1.
func (c *census) find(hash uint64) int {
	mask := uint64(len(c.index) - 1)
	for at := hash & mask; c.index[at] != 0; at = (at + 1) & mask {
		if i := int(c.index[at]) - 1; c.clients[i].hash == hash {
			return i
		}
	}
	return -1
}

// insert adds a client and returns its index, or -1 if it is not sampled any more.
func (c *census) insert(hash uint64) int {
	if len(c.clients) == maxClients {
		c.halve()
		if !c.sampled(hash) {
			return -1
		}
	}
	c.clients = append(c.clients, censusClient{hash: hash})
	for range c.limits {
		c.uses = append(c.uses, censusUse{window: math.MinInt64})
	}
	if 2*len(c.clients) > len(c.index) {
		c.reindex(2 * len(c.index))
	} else {
		c.enter(len(c.clients) - 1)
	}
	return len(c.clients) - 1
}

// enter makes a client known to find.
func (c *census) enter(i int) {
	mask := uint64(len(c.index) - 1)
	at := c.clients[i].hash & mask
	for c.index[at] != 0 {
		at = (at + 1) & mask
	}
	c.index[at] = uint32(i) + 1
}

// reindex makes a new index of all clients.
func (c *census) reindex(size int) {
	c.index = make([]uint32, size)
	for i := range c.clients {
		c.enter(i)
	}
}

// sampled tells whether a client is among those that are counted.
func (c *census) sampled(hash uint64) bool { return hash>>(64-c.halved) == 0 }

// scale is how many clients each of those that are counted stands for.
func (c *census) scale() int64 { return 1 << c.halved }

// exact tells whether every client was counted.
func (c *census) exact() bool { return c.halved == 0 }

// fold takes the use of a window that has ended into account.
func (c *census) fold(u *censusUse, limit int) {
	if u.count > 0 {
		c.use[limit].add(int64(u.count), c.scale())
		u.most = max(u.most, u.count)
	}
}

// halve forgets about half of the clients, by their fingerprints.
func (c *census) halve() {
	c.halved++
	n := 0
	k := len(c.limits)
	for i := range c.clients {
		if !c.sampled(c.clients[i].hash) {
			continue
		}
		c.clients[n] = c.clients[i]
		copy(c.uses[n*k:(n+1)*k], c.uses[i*k:(i+1)*k])
		n++
	}
	c.clients, c.uses = c.clients[:n], c.uses[:n*k]
	c.reindex(len(c.index))
}

// finish takes the windows that have not ended into account. The census must not be added to any more.
func (c *census) finish() {
	for i := range c.uses {
		c.fold(&c.uses[i], i%len(c.limits))
		c.uses[i].count = 0
	}
}

// seen is how many clients there were, and how many of them were refused at least once.
func (c *census) seen() (clients, refused int64) {
	for i := range c.clients {
		if c.clients[i].refused > 0 {
			refused++
		}
	}
	return int64(len(c.clients)) * c.scale(), refused * c.scale()
}

// peaks is how the clients' most in any window is spread.
func (c *census) peaks(limit int) *spread {
	s := new(spread)
	for i := range c.clients {
		if most := c.uses[i*len(c.limits)+limit].most; most > 0 {
			s.add(int64(most), c.scale())
		}
	}
	return s
}

// requests is how many requests and refusals a client has, and whether it was counted.
func (c *census) requests(hash uint64) (requests, refused int64, ok bool) {
	i := c.find(hash)
	if i < 0 {
		return 0, 0, false
	}
	return c.clients[i].requests, c.clients[i].refused, true
}

// spread is how often each value occurred. Small values have a place of their own; there are few different large ones,
// since n of them add up to at least n*n/2 requests.
type spread struct {
	small [256]int64
	large map[int64]int64
	n     int64
}

func (s *spread) add(value, times int64) {
	s.n += times
	if value < int64(len(s.small)) {
		s.small[value] += times
		return
	}
	if s.large == nil {
		s.large = make(map[int64]int64)
	}
	s.large[value] += times
}

// spreadValue is a value and how often it occurred.
type spreadValue struct{ value, times int64 }

// sorted lists the values that occurred.
func (s *spread) sorted() []spreadValue {
	var list []spreadValue
	for v, n := range s.small {
		if n > 0 {
			list = append(list, spreadValue{int64(v), n})
		}
	}
	start := len(list)
	for v, n := range s.large {
		list = append(list, spreadValue{v, n})
	}
	slices.SortFunc(list[start:], func(a, b spreadValue) int { return int(a.value - b.value) })
	return list
}

// quantile is the least value that a share q of all values do not exceed. It is 0 without values.
func quantile(list []spreadValue, q float64) int64 {
	var sum int64
	rank := int64(math.Ceil(q * float64(occurrences(list))))
	for _, v := range list {
		if sum += v.times; sum >= max(rank, 1) {
			return v.value
		}
	}
	return 0
}

// above is how many values are above a limit, and by how much altogether.
func above(list []spreadValue, limit int64) (values, excess int64) {
	for _, v := range list {
		if v.value > limit {
			values += v.times
			excess += (v.value - limit) * v.times
		}
	}
	return values, excess
}

// total is the sum of all values.
func total(list []spreadValue) (sum int64) {
	for _, v := range list {
		sum += v.value * v.times
	}
	return sum
}
