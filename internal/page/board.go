// SPDX-License-Identifier: Apache-2.0

package page

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
)

const (
	// sampleEvery is the time between two samples of the replicas' counters.
	sampleEvery = 5 * time.Second
	// freshFor is how long an answer is given again, to whoever asks.
	freshFor = time.Second
	// surveyedFor is the same for the shared prefixes, which cost more to find.
	surveyedFor = 5 * time.Second
)

// board is what all handlers of the process show. It remembers the last minutes
// over reloads of the config.
type board struct {
	stop context.CancelFunc
	done chan struct{}

	mu       sync.Mutex
	now      func() time.Time
	past     map[member]*past
	made     time.Time // the answers
	answers  map[string][]byte
	surveyed time.Time // the prefixes
	prefixes map[string][]Prefix
}

// member is a replica as a part of a fleet.
type member struct{ fleet, replica string }

var boards = caddy.NewUsagePool()

const theBoard = "board"

// hold returns the board, which runs until it was released as often.
func hold() *board {
	b, _, _ := boards.LoadOrNew(theBoard, func() (caddy.Destructor, error) { // which does not fail
		b := newBoard()
		b.start()
		return b, nil
	})
	return b.(*board)
}

func release() error {
	_, err := boards.Delete(theBoard)
	return err
}

func newBoard() *board {
	return &board{now: time.Now, past: make(map[member]*past)}
}

func (b *board) start() {
	ctx, stop := context.WithCancel(context.Background())
	b.stop, b.done = stop, make(chan struct{})
	go func() {
		defer close(b.done)
		tick := time.NewTicker(sampleEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				b.sample()
			}
		}
	}()
}

// Destruct ends the sampling.
func (b *board) Destruct() error {
	b.stop()
	<-b.done
	return nil
}

// sample reads the counters of every replica, and forgets those that have left.
func (b *board) sample() {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	seen := make(map[member]bool)
	for _, p := range admin.Policies() {
		f := p.Fleet()
		for _, v := range f.Views(now) {
			m := member{f.Name, v.Replica}
			if b.past[m] == nil {
				b.past[m] = new(past)
			}
			b.past[m].add(v.Snapshot)
			seen[m] = true
		}
	}
	for m := range b.past {
		if !seen[m] {
			delete(b.past, m)
		}
	}
}

// answer is the data of one fleet, or of all without a name, as JSON. It is made
// once a second at most, however many look.
func (b *board) answer(fleet string) (status int, body []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := b.now(); b.answers == nil || now.Sub(b.made) >= freshFor || now.Before(b.made) {
		b.answers, b.made = b.make(now), now
	}
	if body, known := b.answers[fleet]; known {
		return http.StatusOK, body
	}
	return http.StatusNotFound, encode(map[string]string{"error": "fleet " + strconv.Quote(fleet) + " is unknown"})
}

// make makes the answers by the name of the fleet, that of all under no name.
func (b *board) make(now time.Time) map[string][]byte {
	policies := admin.Policies()
	if now.Sub(b.surveyed) >= surveyedFor || now.Before(b.surveyed) {
		b.surveyed, b.prefixes = now, make(map[string][]Prefix)
		for _, p := range policies {
			b.prefixes[p.Fleet().Name] = sharedBy(p.Fleet())
		}
	}
	answers := make(map[string][]byte)
	all := Data{At: now.UnixMilli(), Names: []string{}, Fleets: []Fleet{}}
	for _, p := range policies {
		all.Names = append(all.Names, p.Fleet().Name)
	}
	for _, p := range policies {
		f := b.describe(p, now)
		all.Fleets = append(all.Fleets, f)
		answers[f.Name] = encode(Data{At: all.At, Names: all.Names, Fleets: []Fleet{f}})
	}
	answers[""] = encode(all)
	return answers
}

// encode is what a browser may also be given as a page: markup in it is escaped.
func encode(v any) []byte {
	body, err := json.Marshal(v)
	if err != nil { // a number that is none
		return []byte(`{"error":"the figures can't be written"}`)
	}
	return body
}
