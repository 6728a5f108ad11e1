package redistest

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Cluster starts a cluster of so many masters and waits until it serves all slots.
func Cluster(t testing.TB, masters int) []*Server {
	t.Helper()
	nodes := make([]*Server, masters)
	for i := range nodes {
		nodes[i] = Start(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
			"--cluster-require-full-coverage", "no", "--cluster-port", strconv.Itoa(ports.Free(t)))
	}
	const slots = 16384
	for i, node := range nodes {
		node.Do("CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(i*slots/masters), strconv.Itoa((i+1)*slots/masters-1))
		node.Do("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
	}
	for _, node := range nodes[1:] {
		bus := nodes[0].args[len(nodes[0].args)-1]
		node.Do("CLUSTER", "MEET", "127.0.0.1", strconv.Itoa(nodes[0].Port), bus)
	}
	for _, node := range nodes {
		node.Await(func() bool {
			info, _ := node.Do("CLUSTER", "INFO").(string)
			return strings.Contains(info, "cluster_state:ok") &&
				strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", masters)) &&
				strings.Contains(info, fmt.Sprintf("cluster_slots_ok:%d", slots))
		})
	}
	return nodes
}

// Sentinel is a master with a replica, and the sentinels that watch them.
type Sentinel struct {
	Master, Replica *Server
	Sentinels       []*Server
}

// MasterName is the name under which sentinels know the master.
const MasterName = "limits"

// StartSentinel starts a master, a replica and three sentinels that agree on them. The sentinels have further lines in
// their configuration; a Conn says how to talk to them if a mere connection will not do.
func StartSentinel(t testing.TB, with Conn, lines ...string) *Sentinel {
	t.Helper()
	s := &Sentinel{Master: Start(t)}
	s.Replica = Start(t, "--replicaof", "127.0.0.1 "+strconv.Itoa(s.Master.Port), "--repl-diskless-sync-delay", "0")
	s.Replica.Await(func() bool {
		info, _ := s.Replica.Do("INFO", "replication").(string)
		return strings.Contains(info, "master_link_status:up")
	})
	for range 3 {
		s.Sentinels = append(s.Sentinels, s.sentinel(t, with, lines))
	}
	for _, sentinel := range s.Sentinels {
		sentinel.Await(func() bool {
			info, _ := sentinel.Do("INFO", "sentinel").(string)
			return strings.Contains(info, "status=ok") && strings.Contains(info, "slaves=1,sentinels=3")
		})
	}
	return s
}

func (s *Sentinel) sentinel(t testing.TB, with Conn, lines []string) *Server {
	t.Helper()
	sentinel := New(t).With(with)
	config := fmt.Sprintf(`port %d
bind 127.0.0.1
dir %q
sentinel monitor %s 127.0.0.1 %d 2
sentinel down-after-milliseconds %[3]s 500
sentinel failover-timeout %[3]s 3000
%[5]s
`, sentinel.Port, sentinel.Dir, MasterName, s.Master.Port, strings.Join(lines, "\n"))
	if err := os.WriteFile(filepath.Join(sentinel.Dir, "sentinel.conf"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	sentinel.Run()
	return sentinel
}

// Addrs are the addresses of servers.
func Addrs(servers []*Server) []string {
	addrs := make([]string, len(servers))
	for i, s := range servers {
		addrs[i] = s.Addr()
	}
	return addrs
}
