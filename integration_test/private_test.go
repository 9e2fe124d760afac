// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// A marker in prompts, and the value that tells tenants apart, are found nowhere but at the engine: not in
// logs, metrics, admin answers, captures and profiles.
func TestPromptsStayPrivate(t *testing.T) {
	const marker = "Xq7ZmarkerQ9w"
	var seen atomic.Int64
	config := fast
	config.OnRequest = func(_ *http.Request, body []byte) {
		if strings.Contains(string(body), marker) {
			seen.Add(1)
		}
	}
	fleet := engines(t, 2, config)
	dead := loopback.FreeAddr(t)
	capture := filepath.Join(t.TempDir(), "capture.jsonl")
	p := start(t, `log
		log_append replica {http.reverse_proxy.kv_cache.replica}
		log_append reason {http.reverse_proxy.kv_cache.reason}
		log_append prompt_tokens {http.reverse_proxy.kv_cache.prompt_tokens}
		log_append matched_tokens {http.reverse_proxy.kv_cache.matched_tokens}
		kv_cache_usage
		`+aware(append(fleet.Addrs(), dead),
		"pin_header X-Session-ID\ntenant {header.Authorization}\nmax_body 1MiB\ncapture "+filepath.ToSlash(capture), "lb_retries 2\nverbose_logs"))
	post := func(path, body string) {
		r := p.request(http.MethodPost, path, nil)
		setBody(r, body)
		r.Header.Set("Authorization", "Bearer "+marker)
		exchange(p.client, r)
	}
	secret := strings.Repeat(marker+" ", 100)
	for i := range 12 {
		p.say(fmt.Sprint(secret, i))
		post(chatPath, ask(fmt.Sprint(secret, i)))
	}
	p.say(strings.Repeat(marker+" ", 100_000)) // longer than is looked at
	for _, body := range []string{
		marker, `{"` + marker + `": 1}`, `{"messages": "` + marker, ask(secret)[:300], asJSON(map[string]string{"prompt": secret, "user": marker}),
		`{"messages":[{"role":"` + marker + `","content":[{"type":"` + marker + `"}]}]}`, `{"prompt":["` + marker + `"],"cache_salt":"` + marker + `"}`,
	} {
		for _, path := range []string{chatPath, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/nowhere"} {
			post(path, body)
		}
	}
	for _, status := range []int{0, 500, 503} { // an attempt that fails, and answers that have the replica avoided
		fleet[0].FailNext(status, 1)
		fleet[1].FailNext(status, 1)
		for range 3 {
			post(chatPath, ask(secret))
		}
	}
	s := p.open(secret, endless)
	if more, err := s.next(); !more {
		t.Fatal(err)
	}
	_, stacks := p.ask(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", nil) // with a prompt in flight
	s.abort()
	p.awaitIdle()
	p.awaitScrapes(fleet.Addrs()...)
	if seen.Load() < 20 {
		t.Fatalf("only %d requests with the marker reached an engine", seen.Load())
	}
	told := map[string]string{"the page of metrics": string(p.metricsPage().body), "the stacks": stacks}
	for _, path := range []string{"/config/", "/reverse_proxy/upstreams", "/metrics", "/kv_cache/replicas", "/kv_cache/decisions", "/debug/vars"} {
		_, told["admin API at "+path] = p.ask(http.MethodGet, path, "", nil)
	}
	_, explained := p.ask(http.MethodPost, "/kv_cache/explain", ask(secret), http.Header{"Authorization": {"Bearer " + marker}, "Content-Type": {"application/json"}})
	if !strings.Contains(explained, "prompt_tokens") {
		t.Errorf("explained: %s", explained)
	}
	told["the explanation"] = explained
	await(t, "the requests to be captured", func() bool { return p.metric("caddy_kv_cache_capture_lines_total") >= 60 })
	lines, err := os.ReadFile(capture)
	if err != nil {
		t.Fatal(err)
	}
	told["the capture"], told["the log"] = string(lines), p.log.String()
	for where, text := range told {
		if text == "" {
			t.Errorf("%s is empty", where)
		}
		if i := strings.Index(text, marker); i >= 0 {
			t.Errorf("%s has the marker: %.400s", where, text[max(0, i-200):])
		}
	}
	for _, want := range []string{`"replica":"` + fleet[0].Addr() + `"`, `"reason":"match"`, `"prompt_tokens":`, `"matched_tokens":`, `"msg":"handled request"`} {
		if !strings.Contains(told["the log"], want) {
			t.Errorf("the access log lacks %s", want)
		}
	}
}

// A panic prints its value, and of the arguments on the stack addresses alone. So no value may be made of
// what came with a request: errors of the program itself and fixed text are all there is.
func TestPanicsHoldNoText(t *testing.T) {
	found := 0
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && entry.Name() != ".." {
			return skipped(err)
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(filepath.ToSlash(path), "internal/enginesim/") {
			return nil
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if name, ok := call.Fun.(*ast.Ident); !ok || name.Name != "panic" {
				return true
			}
			found++
			switch value := call.Args[0].(type) {
			case *ast.BasicLit:
			case *ast.Ident:
				if value.Name != "err" {
					t.Errorf("%s panics with %s", files.Position(call.Pos()), value.Name)
				}
			default:
				t.Errorf("%s panics with a value that is made up", files.Position(call.Pos()))
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found == 0 {
		t.Error("no panic was found, so nothing was checked")
	}
}

// skipped leaves a directory out, unless there was an error.
func skipped(err error) error {
	if err != nil {
		return err
	}
	return filepath.SkipDir
}
