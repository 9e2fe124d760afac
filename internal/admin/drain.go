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

// drain answers POST /kv_cache/drain?replica=ADDRESS[&fleet=NAME][&force=true].
// A replica is drained as such, in every fleet that names its address.
func (a *API) drain(r *http.Request) (any, error) {
	replica, in, err := wanted(r)
	if err != nil {
		return nil, err
	}
	force := false
	if v := r.URL.Query().Get("force"); v != "" {
		if force, err = strconv.ParseBool(v); err != nil {
			return nil, refuse(http.StatusBadRequest, "force is %q, but must be true or false", v)
		}
	}
	draining.Lock()
	defer draining.Unlock()
	now := time.Now()
	message := "takes no new requests; those in flight go on"
	for _, p := range in {
		if remains(p, replica, now) {
			continue
		}
		name := p.Fleet().Name
		if !force {
			return nil, refuse(http.StatusConflict,
				"%s is the last eligible replica of fleet %q; force the drain, and it still serves requests that no other replica can take", replica.Addr, name)
		}
		message = "was the last eligible replica of fleet " + strconv.Quote(name) + ", and still serves requests that no other replica can take"
	}
	replica.Drain(true)
	a.logger.Info("replica drained", zap.String("replica", replica.Addr), zap.Strings("fleets", names(in)), zap.Bool("forced", force))
	return outcome(replica, in, now, message), nil
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

// remains tells whether a policy has an eligible replica besides one. A replica
// that is drained already is none to be missed.
func remains(p Policy, without *fleet.Replica, now time.Time) bool {
	if without.Avoided(now) == fleet.Drained {
		return true
	}
	for _, m := range p.Fleet().Members() {
		if m != without && m.Avoided(now) == fleet.Eligible && p.Available(m.Addr) {
			return true
		}
	}
	return false
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
