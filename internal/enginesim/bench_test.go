// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"
)

type arrival struct {
	at      time.Duration
	replica int
	request Request
}

// conversationLoad resembles half an hour of chat traffic: 5,606 requests of 12.9k
// prompt tokens on average, 345 output tokens, a third of them later turns.
func conversationLoad(replicas int) []arrival {
	const requests, span = 5606, 1767 * time.Second
	rng := rand.New(rand.NewPCG(7, 7))
	var chats [][]uint64
	load := make([]arrival, requests)
	for i := range load {
		var blocks []uint64
		if len(chats) > 0 && rng.IntN(3) == 0 {
			blocks = slices.Clone(chats[max(0, len(chats)-1-rng.IntN(400))])
		}
		for range int(rng.ExpFloat64()*620) + 1 {
			blocks = append(blocks, rng.Uint64())
		}
		blocks = blocks[:min(len(blocks), 7500)]
		chats = append(chats, blocks)
		load[i] = arrival{
			at:      time.Duration(float64(span) * float64(i) / requests),
			replica: i % replicas,
			request: Request{
				Blocks:       blocks,
				PromptTokens: len(blocks)*DefaultBlockTokens + rng.IntN(DefaultBlockTokens),
				OutputTokens: 1 + int(rng.ExpFloat64()*345),
			},
		}
	}
	return load
}

// BenchmarkReplay reports how many virtual seconds of a fleet of six pass in one
// second of one core.
func BenchmarkReplay(b *testing.B) {
	const replicas = 6
	load := conversationLoad(replicas)
	tokens, generated := 0, 0
	for _, a := range load {
		tokens += a.request.PromptTokens
		generated += a.request.OutputTokens
	}
	var virtual time.Duration
	for b.Loop() {
		virtual = replay(b, load, replicas)
	}
	b.ReportMetric(virtual.Seconds()*float64(b.N)/b.Elapsed().Seconds(), "virtual-s/s")
	b.ReportMetric(float64(tokens)/float64(len(load)), "prompt-tokens/request")
	b.ReportMetric(float64(generated)/float64(len(load)), "output-tokens/request")
}

func replay(b *testing.B, load []arrival, replicas int) time.Duration {
	engines := make([]*Engine, replicas)
	for i := range engines {
		engines[i] = New(Config{})
	}
	requests := make([]Request, len(load))
	for i, a := range load {
		requests[i] = a.request
		for _, e := range engines {
			e.Advance(a.at)
		}
		if err := engines[a.replica].Submit(a.at, &requests[i]); err != nil {
			b.Fatal(err)
		}
	}
	var end time.Duration
	var hits, queries, steps, preemptions int64
	for _, e := range engines {
		for at, busy := e.Next(); busy; at, busy = e.Next() {
			e.Advance(at)
		}
		s := e.Stats()
		end = max(end, s.At)
		hits, queries = hits+s.PrefixHits, queries+s.PrefixQueries
		steps, preemptions = steps+s.Steps, preemptions+s.Preemptions
	}
	b.ReportMetric(float64(hits)/float64(queries), "hit-rate")
	b.ReportMetric(float64(steps), "steps")
	b.ReportMetric(float64(preemptions), "preemptions")
	return end
}

// BenchmarkStream reads 50 streams of 300 tokens at once from a server whose clock
// runs at 100 times the wall's, and reports how much longer that takes than the
// engine's schedule says.
func BenchmarkStream(b *testing.B) {
	const streams, tokens = 50, 300
	const speed = 100
	s, err := StartServer(ServerConfig{Speed: speed})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	transport := &http.Transport{MaxIdleConnsPerHost: streams}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	body := []byte(`{"messages":[{"role":"user","content":"tell me"}],"stream":true,"max_tokens":300}`)

	for b.Loop() {
		var group sync.WaitGroup
		for range streams {
			group.Go(func() {
				resp, err := client.Post(s.URL()+"/v1/chat/completions", "application/json", bytes.NewReader(body))
				if err != nil {
					b.Error(err)
					return
				}
				defer resp.Body.Close()
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					b.Error(err)
				}
			})
		}
		group.Wait()
	}
	schedule := tokens * (DefaultStepOverhead + streams*DefaultDecodeCost) / speed
	b.ReportMetric(float64(b.Elapsed())/float64(b.N)/float64(schedule), "x-of-schedule")
}
