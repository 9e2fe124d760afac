// SPDX-License-Identifier: Apache-2.0

package page

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"strings"
)

var (
	//go:embed page.html
	markup string
	//go:embed page.css
	style string
	//go:embed page.js
	script string
)

// document is the page in one piece: nothing has to be found next to it, under
// whatever path it is served.
var document = []byte(strings.NewReplacer("<style></style>", "<style>"+style+"</style>", "<script></script>", "<script>"+script+"</script>").Replace(markup))

// protection is what browsers are told of the page. Only its own script and style
// run, known by their hashes; it talks to its own address alone, is shown in no
// other page, and text can't become markup.
var protection = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src " + hashOf(script) + "; style-src " + hashOf(style) +
		"; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
	"X-Content-Type-Options":       "nosniff",
	"Referrer-Policy":              "no-referrer",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Cache-Control":                "no-store",
	"X-Robots-Tag":                 "noindex",
}

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}
