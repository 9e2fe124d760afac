// SPDX-License-Identifier: Apache-2.0

package deploy_test

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestOpenMetrics reads the page in the format that carries exemplars.
func TestOpenMetrics(t *testing.T) {
	web := serving(t)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, web+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept", "application/openmetrics-text;version=1.0.0")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/openmetrics-text") {
		t.Errorf("the page is %s", resp.Header.Get("Content-Type"))
	}
	if !bytes.Contains(page, []byte("caddy_kv_cache_decisions_total{")) || !bytes.HasSuffix(bytes.TrimSpace(page), []byte("# EOF")) {
		t.Errorf("the page is cut short or lacks decisions: %.500s", page)
	}
	if bytes.Contains(page, []byte("all of this is the same")) {
		t.Error("the page has text of a prompt")
	}
}
