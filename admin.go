package tieredlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

func init() {
	caddy.RegisterModule(new(Admin))
}

// Admin answers questions about the stacks of the running configuration on Caddy's admin endpoint, and resets counters.
//
//	GET  /tiered_limit/          the stacks: topology, tiers, limits, counters, and who is refused most
//	POST /tiered_limit/inspect   what one counter says
//	POST /tiered_limit/reset     forget what one counter has counted
//	POST /tiered_limit/explain   what would be decided about a request, and why; nothing is charged
//
// Questions are asked in the body, as JSON: the admin endpoint logs URIs, and an identity does not belong in a log.
type Admin struct {
	// running finds the app of the running configuration. A router is provisioned before apps are, and stays when a
	// new configuration is refused, so it must look anew each time.
	running func() *App
}

const (
	adminPath = "/tiered_limit/"

	// maxAdminBody is how many bytes a question may have.
	maxAdminBody = 64 << 10
)

// CaddyModule returns the Caddy module information.
func (*Admin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.tiered_limit",
		New: func() caddy.Module { return &Admin{running: runningApp} },
	}
}

// runningApp is the app of the configuration that was started last, or nil if that has no handler of this module.
func runningApp() *App {
	app, err := caddy.ActiveContext().AppIfConfigured("tiered_limit")
	if err != nil {
		return nil
	}
	return app.(*App)
}

// Routes returns what the admin endpoint is to serve.
func (a *Admin) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		{Pattern: adminPath, Handler: caddy.AdminHandlerFunc(a.serveStatus)},
		{Pattern: adminPath + "inspect", Handler: question(a.inspect)},
		{Pattern: adminPath + "reset", Handler: question(a.reset)},
		{Pattern: adminPath + "explain", Handler: question(a.explain)},
	}
}

// question serves an endpoint that reads a question from the body and answers it.
func question[Q, A any](answer func(*http.Request, *Q) (A, error)) caddy.AdminHandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := allowMethods(w, r, http.MethodPost); err != nil {
			return err
		}
		q := new(Q)
		if err := readQuestion(w, r, q); err != nil {
			return err
		}
		a, err := answer(r, q)
		if err != nil {
			return err
		}
		return writeAnswer(w, a)
	}
}

// allowMethods refuses all methods but some.
func allowMethods(w http.ResponseWriter, r *http.Request, methods ...string) error {
	if slices.Contains(methods, r.Method) {
		return nil
	}
	list := strings.Join(methods, ", ")
	w.Header().Set("Allow", list)
	return adminError(http.StatusMethodNotAllowed, "method %s is not allowed here; use %s", r.Method, list)
}

// readQuestion reads the body, which must be one JSON object without unknown fields.
func readQuestion(w http.ResponseWriter, r *http.Request, into any) error {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxAdminBody))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(into)
	if err == nil {
		var rest json.RawMessage
		if err = decoder.Decode(&rest); errors.Is(err, io.EOF) {
			return nil
		} else if err == nil {
			return adminError(http.StatusBadRequest, "the body has more than one JSON value")
		}
	}
	var tooLong *http.MaxBytesError
	switch {
	case errors.As(err, &tooLong):
		return adminError(http.StatusRequestEntityTooLarge, "the body is longer than %d bytes", maxAdminBody)
	case errors.Is(err, io.EOF):
		return adminError(http.StatusBadRequest, "the body is empty; a JSON object is expected")
	}
	return adminError(http.StatusBadRequest, "reading the body as JSON: %s", shortened(err.Error()))
}

// writeAnswer writes an answer as JSON.
func writeAnswer(w http.ResponseWriter, answer any) error {
	body, err := json.Marshal(answer)
	if err != nil {
		return fmt.Errorf("encoding the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	// The answer is complete: a client that went away is no error.
	_, _ = w.Write(append(body, '\n'))
	return nil
}

// adminError is an error with a status for the admin endpoint.
func adminError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// handlers are those of the running configuration, in its order.
func (a *Admin) handlers() []*Handler {
	if app := a.running(); app != nil {
		return app.inOrder()
	}
	return nil
}

// stack are the handlers of one stack, of which there is at least one.
func (a *Admin) stack(label string) ([]*Handler, error) {
	if label == "" {
		return nil, adminError(http.StatusBadRequest, "stack is missing")
	}
	all := a.handlers()
	found := slices.DeleteFunc(slices.Clone(all), func(h *Handler) bool { return h.stackLabel != label })
	if len(found) > 0 {
		return found, nil
	}
	var labels []string
	for _, h := range all {
		if name := fmt.Sprintf("%q", h.stackLabel); !slices.Contains(labels, name) {
			labels = append(labels, name)
		}
	}
	if len(labels) == 0 {
		return nil, adminError(http.StatusNotFound, "there is no stack %q; the running configuration has none", shortened(label))
	}
	return nil, adminError(http.StatusNotFound, "there is no stack %q; there are %s", shortened(label), strings.Join(labels, ", "))
}

// Interface guards
var (
	_ caddy.Module      = (*Admin)(nil)
	_ caddy.AdminRouter = (*Admin)(nil)
)
