package tieredlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/tieredlimit/caddy-tieredlimit/internal/visible"
)

// endpointRefusal finds the status and the body in what Caddy's client says of an answer that is an error.
var endpointRefusal = regexp.MustCompile(`(?s)^caddy responded with error: HTTP (\d+): (.*)$`)

// adminFailure says why the admin endpoint at an address gave no answer, in words of the commands.
func adminFailure(address string, err error) error {
	refusal := endpointRefusal.FindStringSubmatch(err.Error())
	if refusal == nil {
		return fmt.Errorf("no Caddy answers at %s: it has to run, with its admin endpoint there and without \"admin off\"; --address or "+
			"--config name another place: %w", address, err)
	}
	var answer struct {
		Error string `json:"error"`
	}
	if json.Unmarshal([]byte(refusal[2]), &answer) != nil || answer.Error == "" {
		return fmt.Errorf("what answers at %s knows no tiered_limit (HTTP %s): is it a Caddy with this module, and its admin endpoint?",
			address, refusal[1])
	}
	return errors.New(asCommandSays(answer.Error))
}

// commandWords are what the endpoint's fields are called by the commands.
var commandWords = strings.NewReplacer(
	"key is missing; it lists the values of the key's parts", "the values of the tier's key are missing; write them behind the flags",
	"say by line which is meant", "say by --line which is meant",
	"leave the key out", "give no values",
	`the counter that "uncertain" names`, "the counter that --uncertain names",
	": line ", ": --line ",
)

// fieldWords are fields that an error of the endpoint begins with.
var fieldWords = regexp.MustCompile(`^(peer|method|path|host|header)s?([: ])`)

// asCommandSays puts an error of the endpoint into the words of the commands.
func asCommandSays(text string) string {
	return visible.Text(fieldWords.ReplaceAllString(commandWords.Replace(text), "--$1$2"))
}
