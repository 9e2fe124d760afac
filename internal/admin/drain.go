// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// draining serialises drains, so that no two of them see each other's replica
// as the one that remains.
var draining sync.Mutex

// drain answers POST
// /kv_cache/drain?replica=ADDRESS[&fleet=NAME][&force=true][&dry_run=true]. A
// replica is drained as such, in every fleet that names its address. A dry run
// drains nothing and tells what would happen.
func (a *API) drain(r *http.Request) (any, error) {
	replica, in, err := wanted(r)
	if err != nil {
		return nil, err
	}
	force, err := flag(r, "force")
	if err != nil {
		return nil, err
	}
	dry, err := flag(r, "dry_run")
	if err != nil {
		return nil, err
	}
	draining.Lock()
	defer draining.Unlock()
	now := time.Now()
	message, would := "takes no new requests; those in flight go on", "would take no new requests; those in flight would go on"
	for _, p := range in {
		if remaining(p, replica, now) > 0 || replica.Avoided(now) == fleet.Drained {
			continue
		}
		name := p.Fleet().Name
		if !force {
			return nil, refuse(http.StatusConflict,
				"%s is the last eligible replica of fleet %q; force the drain, and it still serves requests that no other replica can take", replica.Addr, name)
		}
		last := "the last eligible replica of fleet " + strconv.Quote(name) + ", and "
		message = "was " + last + "still serves requests that no other replica can take"
		would = "is " + last + "would still serve requests that no other replica can take"
	}
	if dry {
		out := outcome(replica, in, now, would)
		for _, p := range in {
			out.Effects = append(out.Effects, effectOn(p, replica, now))
		}
		return out, nil
	}
	replica.Drain(true)
	a.logger.Info("replica drained", zap.String("replica", replica.Addr), zap.Strings("fleets", names(in)), zap.Bool("forced", force))
	return outcome(replica, in, now, message), nil
}

// flag reads a parameter that is true or false.
func flag(r *http.Request, name string) (bool, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return false, nil
	}
	is, err := strconv.ParseBool(v)
	if err != nil {
		return false, refuse(http.StatusBadRequest, "%s is %q, but must be true or false", name, v)
	}
	return is, nil
}

const (
	// lastDecisions is how many decisions tell a replica's share.
	lastDecisions = 512
	// heavyPrefixes is how many shared prefixes are looked at.
	heavyPrefixes = 64
)

// effectOn tells what the drain of a replica would do to a fleet.
func effectOn(p Policy, replica *fleet.Replica, now time.Time) Effect {
	e := Effect{Fleet: p.Fleet().Name, Remaining: remaining(p, replica, now)}
	last := p.Recent(lastDecisions)
	for i := range last {
		if last[i].Replica == replica.Addr {
			e.Chosen++
		}
	}
	e.Decisions = len(last)
	for _, s := range p.Fleet().SharedPrefixes(heavyPrefixes) {
		e.Prefixes++
		if len(s.Holders) == 1 && s.Holders[0] == replica.Addr {
			e.Alone++
			e.Tokens += s.Tokens
		}
	}
	return e
}

// undrain answers POST /kv_cache/undrain?replica=ADDRESS[&fleet=NAME].
func (a *API) undrain(r *http.Request) (any, error) {
	replica, in, err := wanted(r)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	if replica.Avoided(now) != fleet.Drained {
		return outcome(replica, in, now, "was not drained"), nil
	}
	replica.Drain(false)
	a.logger.Info("replica undrained", zap.String("replica", replica.Addr), zap.Strings("fleets", names(in)))
	return outcome(replica, in, now, "takes new requests again, gradually at first"), nil
}

// forget answers POST /kv_cache/forget?replica=ADDRESS[&fleet=NAME].
func (a *API) forget(r *http.Request) (any, error) {
	replica, in, err := wanted(r)
	if err != nil {
		return nil, err
	}
	replica.Forget()
	a.logger.Info("replica's residency forgotten", zap.String("replica", replica.Addr), zap.Strings("fleets", names(in)))
	return outcome(replica, in, time.Now(), "is believed to hold nothing until it is sent requests"), nil
}

// wanted returns the replica that a request names, and every policy that may
// choose it.
func wanted(r *http.Request) (*fleet.Replica, []Policy, error) {
	list, err := asked(r)
	if err != nil {
		return nil, nil, err
	}
	addr := r.URL.Query().Get("replica")
	if addr == "" {
		return nil, nil, refuse(http.StatusBadRequest, "say which replica, by ?replica=ADDRESS as written in the upstream")
	}
	if member(list, addr) == nil {
		return nil, nil, refuse(http.StatusNotFound, "replica %q is unknown; GET /kv_cache/replicas lists those there are", addr)
	}
	var in []Policy
	var found *fleet.Replica
	for _, p := range Policies() {
		if m := member([]Policy{p}, addr); m != nil {
			in, found = append(in, p), m
		}
	}
	if found == nil { // the config was replaced meanwhile
		return nil, nil, refuse(http.StatusNotFound, "replica %q has just left", addr)
	}
	return found, in, nil
}

func member(list []Policy, addr string) *fleet.Replica {
	for _, p := range list {
		for _, m := range p.Fleet().Members() {
			if m.Addr == addr {
				return m
			}
		}
	}
	return nil
}

// remaining counts the eligible replicas of a policy besides one.
func remaining(p Policy, without *fleet.Replica, now time.Time) int {
	n := 0
	for _, m := range p.Fleet().Members() {
		if m != without && m.Avoided(now) == fleet.Eligible && p.Available(m.Addr) {
			n++
		}
	}
	return n
}

func outcome(p *fleet.Replica, in []Policy, now time.Time, message string) Outcome {
	return Outcome{
		Replica:  p.Addr,
		State:    p.Avoided(now).String(),
		Fleets:   names(in),
		InFlight: p.Load(now).InFlight,
		Message:  p.Addr + " " + message,
	}
}

func names(in []Policy) []string {
	out := make([]string, len(in))
	for i, p := range in {
		out[i] = p.Fleet().Name
	}
	return out
}
