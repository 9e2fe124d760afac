// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Views lists what is known of each member, in order of their address.
func (f *Fleet) Views(now time.Time) []metrics.View {
	members := f.Members()
	views := make([]metrics.View, len(members))
	for i, p := range members {
		views[i] = p.view(now)
		views[i].Fleet = f.Name
		views[i].Events = p.eventsView()
	}
	return views
}

// View is what is known of the registry's residency index.
func (g *Registry) View() metrics.IndexView {
	s := g.Index.Stats()
	return metrics.IndexView{Blocks: s.Blocks, Pairs: s.Pairs, Bytes: s.Bytes, Evictions: s.Evictions}
}

func (p *Replica) view(now time.Time) metrics.View {
	p.mu.RLock()
	defer p.mu.RUnlock()
	r, avoid := p.perSecond(), p.avoid(now)
	v := metrics.View{
		Replica:     p.Addr,
		Good:        p.scrapes.Good,
		Bad:         p.scrapes.Bad,
		BadBy:       p.scrapes.BadBy,
		Age:         -1,
		Took:        p.scrapes.Took.Seconds(),
		Err:         p.scrapes.Err,
		Snapshot:    p.latest,
		InFlight:    float64(p.inFlight),
		Queue:       p.queue(now, r),
		Outstanding: p.outstanding,
		Others:      p.others,
		Rate:        r,
		RateKnown:   p.rate.known(),
		Trust:       p.calibrated.trust(),
		Predicted:   p.calibrated.allBelieved,
		Confirmed:   p.calibrated.allCounted,
		State:       avoid.String(),
		Eligible:    avoid == Eligible,
		Warming:     p.warm.up(p.computing(), now),
		Failures:    p.breaker.failures,
	}
	if p.text.tokens > 0 {
		v.BytesPerToken = p.text.bytes / p.text.tokens
	}
	if p.latest != nil {
		v.Age = now.Sub(p.scrapes.Last).Seconds()
	}
	if s := p.fresh(now); s != nil {
		v.QueueKnown = p.queueKnown(s, now)
	}
	if !p.gone.Load() {
		v.Blocks = float64(p.registry.Index.Len(p.Slot))
		v.Capacity = float64(p.registry.Index.Capacity(p.Slot))
		v.Evictions = p.registry.Index.Evictions(p.Slot)
	}
	return v
}

// eventsView sums up the streams of KV events, nil if none are followed.
func (p *Replica) eventsView() *metrics.EventsView {
	s, followed := p.Events()
	if !followed {
		return nil
	}
	v := &metrics.EventsView{Connected: len(s.Ranks) > 0, Reliable: s.Current && s.Whole, Blocks: s.Blocks, Errors: make(map[string]uint64)}
	for _, r := range s.Ranks {
		v.Connected = v.Connected && r.Connected
		v.Batches += r.Messages
		v.Replayed += r.ReplayedMessages
		v.Gaps += r.Gaps
		v.Lost += r.Lost
		for reason, n := range map[string]uint64{
			"dial": r.DialErrors, "read": r.ReadErrors, "frame": r.FrameErrors, "decode": r.DecodeErrors,
			"replay": r.ReplayErrors, "event": uint64(r.Skipped.Sum()),
		} {
			v.Errors[reason] += n
		}
		v.Lag = max(v.Lag, r.Lag.Seconds())
	}
	return v
}
