// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

// endpoint is Caddy's admin endpoint as the flags name it. The flags are those
// of Caddy's own commands.
type endpoint struct {
	address, config, adapter string
}

func (e *endpoint) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&e.address, "address", "", "address of Caddy's admin endpoint, if not the default one")
	cmd.Flags().StringVarP(&e.config, "config", "c", "", "config file that tells the address of the admin endpoint")
	cmd.Flags().StringVarP(&e.adapter, "adapter", "a", "", "name of the config adapter for that file")
	none := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveNoFileComp)
	register(cmd, "address", none)
	register(cmd, "adapter", none)
}

// ask sends a request to /kv_cache/ and decodes the answer. A body may be nil.
func (e *endpoint) ask(method, what string, query url.Values, header http.Header, body io.Reader, into any) error {
	address, err := caddycmd.DetermineAdminAPIAddress(e.address, nil, e.config, e.adapter)
	if err != nil {
		return fmt.Errorf("finding the admin endpoint: %w", err)
	}
	uri := "/kv_cache/" + what
	if len(query) > 0 {
		uri += "?" + query.Encode()
	}
	resp, err := caddycmd.AdminAPIRequest(address, method, uri, header, body)
	if err != nil {
		return unanswered(address, err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("reading the answer of Caddy at %s: %w", address, err)
	}
	return nil
}

// unanswered says what a failed request means. Caddy's own error ends in the
// JSON of the answer, if there was one.
func unanswered(address string, err error) error {
	text := err.Error()
	before, body, refused := strings.Cut(text, "HTTP ")
	if !refused || !strings.HasPrefix(before, "caddy responded") {
		return fmt.Errorf("no answer from Caddy's admin endpoint at %s; is Caddy running, and its admin endpoint on? (%w)", address, err)
	}
	status, body, _ := strings.Cut(body, ": ")
	var told struct {
		Error string `json:"error"`
	}
	if json.Unmarshal([]byte(body), &told) == nil && told.Error != "" {
		return errors.New(told.Error)
	}
	if status == "404" {
		return fmt.Errorf("the Caddy at %s does not know /kv_cache/: it was built without caddy-kv-cache, or an older version of it", address)
	}
	return err
}

// ofFleet is the query that names a fleet, if one is named.
func ofFleet(name string) url.Values {
	q := make(url.Values)
	if name != "" {
		q.Set("fleet", name)
	}
	return q
}
