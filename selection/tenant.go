// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"crypto/sha256"
	"encoding/binary"
	"net/http"

	"github.com/caddyserver/caddy/v2"
)

// tenantSeed is what the chains of a request's tenant start from: the policy's
// own seed where the tenant's placeholders are empty. What one tenant sends so
// says nothing of where another's prompts go. The value is chosen by whoever
// sends the request, so the hash is one that nobody can aim.
func (o *outlook) tenantSeed(r *http.Request) uint64 {
	if o.tenant == "" {
		return o.seed
	}
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return o.seed
	}
	tenant := repl.ReplaceAll(o.tenant, "")
	if tenant == "" {
		return o.seed
	}
	sum := sha256.Sum256(append(binary.LittleEndian.AppendUint64(nil, o.seed), tenant...))
	return binary.LittleEndian.Uint64(sum[:])
}
