// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

const printed = `goos: linux
BenchmarkScale/pairs=100000-2     20   2.857 MiB   29.96 bytes/pair   134.3 ns/inserted-block   1.503 µs/match
BenchmarkScale/pairs=30000000-2   20   746.8 MiB   26.10 bytes/pair   157.9 ns/inserted-block   1.400 µs/match
BenchmarkScale/replicas=8         20   17.39 µs/decision
BenchmarkScale/replicas=1000-16   20   214.2 µs/decision
BenchmarkScale/tokens=1000-2      20   18.19 µs/decision
BenchmarkScale/tokens=1000000-2   20   1354 µs/decision
PASS
`

func TestPlot(t *testing.T) {
	var out strings.Builder
	if err := run(strings.NewReader(printed), &out); err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(out.String())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// Two points for each of five figures, and four for each of two fleets' shares.
	if n := strings.Count(out.String(), "<circle"); n != 5*2+2*4 {
		t.Errorf("%d points are drawn, want 18", n)
	}
	for _, part := range []string{"1000 replicas", "100 MiB"} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("%q is missing", part)
		}
	}
	for _, wrong := range []string{"NaN", "%!", `x1="0.0"`} {
		if strings.Contains(out.String(), wrong) {
			t.Errorf("%s is in the picture", wrong)
		}
	}
}

func TestPlotNeedsAllFigures(t *testing.T) {
	for _, gone := range []string{"pairs", "replicas", "tokens"} {
		if err := run(strings.NewReader(strings.ReplaceAll(printed, gone+"=", "other=")), io.Discard); err == nil {
			t.Errorf("without %s: no error", gone)
		}
	}
}
