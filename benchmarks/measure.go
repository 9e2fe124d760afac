// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/load"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// compare measures one router: first in front of engines that answer at once, then anew in front of
// engines that take their time.
func compare(ctx context.Context, c *config, r router) (*outcome, error) {
	o := &outcome{Router: r.name}
	var err error
	if o.Version, err = r.version(ctx); err != nil {
		return nil, fmt.Errorf("asking its version: %w", err)
	}
	if err := o.overhead(ctx, c, r); err != nil {
		return nil, err
	}
	return o, o.workload(ctx, c, r)
}

// overhead measures what the router adds and costs.
func (o *outcome) overhead(ctx context.Context, c *config, r router) error {
	fleet, err := enginesim.StartFleet(c.replicas, enginesim.ServerConfig{Instant: true})
	if err != nil {
		return err
	}
	defer fleet.Close()
	p, err := r.start(ctx, fleet.Addrs())
	if p != nil {
		defer p.stop()
	}
	if err != nil {
		return err
	}
	direct := "http://" + fleet.Addrs()[0]
	var through, without []time.Duration
	for i := range c.requests {
		body := chat(fmt.Sprint("conversation ", i/3, " turn ", i), 32<<10)
		a, err := ask(ctx, direct, body)
		if err != nil {
			return err
		}
		b, err := ask(ctx, p.url, body)
		if err != nil {
			return err
		}
		if i >= c.requests/10 { // connections are there
			without, through = append(without, a), append(through, b)
		}
	}
	o.AddedP50 = ms(percentile(through, 50) - percentile(without, 50))
	o.AddedP99 = ms(percentile(through, 99) - percentile(without, 99))

	before := usageOf(p.cmd.Process.Pid)
	done, took, err := crowd(ctx, p.url, c.span)
	after := usageOf(p.cmd.Process.Pid)
	if err != nil {
		return err
	}
	o.Rate = float64(done) / took.Seconds()
	o.CPU = (after.cpu - before.cpu).Seconds() / float64(done) * 1000
	o.Peak = float64(after.peak) / (1 << 20)
	return nil
}

// crowd lets 32 clients send requests of 2 KiB without pause.
func crowd(ctx context.Context, url string, span time.Duration) (done int64, took time.Duration, err error) {
	const clients = 32
	var count, failed atomic.Int64
	var wg sync.WaitGroup
	began := time.Now()
	for client := range clients {
		wg.Go(func() {
			for i := 0; time.Since(began) < span && ctx.Err() == nil; i++ {
				if _, err := ask(ctx, url, chat(fmt.Sprint("client ", client, " turn ", i/4), 2<<10)); err != nil {
					failed.Add(1)
					continue
				}
				count.Add(1)
			}
		})
	}
	wg.Wait()
	if n := failed.Load(); n > count.Load()/100 {
		return 0, 0, fmt.Errorf("%d of %d requests of 32 clients failed", n, n+count.Load())
	}
	return count.Load(), time.Since(began), nil
}

// workload measures what clients see of a workload, and how much of it comes from caches.
func (o *outcome) workload(ctx context.Context, c *config, r router) error {
	fleet, err := enginesim.StartFleet(c.replicas, enginesim.ServerConfig{Config: enginesim.Config{Blocks: 4096}})
	if err != nil {
		return err
	}
	defer fleet.Close()
	p, err := r.start(ctx, fleet.Addrs())
	if p != nil {
		defer p.stop()
	}
	if err != nil {
		return err
	}
	sessions, err := sessionsOf(c)
	if err != nil {
		return err
	}
	result, err := load.ClosedLoop(ctx, sessions, load.Options{
		BaseURL: p.url, Model: enginesim.DefaultModel, ActiveSessions: c.sessions, Replicas: c.replicas,
	})
	if err != nil {
		return err
	}
	o.HitRate, o.TTFTMean, o.TTFTP90 = result.HitRate, result.TTFT.Mean, result.TTFT.P90
	o.Failed = result.Measured - result.Succeeded
	o.Peak = max(o.Peak, float64(usageOf(p.cmd.Process.Pid).peak)/(1<<20))
	return nil
}

// sessionsOf are the chats to play: those of the trace, or some that share long system prompts.
func sessionsOf(c *config) (iter.Seq[*trace.Session], error) {
	all := trace.Workload{
		Seed: 1, Chats: 64, SystemPrompts: 12, SystemTokens: 6000, Turns: 5, UserTokens: 300, AnswerTokens: 60,
		Think: time.Second, OneOffs: 8, OneOffTokens: 8000,
	}.Sessions()
	if c.trace != "" {
		t, err := trace.Open(c.trace)
		if err != nil {
			return nil, err
		}
		if !t.HasSessions() {
			return nil, fmt.Errorf("%s has no sessions, which alone can be played in a closed loop", c.trace)
		}
		all = t.Sessions()
	}
	return func(yield func(*trace.Session) bool) {
		n := 0
		for s := range all {
			if n >= c.limit || !yield(s) {
				return
			}
			n += s.Len
		}
	}, nil
}

// chat is the body of a streamed chat completion with a message of about so many bytes.
func chat(name string, size int) string {
	text := name + strings.Repeat(" and so it goes on", size/18)
	body, err := json.Marshal(map[string]any{
		"model": enginesim.DefaultModel, "stream": true, "max_tokens": 4,
		"messages": []map[string]string{{"role": "user", "content": text}},
	})
	if err != nil {
		panic(err) // strings always marshal
	}
	return string(body)
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// ask sends a request and reads the whole answer.
func ask(ctx context.Context, url, body string) (time.Duration, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Content-Type", "application/json")
	began := time.Now()
	resp, err := client.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("status %d", resp.StatusCode)
	}
	return time.Since(began), nil
}

func percentile(times []time.Duration, percent int) time.Duration {
	slices.Sort(times)
	return times[(len(times)-1)*percent/100]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
