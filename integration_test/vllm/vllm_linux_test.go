// SPDX-License-Identifier: Apache-2.0

package vllm_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/integration_test/vllm"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// The tests here need no engine: that the real one starts and ends with a [vllm.Fleet], the tests in the folder above
// show, which start it once for all of them.

// fakeEngineEnv turns this test binary into a stand-in for vLLM's API server: its
// value is "serve", or a complaint to log before it ends at once.
const fakeEngineEnv = "FAKE_VLLM_ENGINE"

func TestMain(m *testing.M) {
	if mode := os.Getenv(fakeEngineEnv); mode != "" && len(os.Args) > 1 && os.Args[1] == "-m" {
		fakeEngine(mode)
	}
	flag.Parse()
	goleak.VerifyTestMain(m)
}

// fakeEngine answers every request with its process id.
func fakeEngine(mode string) {
	if mode != "serve" {
		fmt.Fprintln(os.Stderr, mode)
		os.Exit(1)
	}
	var port string
	for i, arg := range os.Args {
		if arg == "--port" {
			port = os.Args[i+1]
		}
	}
	err := http.ListenAndServe("127.0.0.1:"+port, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, os.Getpid())
	}))
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// fakePython is an interpreter that installs itself. It notes each installation in
// $FAKE_CALLS, and fails to find packages when $FAKE_INDEX is "down".
const fakePython = `#!/usr/bin/env bash
set -eu
case "$*" in
"-m venv "*)
	echo venv >> "$FAKE_CALLS"
	mkdir -p "$3/bin"
	cp "$0" "$3/bin/python"
	printf '#!/bin/sh\necho "uv $*" >> "$FAKE_CALLS"\n' > "$3/bin/uv"
	chmod +x "$3/bin/uv"
	;;
"-m pip "*) [ "${FAKE_INDEX-}" != down ] ;;
"-m vllm."*) exec "$FAKE_BINARY" "$@" ;;
esac
`

// fakeInstallation makes run.sh install a fake engine into a folder of the test's
// own, which it returns.
func fakeInstallation(t *testing.T) string {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("run.sh refuses other processors than x86-64")
	}
	bin, cache := t.TempDir(), filepath.Join(t.TempDir(), "cache")
	writeProgram(t, filepath.Join(bin, "python"), fakePython)
	writeProgram(t, filepath.Join(bin, "ldconfig"), "#!/bin/sh\necho libnuma.so.1\n")
	for name, value := range map[string]string{
		"PATH":                    bin + ":" + os.Getenv("PATH"),
		"PYTHON":                  filepath.Join(bin, "python"),
		"CADDY_KV_CACHE_VLLM_DIR": cache,
		"CUDA_LIBS":               "real",
		"FAKE_CALLS":              filepath.Join(bin, "calls"),
		"FAKE_BINARY":             os.Args[0],
		fakeEngineEnv:             "serve",
	} {
		t.Setenv(name, value)
	}
	return cache
}

func writeProgram(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// installations counts how often the fake engine has been installed.
func installations(t *testing.T) int {
	t.Helper()
	calls, err := os.ReadFile(os.Getenv("FAKE_CALLS"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Count(string(calls), "venv\n")
}

// script runs run.sh and returns its exit status and what it said.
func script(t *testing.T, args ...string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", append([]string{"run.sh"}, args...)...)
	out, err := cmd.CombinedOutput()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

func mustScript(t *testing.T, args ...string) {
	t.Helper()
	if status, out := script(t, args...); status != 0 {
		t.Fatalf("run.sh %v: exit status %d\n%s", args, status, out)
	}
}

func TestInstallOnce(t *testing.T) {
	cache := fakeInstallation(t)
	mustScript(t, "install")
	mustScript(t, "install")
	mustScript(t, "status")
	if got := installations(t); got != 1 {
		t.Errorf("two calls made %d installations, want 1", got)
	}

	// Without its mark the installation is one that was cut short.
	if err := os.Remove(filepath.Join(cache, "venv", ".installed")); err != nil {
		t.Fatal(err)
	}
	if status, out := script(t, "status"); status != 77 {
		t.Errorf("status of a half-finished installation: exit status %d, want 77\n%s", status, out)
	}
	mustScript(t, "install")
	if got := installations(t); got != 2 {
		t.Errorf("a half-finished installation was not redone: %d installations, want 2", got)
	}
}

func TestInstallUnavailable(t *testing.T) {
	tests := []struct {
		name string
		env  map[string]string
		lock bool
		want string
	}{
		{"index down", map[string]string{"FAKE_INDEX": "down"}, false, "did not serve uv"},
		{"no python", map[string]string{"PYTHON": "/nonexistent/python"}, false, "needs Python"},
		{"out of time", map[string]string{"INSTALL_TIMEOUT": "0"}, false, "out of time"},
		{"another is installing", map[string]string{"INSTALL_TIMEOUT": "1"}, true, "another installation held"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			cache := fakeInstallation(t)
			for name, value := range test.env {
				t.Setenv(name, value)
			}
			if test.lock {
				holdLock(t, cache)
			}
			status, out := script(t, "install")
			if status != 77 || !strings.Contains(out, test.want) {
				t.Errorf("exit status %d, want 77 and %q in\n%s", status, test.want, out)
			}
		})
	}
}

// holdLock takes the installation's lock, as another run.sh would.
func holdLock(t *testing.T, cache string) {
	t.Helper()
	if err := os.MkdirAll(cache, 0o755); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(filepath.Join(cache, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lock.Close() })
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
}

func TestScriptUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"instal"}, {"install", "now"}, {"serve", "dir"}, {"fleet", "dir", "8000"}} {
		if status, out := script(t, args...); status != 2 || !strings.Contains(out, "run.sh install") {
			t.Errorf("run.sh %q: exit status %d, want 2 and the usage\n%s", args, status, out)
		}
	}
}

func TestStartWithoutInstallation(t *testing.T) {
	t.Setenv("CADDY_KV_CACHE_VLLM_DIR", t.TempDir())
	_, err := vllm.Start(t.Context(), vllm.Options{})
	if !errors.Is(err, vllm.ErrUnavailable) {
		t.Fatalf("got error %v, want ErrUnavailable", err)
	}
}

func TestFleet(t *testing.T) {
	fakeInstallation(t)
	mustScript(t, "install")
	fleet, err := vllm.Start(t.Context(), vllm.Options{Replicas: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer fleet.Close()
	first, second := get(t, fleet.URLs[0]), get(t, fleet.URLs[1])
	if first == second {
		t.Fatalf("both replicas are process %s", first)
	}

	if err := fleet.Signal(0, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitDown(t, fleet.URLs[0])
	if err := fleet.Restart(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if again := get(t, fleet.URLs[0]); again == first {
		t.Errorf("the replica is still process %s after its restart", again)
	}
	if got := get(t, fleet.URLs[1]); got != second {
		t.Errorf("restarting one replica replaced the other: process %s, was %s", got, second)
	}

	if err := fleet.Close(); err != nil {
		t.Fatal(err)
	}
	for _, url := range fleet.URLs {
		awaitDown(t, url)
	}
}

func TestStartFailureShowsLog(t *testing.T) {
	fakeInstallation(t)
	mustScript(t, "install")
	t.Setenv(fakeEngineEnv, "no such kernel")
	_, err := vllm.Start(t.Context(), vllm.Options{})
	if err == nil || !strings.Contains(err.Error(), "no such kernel") {
		t.Errorf("got error %v, want the replica's last words in it", err)
	}
}

func TestStartRejectsBlankInFlag(t *testing.T) {
	if _, err := vllm.Start(t.Context(), vllm.Options{Extra: []string{"--seed 1"}}); err == nil {
		t.Error("a flag with a blank was accepted; run.sh would split it")
	}
}

// A test binary that is killed cannot stop its replicas; the end of their standard
// input must.
func TestReplicaEndsWithItsStarter(t *testing.T) {
	fakeInstallation(t)
	mustScript(t, "install")
	address := loopback.FreeAddr(t)
	_, port, _ := strings.Cut(address, ":")
	cmd := exec.Command("bash", "run.sh", "serve", t.TempDir(), port)
	cmd.Env = append(os.Environ(), "WATCH_STDIN=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }()
	awaitUp(t, "http://"+address)
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("the replica outlived its standard input by 30 s")
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	answer, err := tryGet(t, url)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func tryGet(t *testing.T, url string) (string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	return roundTrip(req)
}

func roundTrip(req *http.Request) (string, error) {
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, answer)
	}
	return string(answer), err
}

func awaitUp(t *testing.T, url string)   { t.Helper(); await(t, url, true) }
func awaitDown(t *testing.T, url string) { t.Helper(); await(t, url, false) }

// await polls url until it answers, or until it does not.
func await(t *testing.T, url string, up bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if _, err := tryGet(t, url); (err == nil) == up {
			return
		}
	}
	t.Fatalf("%s: up is not %v after 30 s", url, up)
}
