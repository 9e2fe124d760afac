// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"slices"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Describe tells all that is known of a policy's fleet.
func Describe(p Policy, now time.Time) Fleet {
	f := p.Fleet()
	out := Fleet{
		Name:          f.Name,
		Policy:        p.Name(),
		Waiting:       p.Waiting(),
		BytesPerToken: f.BytesPerToken(),
		Learner:       (*Learner)(f.LearnerView()),
		Replicas:      []Replica{},
	}
	for _, v := range f.Views(now) {
		r := replicaOf(&v)
		r.Available = p.Available(v.Replica)
		out.Replicas = append(out.Replicas, r)
	}
	return out
}

func replicaOf(v *metrics.View) Replica {
	r := Replica{
		Address:  v.Replica,
		State:    v.State,
		Warming:  v.Warming,
		Failures: v.Failures,
		Scrape:   Scrape{Good: v.Good, Bad: v.Bad, Took: v.Took},
		Ledger: Ledger{
			InFlight:    v.InFlight,
			Outstanding: v.Outstanding,
			Queued:      v.Queue,
			QueueKnown:  v.QueueKnown,
			Others:      v.Others,
		},
		Learned: Learned{
			PrefillRate:      v.Rate,
			PrefillRateKnown: v.RateKnown,
			Trust:            v.Trust,
			Predicted:        v.Predicted,
			Confirmed:        v.Confirmed,
		},
		Cache: Cache{Held: v.Blocks, Capacity: v.Capacity, Evicted: v.Evictions},
	}
	if v.Err != nil {
		r.Scrape.Error = v.Err.Error()
	}
	if v.Age >= 0 {
		r.Scrape.Age = &v.Age
	}
	if v.BytesPerToken > 0 {
		r.Learned.BytesPerToken = &v.BytesPerToken
	}
	if e := v.Events; e != nil {
		r.Events = (*Events)(e)
	}
	if s := v.Snapshot; s != nil {
		r.Engine = &Engine{Kind: s.Engine.String(), Age: v.Age, Models: s.Models, Adapters: s.Adapters, Facts: s.Facts()}
	}
	return r
}

// latestFirst merges the decisions of several fleets.
func latestFirst(all []Decision, limit int) []Decision {
	slices.SortStableFunc(all, func(a, b Decision) int { return b.At.Compare(a.At) })
	return all[:min(len(all), limit)]
}
