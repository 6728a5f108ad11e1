// Command wire compares whole servers under load from wrk, and prints tables of ratios.
//
//	cd bench && go run ./wire [flags] [NAME=[BINARY:]CADDYFILE ...]
package main

import (
	"os"

	"github.com/tieredlimit/caddy-tieredlimit/bench/servers"
)

func main() {
	os.Exit(servers.Main(os.Args[1:], os.Stdout, os.Stderr))
}
