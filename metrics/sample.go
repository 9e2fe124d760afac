// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bytes"
	"math"
	"strconv"
	"strings"
)

// A sample line of the Prometheus text format or of OpenMetrics is
//
//	name{label="value",…} value timestamp # exemplar
//
// where only the name and the value must be there. The functions below take it
// apart without copying, from left to right, each returning what follows.

// cutName splits a line at the end of the metric name.
func cutName(line []byte) (name, rest []byte) {
	end := bytes.IndexByte(line, '{')
	if end < 0 {
		end = len(line)
	}
	// Without labels the name ends at a blank, and a brace may still follow in
	// an exemplar.
	if blank := bytes.IndexByte(line[:end], ' '); blank >= 0 {
		end = blank
	}
	if tab := bytes.IndexByte(line[:end], '\t'); tab >= 0 {
		end = tab
	}
	return line[:end], skipBlanks(line[end:])
}

// nextLabel reads one label of an opened brace. The value is still escaped. At
// the closing brace name is nil and rest is what follows the brace; ok is false
// when the braces are malformed.
func nextLabel(b []byte) (name, value, rest []byte, ok bool) {
	for len(b) > 0 && (b[0] == ',' || b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	if len(b) > 0 && b[0] == '}' {
		return nil, nil, b[1:], true
	}
	equals := bytes.IndexByte(b, '=')
	if equals <= 0 {
		return nil, nil, nil, false
	}
	name = trimBlanks(b[:equals])
	b = skipBlanks(b[equals+1:])
	if len(name) == 0 || len(b) == 0 || b[0] != '"' {
		return nil, nil, nil, false
	}
	b = b[1:]
	end := closingQuote(b)
	if end < 0 {
		return nil, nil, nil, false
	}
	return name, b[:end], b[end+1:], true
}

// closingQuote returns the index of the first quote that is not escaped, or -1.
func closingQuote(b []byte) int {
	for from := 0; ; {
		i := bytes.IndexByte(b[from:], '"')
		if i < 0 {
			return -1
		}
		i += from
		slashes := 0
		for slashes < i-from && b[i-1-slashes] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return i
		}
		from = i + 1
	}
}

// unescape resolves \\, \" and \n in a label's value.
func unescape(value string) string {
	if strings.IndexByte(value, '\\') < 0 {
		return value
	}
	plain := make([]byte, 0, len(value))
	for i := 0; i < len(value); i++ {
		if value[i] == '\\' && i+1 < len(value) {
			i++
			if value[i] == 'n' {
				plain = append(plain, '\n')
				continue
			}
		}
		plain = append(plain, value[i])
	}
	return string(plain)
}

// cutValue reads the number that b begins with. It is not ok when it is no
// finite number of at least 0, which is all that any metric read here can be.
func cutValue(b []byte) (v float64, ok bool) {
	b = skipBlanks(b)
	end := 0
	for end < len(b) && b[end] != ' ' && b[end] != '\t' {
		end++
	}
	return number(b[:end])
}

// number parses a finite decimal number of at least 0.
func number(b []byte) (v float64, ok bool) {
	for _, c := range b {
		// ParseFloat also reads hexadecimal, Inf and NaN.
		if (c < '0' || c > '9') && c != '.' && c != 'e' && c != 'E' && c != '+' && c != '-' {
			return 0, false
		}
	}
	v, err := strconv.ParseFloat(string(b), 64)
	if err != nil || v < 0 || math.IsInf(v, 0) {
		return 0, false
	}
	return v, true
}

func skipBlanks(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	return b
}

func trimBlanks(b []byte) []byte {
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}
