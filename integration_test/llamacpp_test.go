// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// TestLlamaCpp puts the built Caddy in front of two real llama.cpp servers. LLAMACPP_PYTHON names a Python that has
// xllamacpp and gguf:
//
//	python3 -m venv llama && llama/bin/pip install --only-binary :all: xllamacpp gguf
func TestLlamaCpp(t *testing.T) {
	python := os.Getenv("LLAMACPP_PYTHON")
	if python == "" {
		t.Skip("SKIPPED, llama.cpp untested: LLAMACPP_PYTHON names no Python that has it")
	}
	addrs := []string{startLlamaCpp(t, python), startLlamaCpp(t, python)}
	p := start(t, aware(addrs, "", ""))
	p.awaitScrapes(addrs...)
	chat := func(messages ...message) string {
		return asJSON(map[string]any{"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0})
	}
	predicted, counted, prompts := 0, 0, 0
	chats := make([][]message, 2) // a slot each at most
	homes := make([]string, len(chats))
	for turn := range 6 {
		for i := range chats {
			chats[i] = append(chats[i], message{"user", text(fmt.Sprintf("chat %d turn %d", i, turn), 400)})
			a := p.must(chatPath, chat(chats[i]...))
			r := a.read(t)
			if turn == 0 {
				homes[i] = a.replica()
			} else if a.replica() != homes[i] || r.Usage.Details.Cached == 0 {
				t.Errorf("turn %d of chat %d: at %s after %s, %d tokens cached", turn, i, a.replica(), homes[i], r.Usage.Details.Cached)
			}
			if turn > 1 { // the length of a token is known
				predicted += a.matched(t)
				counted += r.Usage.Details.Cached
				prompts += r.Usage.Prompt
			}
			chats[i] = append(chats[i], message{"assistant", r.Choices[0].Message.Content})
			p.awaitScrapes(addrs...)
		}
	}
	t.Logf("%d prompt tokens: %d predicted, %d counted", prompts, predicted, counted)
	if off := float64(predicted-counted) / float64(prompts); off < -0.15 || off > 0.1 {
		t.Errorf("of %d prompt tokens %d were predicted and %d counted", prompts, predicted, counted)
	}
	if n := p.metric("caddy_kv_cache_engine_info", "engine", "llama_cpp"); n != float64(len(addrs)) {
		t.Errorf("%v replicas are recognised as llama.cpp", n)
	}
	if hits := p.metric("caddy_kv_cache_engine_prefix_hit_tokens_total"); hits == 0 {
		t.Error("the engines' hits are not read")
	}
	if ratio := p.metric("caddy_kv_cache_bytes_per_token"); ratio > 1.2 {
		t.Errorf("%v bytes are taken for a token, which is one", ratio)
	}
	p.awaitIdle()
}

// startLlamaCpp runs a server until the test ends.
func startLlamaCpp(t *testing.T, python string) (addr string) {
	t.Helper()
	addr = loopback.FreeAddr(t)
	_, port, _ := net.SplitHostPort(addr) // of an address that FreeAddr made
	cmd := exec.Command(python, filepath.Join("testdata", "llamacpp.py"), t.TempDir(), port)
	var log journal
	cmd.Stdout, cmd.Stderr = &log, &log
	alive, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = alive.Close()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("llama.cpp at %s:\n%.4000s", addr, log.String())
		}
	})
	client := newClient(t)
	await(t, "llama.cpp at "+addr, func() bool {
		resp, err := client.Get("http://" + addr + "/health")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return addr
}
