// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// Fleet is the simulated replicas as a policy sees them.
type Fleet struct {
	Setup   Setup
	Engines []*enginesim.Engine
	// Rand is the policies' source of chance.
	Rand *rand.Rand

	up      []bool
	started []time.Duration
	sim     *simulation
}

func newFleet(setup Setup, s *simulation) *Fleet {
	f := &Fleet{Setup: setup, Rand: rand.New(rand.NewPCG(setup.Seed, 0x7265706c6179)), sim: s}
	for _, c := range setup.Engines {
		f.Engines = append(f.Engines, enginesim.New(c))
	}
	f.up = make([]bool, len(f.Engines))
	f.started = make([]time.Duration, len(f.Engines))
	for i := range f.up {
		f.up[i] = !joinsLater(setup.Changes, i)
	}
	return f
}

// Up tells whether a replica is there to be chosen.
func (f *Fleet) Up(replica int) bool { return f.up[replica] }

// Send hands a request to a replica.
func (f *Fleet) Send(now time.Duration, r *Request, replica int, reason string) {
	f.sim.send(now, r, replica, reason)
}

// Refuse answers a request with an error, because no replica is there.
func (f *Fleet) Refuse(now time.Duration, r *Request) { f.sim.refuse(now, r) }

// Cached is how many tokens of a request a replica would really not compute.
func (f *Fleet) Cached(r *Request, replica int) int {
	return f.Engines[replica].Lookup(f.sim.prepare(r, replica))
}

func (f *Fleet) apply(now time.Duration, c Change) {
	switch c.Kind {
	case Leave:
		f.up[c.Replica] = false
	case Join:
		f.up[c.Replica] = true
		f.Engines[c.Replica].Restart(now)
		f.started[c.Replica] = now
	case Restart:
		f.Engines[c.Replica].Restart(now)
		f.started[c.Replica] = now
	}
}

// Change is something that happens to a replica.
type Change struct {
	At      time.Duration
	Replica int
	Kind    ChangeKind
}

// ChangeKind is what can happen.
type ChangeKind string

const (
	// Leave takes a replica out of the pool. What it was sent it still answers.
	Leave ChangeKind = "leave"
	// Join brings it (back) in, with an empty cache. A replica whose first
	// change is to join is not there before.
	Join ChangeKind = "join"
	// Restart loses what is in flight and the cache; the replica is back at once.
	Restart ChangeKind = "restart"
)

// ParseChange reads a change such as "restart:2@90s".
func ParseChange(text string) (Change, error) {
	wrong := func(why string) (Change, error) {
		return Change{}, fmt.Errorf("change %q: %s; want leave, join or restart, a replica and a time, such as restart:2@90s", text, why)
	}
	kind, rest, _ := strings.Cut(text, ":")
	replica, at, ok := strings.Cut(rest, "@")
	if !ok {
		return wrong("no time in it")
	}
	c := Change{Kind: ChangeKind(kind)}
	if c.Kind != Leave && c.Kind != Join && c.Kind != Restart {
		return wrong(fmt.Sprintf("%q is no change", kind))
	}
	var err error
	if c.Replica, err = strconv.Atoi(replica); err != nil || c.Replica < 0 {
		return wrong(fmt.Sprintf("%q is no number of a replica", replica))
	}
	if c.At, err = time.ParseDuration(at); err != nil || c.At < 0 {
		return wrong(fmt.Sprintf("%q is no time", at))
	}
	return c, nil
}

func (c Change) String() string { return fmt.Sprintf("%s:%d@%v", c.Kind, c.Replica, c.At) }

func changesInOrder(changes []Change) []Change {
	return slices.SortedStableFunc(slices.Values(changes), func(a, b Change) int { return cmp.Compare(a.At, b.At) })
}

// joinsLater tells whether the first change of a replica is that it joins.
func joinsLater(changes []Change, replica int) bool {
	for _, c := range changesInOrder(changes) {
		if c.Replica == replica {
			return c.Kind == Join
		}
	}
	return false
}
