// SPDX-License-Identifier: Apache-2.0

// Package fleet keeps what is known of each replica: the ledger of requests in
// flight, the latest scrape, the learned prefill rate, and the replica's place
// in the residency index. It does not know how a choice is made.
package fleet

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
)

// Registry holds replicas by dial address. A replica lives as long as someone
// holds it, so its state survives config reloads, in which the new config
// takes hold before the old one lets go.
type Registry struct {
	// Index says which replica is believed to hold which prefix block.
	Index *residency.Index
	// Seed starts every block chain of this registry. It is random, so that
	// nobody outside can tell which prompts collide.
	Seed uint64

	// Exhausted looks whether this process is out of file descriptors, which it
	// needs for new connections. Default: it never is. It is set before there are
	// replicas.
	Exhausted func() bool

	replicas    *caddy.UsagePool
	descriptors descriptors

	alignment *kvevents.Alignment // of texts and tokens, for all replicas
	truthsMu  sync.Mutex
	truths    map[string]*truth // by address and publisher
}

// Process is the registry of this process, shared by all configurations.
var Process = processRegistry()

func processRegistry() *Registry {
	g := NewRegistry()
	g.Exhausted = noneLeft
	return g
}

// NewRegistry returns an empty registry with a seed of its own.
func NewRegistry() *Registry {
	return &Registry{
		Index:    residency.New(),
		Seed:     rand.Uint64(),
		replicas: caddy.NewUsagePool(),

		alignment: kvevents.NewAlignment(kvevents.AlignmentConfig{TextBlock: prompt.BlockSize}),
		truths:    make(map[string]*truth),
	}
}

// hold returns the replica at addr, which it makes if there is none. Each call
// needs one to release.
func (g *Registry) hold(addr string) *Replica {
	v, _, err := g.replicas.LoadOrNew(addr, func() (caddy.Destructor, error) {
		capacity := DefaultCapacity * DefaultBytesPerToken / prompt.BlockSize
		p := g.stray(addr)
		p.Slot, p.capacity = g.Index.Join(capacity), capacity
		p.gone.Store(false)
		return p, nil
	})
	if err != nil { // the constructor returns none
		panic(err)
	}
	return v.(*Replica)
}

// stray returns a replica that is in no registry and holds nothing.
func (g *Registry) stray(addr string) *Replica {
	p := &Replica{
		Addr:     addr,
		Slot:     -1,
		ID:       xxhash.Sum64String(addr),
		registry: g,
		assumed: assumed{
			rate:          DefaultPrefillRate,
			bytesPerToken: DefaultBytesPerToken,
			capacity:      DefaultCapacity,
			staleAfter:    5 * time.Second,
		},
	}
	p.gone.Store(true)
	p.settle(time.Time{})
	return p
}

func (g *Registry) release(addr string) { _, _ = g.replicas.Delete(addr) }

// Destruct gives the replica's place in the residency index back. The registry
// calls it when nobody holds the replica any more.
func (p *Replica) Destruct() error {
	p.gone.Store(true)
	p.registry.Index.Leave(p.Slot)
	return nil
}
