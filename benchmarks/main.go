// SPDX-License-Identifier: Apache-2.0

// Command benchmarks compares this plugin end to end with Caddy's own policies and with other routers, in
// front of the same simulated engines: what a router adds to a request, what it costs in CPU and memory,
// and what it makes of a workload. README.md tells how to install the others.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// config is what the command line says.
type config struct {
	caddy, venvs, trace string
	routers             string
	replicas            int
	requests            int           // of one client
	span                time.Duration // of the 32 clients
	limit, sessions     int
	json                bool
}

// outcome is what was measured of a router.
type outcome struct {
	Router  string `json:"router"`
	Version string `json:"version"`

	AddedP50 float64 `json:"added_p50_ms"` // over the engine without a router, one client, 32 KiB, streamed
	AddedP99 float64 `json:"added_p99_ms"`
	Rate     float64 `json:"requests_per_second"`      // 32 clients, 2 KiB
	CPU      float64 `json:"cpu_seconds_per_thousand"` // of the router, meanwhile
	Peak     float64 `json:"peak_mib"`                 // resident, over both and the workload

	HitRate  float64 `json:"hit_rate"` // of the workload
	TTFTMean float64 `json:"ttft_mean_seconds"`
	TTFTP90  float64 `json:"ttft_p90_seconds"`
	Failed   int     `json:"failed"`
}

func main() {
	c := config{}
	flag.StringVar(&c.caddy, "caddy", "", "Caddy binary with the plugin (required)")
	flag.StringVar(&c.venvs, "venvs", "", "folder that install.sh made; without it other routers are left out")
	flag.StringVar(&c.routers, "routers", "", "those to compare, separated by commas (default: all there are)")
	flag.StringVar(&c.trace, "trace", "", "trace to play, as for caddy kv-cache demo (default: built-in chats)")
	flag.IntVar(&c.replicas, "replicas", 4, "number of simulated engines")
	flag.IntVar(&c.requests, "requests", 600, "requests of the single client")
	flag.DurationVar(&c.span, "span", 8*time.Second, "how long the 32 clients go on")
	flag.IntVar(&c.limit, "limit", 300, "requests of the workload")
	flag.IntVar(&c.sessions, "sessions", 16, "sessions going on at a time")
	flag.BoolVar(&c.json, "json", false, "print a JSON object per router")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &c); err != nil {
		fmt.Fprintln(os.Stderr, "benchmarks:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, c *config) error {
	if c.caddy == "" {
		return errors.New("-caddy is missing: build one with `go build -o caddy ./cmd/caddy`")
	}
	chosen := chosenRouters(c)
	if len(chosen) == 0 {
		return fmt.Errorf("no router is called any of %q, or install.sh has not installed it", c.routers)
	}
	if !c.json {
		fmt.Print(tableHead)
	}
	for _, r := range chosen {
		o, err := compare(ctx, c, r)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s is left out: %v\n", r.name, err)
			continue
		}
		if c.json {
			if err := json.NewEncoder(os.Stdout).Encode(o); err != nil {
				return err
			}
			continue
		}
		fmt.Print(o.row())
	}
	return nil
}

const tableHead = `| router | version | added p50, p99 (ms) | requests/s | CPU s per 1,000 | peak MiB | hit rate | TTFT mean, p90 (s) | failed |
|---|---|---|---|---|---|---|---|---|
`

func (o *outcome) row() string {
	return fmt.Sprintf("| %s | %s | %.2f, %.2f | %.0f | %.2f | %.0f | %.1f %% | %.2f, %.2f | %d |\n", o.Router, o.Version,
		o.AddedP50, o.AddedP99, o.Rate, o.CPU, o.Peak, 100*o.HitRate, o.TTFTMean, o.TTFTP90, o.Failed)
}

func chosenRouters(c *config) []router {
	var chosen []router
	for _, r := range routers(c) {
		if c.routers == "" || strings.Contains(","+c.routers+",", ","+r.name+",") {
			chosen = append(chosen, r)
		}
	}
	return chosen
}
