// SPDX-License-Identifier: Apache-2.0

package admin

// Because says in words what a decision's reason means.
var Because = map[string]string{
	"match":       "it holds the longest part of the prompt",
	"balance":     "another holds more of the prompt, but costs more",
	"no_match":    "no replica holds any of the prompt; it costs least there",
	"home":        "it is the prompt's home",
	"overflow":    "the prompt's home is over its bound; it is the next in order",
	"pinned":      "the session is pinned to it",
	"only":        "no other replica can be chosen",
	"other":       "another policy decided",
	"none":        "no replica is available",
	"no_prompt":   "the path is of no API that computes a prompt",
	"no_body":     "the request has no body",
	"not_json":    "the body is not JSON",
	"cut_json":    "the body's JSON has no end",
	"no_text":     "no prompt is found in the body's JSON",
	"too_deep":    "the body's JSON is nested deeper than any prompt",
	"encoded":     "the body is compressed",
	"incremental": "the request must be forwarded as it comes",
	"body_error":  "reading the body failed",
}
