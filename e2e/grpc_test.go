package e2e

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	health_v1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
)

// A gRPC client behind the limiter is told RESOURCE_EXHAUSTED and how long to wait, for unary calls and streams. A retry
// policy of its own heeds the wait: it gives up where that is beyond its deadline, and does not ask again before.
func TestGRPCClientsReadARefusal(t *testing.T) {
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	health_v1.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(socket) }()
	t.Cleanup(server.Stop)
	port := ports.Free(t)
	startCaddy(t, fmt.Sprintf(`
		{
			servers {
				protocols h1 h2 h2c
			}
		}
		http://127.0.0.1:%d {
			bind 127.0.0.1
			tiered_limit grpc {
				trusted_hops 0
				tier ip 2/%s
			}
			reverse_proxy h2c://%s
		}`, port, always, socket.Addr()))
	target := fmt.Sprintf("127.0.0.1:%d", port)
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	client := health_v1.NewHealthClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	answer, err := client.Check(ctx, &health_v1.HealthCheckRequest{})
	require.NoError(t, err)
	assert.Equal(t, health_v1.HealthCheckResponse_SERVING, answer.GetStatus())
	watching, stop := context.WithCancel(ctx)
	stream, err := client.Watch(watching, &health_v1.HealthCheckRequest{})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	stop()

	var trailer metadata.MD
	_, err = client.Check(ctx, &health_v1.HealthCheckRequest{}, grpc.Trailer(&trailer))
	assert.Equal(t, codes.ResourceExhausted, status.Code(err))
	assert.Regexp(t, `^rate limit "ip" reached, retry in \d+ s$`, status.Convert(err).Message())
	require.Len(t, trailer.Get("grpc-retry-pushback-ms"), 1)
	assert.Regexp(t, `^[1-9]\d*000$`, trailer.Get("grpc-retry-pushback-ms")[0])
	assert.Equal(t, []string{"ip"}, trailer.Get("x-ratelimit-resource"))

	stream, err = client.Watch(ctx, &health_v1.HealthCheckRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	assert.Equal(t, codes.ResourceExhausted, status.Code(err))

	retrying, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":5,"initialBackoff":"0.001s",
			"maxBackoff":"0.001s","backoffMultiplier":1,"retryableStatusCodes":["RESOURCE_EXHAUSTED"]}}]}`))
	require.NoError(t, err)
	t.Cleanup(func() { _ = retrying.Close() })
	short, done := context.WithTimeout(ctx, 300*time.Millisecond)
	defer done()
	_, err = health_v1.NewHealthClient(retrying).Check(short, &health_v1.HealthCheckRequest{})
	assert.Equal(t, codes.DeadlineExceeded, status.Code(err), "it waits as it was told, and does not use up its attempts")
}
