// SPDX-License-Identifier: Apache-2.0

package figures

import "testing"

func TestCompact(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 7.4: "7", 999: "999", 999.4: "999", 999.6: "1.0k", 1234: "1.2k", 9940: "9.9k", 9960: "10k",
		999_400: "999k", 999_600: "1.0M", 12_345_678: "12M", 2e9: "2G",
	} {
		if got := Compact(v); got != want {
			t.Errorf("Compact(%v) = %q, want %q", v, got, want)
		}
	}
	for v, want := range map[float64]string{0.4: "0s", 61: "61s", 100: "2m", 7200: "2h", 1e6: "12d", 1e12: "99d"} {
		if got := Age(v); got != want {
			t.Errorf("Age(%v) = %q, want %q", v, got, want)
		}
	}
}

func TestPlural(t *testing.T) {
	for got, want := range map[string]string{
		Plural(0, "request"): "0 requests", Plural(1, "request"): "1 request", Plural(2, "request"): "2 requests",
		Plural(1, "prefix", "prefixes"): "1 prefix", Plural(3, "prefix", "prefixes"): "3 prefixes",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
