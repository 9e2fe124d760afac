// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// A replica that has stopped to answer draws no more than its share and some, however much it holds of what is asked for:
// what least_conn would send elsewhere is sent elsewhere, long before anyone can tell that it hangs.
func TestSilentReplicaDrawsItsShare(t *testing.T) {
	for _, sent := range []int{10, 30, 100} {
		t.Run(fmt.Sprint(sent), func(t *testing.T) {
			registry := fleet.NewRegistry()
			f := registry.New(fleet.Config{}, []string{"a:1", "b:1", "c:1", "d:1"})
			defer f.Stop()
			s := NewScheduler(registry.Index)
			s.Terms = BindOnArrival
			caller := &passerBy{replicas: f.Members(), closed: -1}
			for block := range uint64(30) {
				caller.chain = append(caller.chain, block+1)
			}
			f.Members()[2].Holds(caller.chain)
			at := make([]int, len(caller.replicas))
			for i := range sent {
				s.Submit(&Request{
					Chain: caller.chain, Tokens: 64 * float64(len(caller.chain)), PerBlock: 64,
					Replicas: caller.replicas, Caller: caller,
				}, time.Unix(1000, int64(i)))
				at[caller.got.Index]++
			}
			mean := float64(sent) / float64(len(at))
			if most := max(crowdFactor*mean, mean+crowdSlack) + 1; float64(at[2]) > most {
				t.Errorf("of %d requests in flight %d are at the replica that holds their prompt, want %.0f at most: %v", sent, at[2], most, at)
			}
			if float64(at[2]) < mean {
				t.Errorf("of %d requests in flight %d are at the replica that holds their prompt: %v", sent, at[2], at)
			}
		})
	}
}

// Requests that are too many cost what the replica computes in a second. Where its queue
// can't be known its rate is what was seen at least, and the crowd may be all there is to see.
func TestCrowdRate(t *testing.T) {
	for _, tt := range []struct {
		known      bool
		rate, want float64
	}{
		{true, 1000, 1000},
		{true, 30_000, 30_000},
		{false, 1000, fleet.DefaultPrefillRate},
		{false, 30_000, 30_000},
	} {
		var l lane
		l.load.QueueKnown, l.load.Rate = tt.known, tt.rate
		if got := l.crowdRate(); got != tt.want {
			t.Errorf("queue known: %v, %v tokens a second: a crowd costs %v, want %v", tt.known, tt.rate, got, tt.want)
		}
		l.inFlight = 12
		if got, want := l.cost(&Request{}, &offer{}, common{uncrowded: 10}), 2*tt.want; got != want {
			t.Errorf("queue known: %v, %v tokens a second: two too many cost %v, want %v", tt.known, tt.rate, got, want)
		}
	}
}
