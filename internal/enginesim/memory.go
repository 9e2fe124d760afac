// SPDX-License-Identifier: Apache-2.0

package enginesim

import "sync"

// rememberedResponses is the number of /v1/responses answers a server remembers.
const rememberedResponses = 4096

// memory holds the conversations behind /v1/responses answers, by id. Like vLLM's
// it belongs to one server, which is why such requests must return there.
type memory struct {
	mu    sync.Mutex
	turns map[string][]turn
	order []string // oldest first
}

func newMemory() *memory { return &memory{turns: map[string][]turn{}} }

func (m *memory) store(id string, turns []turn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.order) == rememberedResponses {
		delete(m.turns, m.order[0])
		m.order = m.order[1:]
	}
	m.turns[id] = turns
	m.order = append(m.order, id)
}

func (m *memory) load(id string) ([]turn, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	turns, ok := m.turns[id]
	return turns, ok
}
