//go:build unix

// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"os"
	"os/exec"
	"testing"
)

// TestNoneLeft runs itself with few descriptors and takes them all.
func TestNoneLeft(t *testing.T) {
	const inside = "TAKE_ALL_DESCRIPTORS"
	if os.Getenv(inside) == "" {
		if noneLeft() {
			t.Fatal("none is left from the beginning")
		}
		cmd := exec.Command("sh", "-c", `ulimit -n 40 && exec "$0" -test.run '^TestNoneLeft$'`, os.Args[0])
		cmd.Env = append(os.Environ(), inside+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	var open []*os.File
	for range 100 {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		open = append(open, f)
	}
	if len(open) == 100 {
		t.Skip("this system does not limit descriptors")
	}
	out := noneLeft()
	for _, f := range open {
		_ = f.Close() // it was only opened
	}
	if !out {
		t.Error("the last descriptor is taken, and one is believed left")
	}
	if noneLeft() {
		t.Error("all are closed, and none is believed left")
	}
}
