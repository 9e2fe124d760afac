// SPDX-License-Identifier: Apache-2.0

// Package figures writes numbers the way people read them, in few characters.
package figures

import (
	"fmt"
	"math"
	"time"
)

// Compact is a count in at most four characters, and five above ten billion.
func Compact(v float64) string {
	for _, unit := range []string{"", "k", "M"} {
		switch {
		case math.IsNaN(v) || math.IsInf(v, 0):
			return "-"
		case v < 9.95 && unit != "":
			return fmt.Sprintf("%.1f%s", v, unit)
		case v < 999.5:
			return fmt.Sprintf("%.0f%s", v, unit)
		}
		v /= 1000
	}
	return fmt.Sprintf("%.0fG", v)
}

// Percent is a share in whole percents, a dash if it is unknown.
func Percent(share float64) string {
	if math.IsNaN(share) || math.IsInf(share, 0) {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*share)
}

// Age is a time in seconds in at most three characters.
func Age(s float64) string {
	switch {
	case s < 99.5:
		return fmt.Sprintf("%.0fs", s)
	case s < 99.5*60:
		return fmt.Sprintf("%.0fm", s/60)
	case s < 99.5*3600:
		return fmt.Sprintf("%.0fh", s/3600)
	}
	return fmt.Sprintf("%.0fd", min(99, (time.Duration(s)*time.Second).Hours()/24))
}

// Plural is a count with what it counts, of which several have an s at their end
// or are called otherwise.
func Plural(n int, one string, several ...string) string {
	switch {
	case n == 1:
		return "1 " + one
	case len(several) > 0:
		return fmt.Sprintf("%d %s", n, several[0])
	}
	return fmt.Sprintf("%d %ss", n, one)
}
