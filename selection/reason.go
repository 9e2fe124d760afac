// SPDX-License-Identifier: Apache-2.0

package selection

import "github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"

// Reason says why a decision went where it went. The list is closed: reasons
// are metric labels.
type Reason string

const (
	// ReasonMatch: the chosen replica holds the longest part of the prompt.
	ReasonMatch Reason = "match"
	// ReasonBalance: another replica holds more of the prompt, but waiting
	// there costs more than computing here.
	ReasonBalance Reason = "balance"
	// ReasonNoMatch: no replica is believed to hold any of the prompt; the one
	// where it costs least and leaves the most room was taken.
	ReasonNoMatch Reason = "no_match"
	// ReasonHome: prefix_hash sent the prompt to its home.
	ReasonHome Reason = "home"
	// ReasonOverflow: the prompt's home was over its bound, and the next in its
	// order took it.
	ReasonOverflow Reason = "overflow"
	// ReasonPinned: the pin header named the session's replica.
	ReasonPinned Reason = "pinned"
	// ReasonOnly: no other replica was available.
	ReasonOnly Reason = "only"
	// ReasonOther: another policy decided, instead of kv_cache_aware or for its
	// share of the requests.
	ReasonOther Reason = "other"
	// ReasonNone: no replica was available.
	ReasonNone Reason = "none"
	// ReasonRefused: too many requests were waiting, or it had waited for too
	// long; the client was asked to come again.
	ReasonRefused Reason = "refused"

	// The fallback policy decided, because the request
	// ReasonNoPrompt: is of no API that computes a prompt.
	ReasonNoPrompt Reason = "no_prompt"
	// ReasonNoBody: has no body.
	ReasonNoBody Reason = "no_body"
	// ReasonNotJSON: has a body that is not JSON.
	ReasonNotJSON Reason = "not_json"
	// ReasonCutJSON: has a body that ends in the middle of its JSON.
	ReasonCutJSON Reason = "cut_json"
	// ReasonNoText: has JSON in which no prompt is found.
	ReasonNoText Reason = "no_text"
	// ReasonTooDeep: has JSON nested deeper than any prompt.
	ReasonTooDeep Reason = "too_deep"
	// ReasonEncoded: has a compressed body, which engines don't read either.
	ReasonEncoded Reason = "encoded"
	// ReasonIncremental: must be forwarded as it comes (RFC 10036).
	ReasonIncremental Reason = "incremental"
	// ReasonBodyError: has a body whose reading failed.
	ReasonBodyError Reason = "body_error"
)

// reasons is the whole list, as metric labels.
var reasons = []string{
	string(ReasonMatch), string(ReasonBalance), string(ReasonNoMatch), string(ReasonHome),
	string(ReasonOverflow), string(ReasonPinned), string(ReasonOnly), string(ReasonOther), string(ReasonNone), string(ReasonRefused),
	string(ReasonNoPrompt), string(ReasonNoBody), string(ReasonNotJSON), string(ReasonCutJSON),
	string(ReasonNoText), string(ReasonTooDeep), string(ReasonEncoded), string(ReasonIncremental),
	string(ReasonBodyError),
}

// ofFault says in which reason a body without a prompt ends.
func ofFault(f prompt.Fault) Reason {
	switch f {
	case prompt.Empty:
		return ReasonNoBody
	case prompt.NotJSON:
		return ReasonNotJSON
	case prompt.Cut:
		return ReasonCutJSON
	case prompt.TooDeep:
		return ReasonTooDeep
	default:
		return ReasonNoText
	}
}

// aside tells that an engine computes no prompt for a request that goes where
// the fallback policy sends it.
func (r Reason) aside() bool { return r == ReasonNoPrompt || r == ReasonNoBody }
