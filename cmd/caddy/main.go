// Command caddy is Caddy with its standard modules and tiered_limit.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"
	_ "github.com/tieredlimit/caddy-tieredlimit"
)

func main() {
	caddycmd.Main()
}
