// Package ports finds ports for servers that tests start.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
)

// Ports are taken from below those that systems give to outgoing connections, so that none of these is in the way when
// the server comes to listen; and 10000 above each is left alone too, where a Redis cluster has its bus.
const (
	first = 10_000
	count = 10_000
)

var (
	mu    sync.Mutex
	given = make(map[int]bool)
)

// Free returns a port on which nothing listens, neither by TCP nor by UDP, and which this process has not been given
// before.
func Free(t testing.TB) int {
	t.Helper()
	mu.Lock()
	defer mu.Unlock()
	for range 1000 {
		port := first + rand.IntN(count)
		if !given[port] && free(port) {
			given[port] = true
			return port
		}
	}
	t.Fatal("no port is free for TCP and UDP")
	return 0
}

func free(port int) bool {
	address := fmt.Sprintf(":%d", port)
	tcp, err := net.Listen("tcp", address)
	if err != nil {
		return false
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp", address)
	if err != nil {
		return false
	}
	defer udp.Close()
	return true
}
