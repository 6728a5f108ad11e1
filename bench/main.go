// Command bench compares tiered_limit with other rate limiters, inside one machine and without a network, and prints
// tables of ratios.
//
//	cd bench && go run .
package main

import (
	"os"

	"github.com/tieredlimit/caddy-tieredlimit/bench/harness"
)

func main() {
	os.Exit(harness.Main(os.Args[1:], os.Stdout, os.Stderr))
}
