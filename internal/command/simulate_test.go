// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

func TestSimulate(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- simulate(ctx, enginesim.ServerConfig{}, in) }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	url := line[strings.Index(line, "http://") : len(line)-1]
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(page), "vllm:kv_cache_usage_perc") {
		t.Errorf("%s/metrics: %v %.200s", url, err, page)
	}
	http.DefaultClient.CloseIdleConnections()
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
