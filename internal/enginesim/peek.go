// SPDX-License-Identifier: Apache-2.0

package enginesim

// Lookup returns how many of a prompt's tokens a request would find cached if it
// were admitted now. It is what a router would give much to know; see replay's
// oracle.
func (e *Engine) Lookup(r *Request) int {
	hits, _ := e.match(r)
	return hits * e.config.BlockTokens
}

// Computed returns how many of the request's tokens have their KV in the cache:
// found there or computed, 0 before admission.
func (r *Request) Computed() int { return r.computed }
