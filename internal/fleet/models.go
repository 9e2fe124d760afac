// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const (
	// modelsEvery is the shortest time between two readings of one replica's
	// list of models. It is read only while a request names one that the
	// replica is not known to serve, or is answered 404.
	modelsEvery = 30 * time.Second
	// modelsSoonest is the same after an answer that speaks against the lists.
	modelsSoonest = time.Second
	// modelsTimeout bounds one reading.
	modelsTimeout = 5 * time.Second
	// maxModels is how many models and adapters of one replica are kept.
	maxModels = 4096
	// maxModelsPage bounds the answer, in bytes.
	maxModelsPage = 4 << 20
)

// roster is what a replica says it serves. It is read without a lock, by each
// request that names a model that not all replicas' pages name.
type roster struct {
	page     atomic.Pointer[metrics.Snapshot] // last good scrape, nil before the first
	adapters atomic.Pointer[map[string]bool]  // by name; false for a base model. nil while not read
	asked    atomic.Int64                     // when adapters were last wanted, in time since epoch; 0 for never
}

// list takes in what the replica's own list says, nil if that is void.
func (r *roster) list(adapters map[string]bool) {
	if adapters == nil {
		r.adapters.Store(nil)
		r.asked.Store(0)
		return
	}
	r.adapters.Store(&adapters)
}

// Serves tells whether the replica serves a model or adapter, as far as that
// is known: from its list of models if that was read, else from the names on
// its metrics page, which do not hold aliases and idle adapters.
func (p *Replica) Serves(model string) (serves, known bool) {
	if onPage(p.roster.page.Load(), model) {
		return true, true
	}
	if list := p.roster.adapters.Load(); list != nil {
		_, listed := (*list)[model]
		return listed, true
	}
	return false, false
}

func onPage(s *metrics.Snapshot, model string) bool {
	return s != nil && (slices.Contains(s.Models, model) || slices.Contains(s.Adapters, model))
}

// namesModels tells whether the replica's metrics page names any model.
func (p *Replica) namesModels() bool {
	page := p.roster.page.Load()
	return page != nil && len(page.Models) > 0
}

// adapter tells whether a model is a LoRA adapter.
func (p *Replica) adapter(model string) (is, known bool) {
	if list := p.roster.adapters.Load(); list != nil {
		if is, known := (*list)[model]; known {
			return is, true
		}
	}
	page := p.roster.page.Load()
	switch {
	case page == nil:
		return false, model == ""
	case slices.Contains(page.Adapters, model):
		return true, true
	}
	return false, model == "" || slices.Contains(page.Models, model)
}

// Serving tells which replicas a request for a model may go to, in room, which
// it grows as needed. It returns nil if that excludes none: all serve it, or
// none is known to. A replica that is not known to serve it is left out only if
// it names other models while somebody else names this one.
func (f *Fleet) Serving(model string, replicas []*Replica, room *[]bool, now time.Time) []bool {
	if model == "" || f.everywhere(model) {
		return nil
	}
	some, all := false, true
	list := (*room)[:0]
	for _, p := range replicas {
		serves, known := p.Serves(model)
		if !serves {
			f.wantModels(p, now, modelsEvery)
		}
		some = some || serves
		may := serves || !known && !p.namesModels()
		all = all && may
		list = append(list, may)
	}
	*room = list
	if !some || all {
		return nil
	}
	return list
}

// everywhere tells whether the metrics page of every member names a model.
func (f *Fleet) everywhere(model string) bool {
	common := f.common.Load()
	return common != nil && slices.Contains(*common, model)
}

// findCommon works out which models the pages of all members name.
func (f *Fleet) findCommon() {
	var common []string
	first := true
	for _, m := range *f.members.Load() {
		s := m.replica.roster.page.Load()
		switch {
		case s == nil:
			common = nil
		case first:
			common = slices.Clone(s.Models)
		default:
			common = slices.DeleteFunc(common, func(name string) bool { return !slices.Contains(s.Models, name) })
		}
		first = false
	}
	if old := f.common.Load(); old == nil || !slices.Equal(*old, common) {
		f.common.Store(&common)
	}
}

// NotFound notes that a replica answered 404 to a request that names a model.
// Where its page does not name the model, that may be an adapter which was
// loaded or unloaded since the lists were read; so all are read anew.
func (f *Fleet) NotFound(model string, now time.Time) {
	if model == "" || f.everywhere(model) {
		return
	}
	for _, p := range f.Members() {
		f.wantModels(p, now, modelsSoonest)
	}
}

// wantModels has a replica's list of models read soon, off the request path,
// unless it was read within the given time.
func (f *Fleet) wantModels(p *Replica, now time.Time, within time.Duration) {
	if f.API == nil {
		return
	}
	last, at := p.roster.asked.Load(), int64(now.Sub(epoch))
	if last != 0 && at-last < int64(within) || !p.roster.asked.CompareAndSwap(last, at) {
		return
	}
	select {
	case f.unlisted <- p:
	default: // another time
	}
}

// readModels reads the lists that are wanted until ctx ends.
func (f *Fleet) readModels(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case p := <-f.unlisted:
			adapters, err := f.modelsOf(ctx, p.Addr)
			if err != nil {
				f.Logger.Debug("replica does not list its models", zap.String("replica", p.Addr), zap.Error(err))
				continue
			}
			p.roster.list(adapters)
		}
	}
}

// modelsOf reads which models a replica serves and which of them are adapters.
func (f *Fleet) modelsOf(ctx context.Context, addr string) (map[string]bool, error) {
	base, ok := f.API.Base(addr)
	if !ok {
		return nil, fmt.Errorf("%s has no address to ask at", addr)
	}
	ctx, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/v1/models", nil)
	if err != nil {
		return nil, err
	}
	for name, values := range f.API.Header {
		r.Header[name] = values
	}
	resp, err := f.API.Client.Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/v1/models answered %s", resp.Status)
	}
	return parseModels(io.LimitReader(resp.Body, maxModelsPage))
}

// parseModels reads an OpenAI list of models. vLLM names the base model of an
// adapter as its parent.
func parseModels(r io.Reader) (map[string]bool, error) {
	var list struct {
		Data []struct {
			ID     string `json:"id"`
			Parent string `json:"parent"`
		} `json:"data"`
	}
	if err := json.NewDecoder(r).Decode(&list); err != nil {
		return nil, fmt.Errorf("list of models: %w", err)
	}
	if len(list.Data) == 0 {
		return nil, fmt.Errorf("list of models is empty")
	}
	models := make(map[string]bool, min(len(list.Data), maxModels))
	for _, m := range list.Data[:min(len(list.Data), maxModels)] {
		models[m.ID] = m.Parent != ""
	}
	return models, nil
}
