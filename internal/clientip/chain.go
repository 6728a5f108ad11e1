package clientip

import "strings"

// Chain walks the entries of a forwarding header from the right to the left, over all field lines as if they were one.
// Empty entries count. [Forwarded.Open] makes one.
type Chain struct {
	commas
	forwarded *Forwarded // in place of these, if the header is Forwarded
	read      int        // elements of it that Next has returned
}

// Next is the next entry to the left, and whether there is one. An entry is as it stands in the header, with the blanks
// around it; of an element of Forwarded it is the value of "for", without quotes and escapes. Of a Forwarded header only
// the rightmost MaxHops+1 elements are known.
func (c *Chain) Next() (string, bool) {
	if c.forwarded == nil {
		return c.next()
	}
	entry, ok := c.forwarded.fromRight(c.read + 1)
	if ok {
		c.read++
	}
	return entry, ok
}

// Len is how many entries there are further to the left.
func (c *Chain) Len() int {
	if c.forwarded == nil {
		return c.len()
	}
	return c.forwarded.count - c.read
}

// commas walks what stands between commas. Source: RFC 9110 section 5.3. It does not allocate and looks no further than it
// is asked to.
type commas struct {
	lines []string // those not yet begun
	rest  string   // what is left of the one that has been, if open
	open  bool
}

// next is the next entry to the left, and whether there is one.
func (c *commas) next() (string, bool) {
	if !c.open {
		last := len(c.lines) - 1
		if last < 0 {
			return "", false
		}
		c.rest, c.lines = c.lines[last], c.lines[:last]
	}
	i := strings.LastIndexByte(c.rest, ',')
	entry := c.rest[i+1:]
	if c.open = i >= 0; c.open {
		c.rest = c.rest[:i]
	}
	return entry, true
}

// skip is the n-th entry to the left, and whether there is one.
func (c *commas) skip(n int) (entry string, ok bool) {
	for range n {
		if entry, ok = c.next(); !ok {
			return "", false
		}
	}
	return entry, ok
}

// more reports whether there is a further entry to the left.
func (c *commas) more() bool { return c.open || len(c.lines) > 0 }

// len is how many entries there are further to the left.
func (c *commas) len() int {
	n := 0
	if c.open {
		n = strings.Count(c.rest, ",") + 1
	}
	for _, line := range c.lines {
		n += strings.Count(line, ",") + 1
	}
	return n
}
