// SPDX-License-Identifier: Apache-2.0

// Package selection has the two load-balancing policies for Caddy's
// reverse_proxy: KVCacheAware and PrefixHash. It reads requests and books what
// was decided; how a choice is made is the business of internal/plan.
package selection
