package ports

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFree(t *testing.T) {
	seen := make(map[int]bool)
	for range 100 {
		port := Free(t)
		assert.False(t, seen[port], "%d twice", port)
		assert.True(t, port >= first && port < first+count, "%d", port)
		seen[port] = true
	}
}

func TestFreeSeesWhoListens(t *testing.T) {
	port := Free(t)
	require.True(t, free(port))
	tcp, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	require.NoError(t, err)
	assert.False(t, free(port), "by TCP")
	require.NoError(t, tcp.Close())
	udp, err := net.ListenPacket("udp", fmt.Sprintf("127.0.0.1:%d", port))
	require.NoError(t, err)
	assert.False(t, free(port), "by UDP")
	require.NoError(t, udp.Close())
}
