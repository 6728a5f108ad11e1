package servers

import (
	"fmt"
	"os"
	"path/filepath"
)

// The configs of nginx, which are made here: what is the same for everybody, and limit_req.
const (
	nginxBare  = "bare"
	nginxLimit = "limit_req"
)

// nginxConfig writes a config and returns its path. Since return runs before limit_req, what is limited is a file.
func nginxConfig(home, kind string, port int, refused bool) (string, error) {
	zone, limit := "", ""
	switch {
	case kind == nginxLimit && refused:
		zone = "limit_req_zone $http_x_forwarded_for zone=clients:64m rate=1r/m;"
		limit = "limit_req zone=clients; limit_req_status 429; limit_req_log_level info;"
	case kind == nginxLimit:
		zone = "limit_req_zone $http_x_forwarded_for zone=clients:64m rate=1000000r/s;"
		limit = "limit_req zone=clients burst=1000000 nodelay;"
	case refused:
		limit = "return 429;"
	}
	if err := os.WriteFile(filepath.Join(home, "index.html"), []byte("hello"), 0o644); err != nil {
		return "", err
	}
	path := filepath.Join(home, "nginx.conf")
	return path, os.WriteFile(path, fmt.Appendf(nil, `
daemon off;
master_process off;
worker_processes 1;
pid nginx.pid;
error_log stderr crit;
events { worker_connections 1024; }
http {
	access_log off;
	keepalive_requests 1000000000;
	client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
	%s
	server {
		listen 127.0.0.1:%d;
		location / { root %s; %s }
	}
}
`, zone, port, home, limit), 0o600)
}
