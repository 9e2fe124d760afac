// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/json"
	"hash/fnv"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish"
)

// eventFaults are drills of the KV-event streams.
var eventFaults = []drill{
	{
		number: "18", name: "KV events: gaps, garbage, reconnect storm", spread: true,
		policy:  "kv_events tcp://{host}:{port-10000}\nkv_events_replay tcp://{host}:{port-11000}",
		engine:  func(_ int, c *enginesim.ServerConfig) { c.ScaleOut = true }, // tells tokens
		front:   (*exercise).narrate,
		kept:    9, // to ask each replica for tokens
		disturb: disturbEvents,
		check: func(x *exercise) {
			for _, name := range []string{"gaps", "replayed_batches", "lost", "errors"} {
				if x.proxy.metric("caddy_kv_cache_events_"+name+"_total") == 0 {
					x.Errorf("no %s are counted", name)
				}
			}
		},
	},
}

// disturbEvents does to the first replica's stream what can happen to one.
func disturbEvents(x *exercise) {
	victim := x.narrators[x.fleet[0].Addr()]
	known := func() float64 { return x.proxy.metric("caddy_kv_cache_events_blocks") }
	await(x, "blocks to be heard of", func() bool { return known() > 0 })
	victim.gap(false) // a replay fills it
	x.dwell()
	victim.gap(true)
	x.dwell()
	garbage := make([]byte, 300)
	for i := range 100 {
		for j := range garbage {
			garbage[j] = byte(rand.Uint32())
		}
		victim.publisher.PublishPayload(append([]byte(nil), garbage[:i*3]...))
	}
	for range 50 {
		victim.publisher.Disconnect()
		time.Sleep(20 * time.Millisecond)
	}
	victim.publisher.Restart()
	await(x, "all streams to be connected", func() bool {
		return x.proxy.metric("caddy_kv_cache_events_connected") == float64(len(x.fleet))
	})
}

// narrator publishes what an engine stores: the blocks of each prompt that reached it.
type narrator struct {
	engine    *enginesim.Server
	publisher *kvpublish.Publisher
	bodies    chan []byte

	mu     sync.Mutex
	stored map[uint64]bool
	mute   bool // the next batch is lost
}

// narrate puts a front before an engine and a publisher at a fixed distance from its port.
func (x *exercise) narrate(s *enginesim.Server) string {
	for range 50 {
		addr := x.frontOf(s, false, nil)
		_, port, _ := net.SplitHostPort(addr) // of a listener
		n, _ := strconv.Atoi(port)
		pub, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(n-10_000)))
		if err != nil {
			continue
		}
		replay, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(n-11_000)))
		if err != nil {
			_ = pub.Close()
			continue
		}
		a := &narrator{
			engine: s, publisher: kvpublish.New(pub, replay, kvpublish.Config{}),
			bodies: make(chan []byte, 1000), stored: make(map[uint64]bool),
		}
		x.mu.Lock()
		if x.narrators == nil {
			x.narrators = make(map[string]*narrator)
		}
		x.narrators[s.Addr()] = a
		x.mu.Unlock()
		var tells sync.WaitGroup
		tells.Go(func() {
			for body := range a.bodies {
				a.tell(body)
			}
		})
		x.Cleanup(func() {
			close(a.bodies)
			tells.Wait()
			if err := a.publisher.Close(); err != nil {
				x.Error(err)
			}
		})
		return addr
	}
	x.Fatal("no three free ports at the right distance")
	return ""
}

// tell publishes the blocks of a prompt that are new.
func (a *narrator) tell(body []byte) {
	resp, err := http.Post(a.engine.URL()+chatPath+"/render", "application/json", strings.NewReader(string(body)))
	if err != nil {
		return // the engine is down, or ends
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer resp.Body.Close()
	var rendered struct {
		Tokens []uint32 `json:"token_ids"`
	}
	if json.NewDecoder(resp.Body).Decode(&rendered) != nil {
		return
	}
	const block = 16
	event := kvpublish.Stored{BlockSize: block}
	a.mu.Lock()
	defer a.mu.Unlock()
	hash := fnv.New64a()
	for tokens := rendered.Tokens; len(tokens) >= block; tokens = tokens[block:] {
		for _, t := range tokens[:block] {
			_, _ = hash.Write([]byte{byte(t), byte(t >> 8), byte(t >> 16), byte(t >> 24)})
		}
		h := hash.Sum64()
		if !a.stored[h] {
			event.Hashes, event.Tokens = append(event.Hashes, h), append(event.Tokens, tokens[:block]...)
			a.stored[h] = true
		} else if len(event.Hashes) == 0 {
			event.Parent = &h
		}
	}
	if len(event.Hashes) == 0 {
		return
	}
	var batch kvpublish.Batch
	batch.Time = time.Now()
	batch.Stored(event)
	if a.mute {
		a.mute = false
		a.publisher.Lose(&batch)
		return
	}
	a.publisher.Publish(&batch)
}

// gap loses the next batch, and forgets it as well if it is not to be had again.
func (a *narrator) gap(forget bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !forget {
		a.mute = true
		return
	}
	var batch kvpublish.Batch
	batch.Cleared()
	a.publisher.Lose(&batch)
	a.publisher.Forget(1 << 20)
}
