// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/capture"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/usage"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// defaultMaxBody is how much of a body is looked at.
const defaultMaxBody = 4 << 20

// core is what both policies are built on: the fleet they choose from, and the
// way of a request from its body to a booked attempt.
type core struct {
	policy  string
	key     string // of the decision among the request's variables
	fleet   *fleet.Fleet
	logger  *zap.Logger
	outlook outlook
	poll    *pollSettings
	api     *fleet.API            // nil if no front end is asked
	handler *reverseproxy.Handler // nil if the policy stands alone
	dynamic bool                  // upstreams are new objects at every request
	known   atomic.Pointer[knownPool]
	changed func(time.Time)
	counts  *metrics.Decisions
	group   *metrics.Group // of the requests that this policy decides on
	recent  *recent

	muted      bool // whom the policy decides for books the outcome
	otherName  string
	otherGroup *metrics.Group // of those that another policy decides on
	captured   *capture.File  // nil if there is none
	captureKey string
	hide       func() // from operators; nil while not shown
}

type coreConfig struct {
	policy     string
	name       string
	maxBody    int64
	kvCapacity int
	polling    *Polling // nil: no polling
	events     *Events  // nil: none are followed
	apiKey     string
	seed       uint64
	tenant     string
	changed    func(time.Time) // called when a replica's state has changed
	explain    func(*http.Request) *admin.Explanation
	waiting    func() int // requests held back
	capture    *Capture   // nil: none is written
}

// policies numbers the policies of this process, so that each keeps its
// decisions under a key of its own.
var policies atomic.Uint64

func (c *core) provision(ctx caddy.Context, cfg coreConfig) error {
	c.policy = cfg.policy
	c.logger = ctx.Logger()
	c.key = "kv_cache.decision." + strconv.FormatUint(policies.Add(1), 10)
	c.outlook = outlook{limit: defaultMaxBody, seed: cfg.seed, tenant: cfg.tenant}
	if cfg.maxBody > 0 {
		c.outlook.limit = int(cfg.maxBody)
	}
	handler := parent(ctx)
	c.handler = handler
	c.outlook.retry = retriesOf(handler)
	c.dynamic = handler != nil && handler.DynamicUpstreamsRaw != nil
	settings := fleet.Config{Logger: c.logger, Capacity: cfg.kvCapacity, Changed: cfg.changed}
	c.changed = cfg.changed
	if cfg.polling != nil {
		poll, err := cfg.polling.settings(ctx, handler)
		if err != nil {
			return err
		}
		c.poll = poll
		settings.Elsewhere = poll.port != 0
		settings.Poll, settings.Interval = poll.target, time.Duration(cfg.polling.Interval)
	}
	if cfg.events != nil {
		settings.Events = &fleet.Events{Stream: cfg.events.stream, Pinned: pinsRank(handler)}
	}
	if cfg.events != nil || cfg.polling != nil && !cfg.polling.Off {
		front, err := api(handler, cfg.apiKey)
		if err != nil {
			return err
		}
		c.api, settings.API = front, front
	}
	app, err := theApp(ctx)
	if err != nil {
		return err
	}
	settings.Name = app.uniqueName(cfg.name)
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return fmt.Errorf("registering metrics: %v", err)
	}
	c.fleet = fleet.Process.New(settings, staticAddrs(handler))
	c.counts = metrics.NewDecisions(settings.Name, c.policy, reasons, whys)
	c.group = metrics.NewGroup(settings.Name, c.policy)
	c.recent = new(recent)
	if cfg.capture != nil {
		if c.captured, c.captureKey, err = cfg.capture.open(); err != nil {
			return err
		}
	}
	app.add(c.fleet, func() {
		c.show(cfg)
		if c.captured != nil {
			c.captured.Start()
		}
	})
	return nil
}

func (c *core) cleanup() error {
	if c.fleet != nil {
		c.fleet.Stop()
		c.counts.Close()
		for _, g := range []*metrics.Group{c.group, c.otherGroup} {
			if g != nil {
				g.Close()
			}
		}
		if c.hide != nil {
			c.hide()
		}
	}
	if c.captured != nil {
		if _, err := captureFiles.Delete(c.captureKey); err != nil {
			return err
		}
	}
	c.poll.close()
	if c.api != nil {
		c.api.Client.CloseIdleConnections()
	}
	return nil
}

// parent is the reverse_proxy handler that the policy belongs to, nil if it
// stands alone. At this time its upstreams are decoded, but not provisioned.
func parent(ctx caddy.Context) *reverseproxy.Handler {
	modules := ctx.Modules()
	for i := len(modules) - 1; i >= 0; i-- {
		if h, ok := modules[i].(*reverseproxy.Handler); ok {
			return h
		}
	}
	return nil
}

// staticAddrs lists the dial addresses that are known before any request.
func staticAddrs(h *reverseproxy.Handler) []string {
	if h == nil {
		return nil
	}
	addrs := make([]string, 0, len(h.Upstreams))
	for _, u := range h.Upstreams {
		addrs = append(addrs, u.Dial)
	}
	return addrs
}

// decide returns the request's decision and whether this is its first attempt.
func (c *core) decide(r *http.Request) (*decision, bool) {
	arrived := time.Now()
	d, first := decisionOf(r, c.key, &c.outlook, c.changed)
	if first {
		// The request's end comes on another goroutine, which must not read the
		// request's variables.
		meter := usage.Of(r.Context())
		d.mu.Lock() // the client may leave at any time
		d.arrived, d.muted = arrived, c.muted
		if !c.muted {
			d.teller, d.meter = c, meter
		}
		d.mu.Unlock()
		if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
			repl.Map(d.placeholder)
		}
	}
	return d, first
}

// fallBack lets another policy choose for a request without a prompt.
func (c *core) fallBack(fallback reverseproxy.Selector, bar bar, d *decision, pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter, start time.Time) *reverseproxy.Upstream {
	u := c.delegate(fallback, d, pool, r, w, bar, start)
	if u == nil {
		c.none(r, ReasonNone, start)
		return nil
	}
	a := d.attempt()
	*a = attempt{replica: c.fleet.Replica(u.String(), start), reason: d.reason, cost: math.NaN()}
	a.Aside = d.reason.aside()
	d.send(a, start)
	d.land()
	c.note(r, d, start)
	return u
}

// knownPool remembers which replica each upstream of a static pool is. Dynamic
// pools have new upstreams at every request, and go by address.
type knownPool struct {
	upstreams reverseproxy.UpstreamPool
	replicas  []*fleet.Replica
}

// replica returns the replica of pool[i].
func (c *core) replica(pool reverseproxy.UpstreamPool, i int, now time.Time) *fleet.Replica {
	k := c.known.Load()
	if k == nil && !c.dynamic {
		k = c.remember(pool, now)
	}
	if k != nil && i < len(k.upstreams) && k.upstreams[i] == pool[i] {
		return k.replicas[i]
	}
	return c.fleet.Replica(pool[i].String(), now)
}

// replicas returns the replicas of a whole pool, in room if they have to be listed.
func (c *core) replicas(pool reverseproxy.UpstreamPool, room []*fleet.Replica, now time.Time) (list, left []*fleet.Replica) {
	if k := c.known.Load(); k != nil && slices.Equal(k.upstreams, pool) {
		return k.replicas, room
	}
	if !c.dynamic {
		return c.remember(pool, now).replicas, room
	}
	room = room[:0]
	for _, u := range pool {
		room = append(room, c.fleet.Replica(u.String(), now))
	}
	return room, room
}

func (c *core) remember(pool reverseproxy.UpstreamPool, now time.Time) *knownPool {
	k := &knownPool{upstreams: slices.Clone(pool), replicas: make([]*fleet.Replica, len(pool))}
	for i, u := range pool {
		k.replicas[i] = c.fleet.Replica(u.String(), now)
	}
	c.known.Store(k)
	return k
}

// tokens is the length of the prompt that is followed.
func (c *core) tokens(p *prompt.Prompt) float64 {
	if p.Tokens > 0 {
		return float64(p.Tokens)
	}
	return max(1, float64(p.Bytes)/c.fleet.BytesPerToken())
}

// extraTokens is the length of further prompts in the same request.
func (c *core) extraTokens(p *prompt.Prompt) float64 {
	if p.Tokens > 0 {
		return float64(p.Extra) / tokenIDBytes
	}
	return float64(p.Extra) / c.fleet.BytesPerToken()
}

// tokensPerBlock is how many tokens one block of the chain stands for.
func (c *core) tokensPerBlock(p *prompt.Prompt) float64 {
	if p.Tokens > 0 {
		return prompt.BlockSize / tokenIDBytes
	}
	return prompt.BlockSize / c.fleet.BytesPerToken()
}

// tokenIDBytes is the room that a token id takes in the chain.
const tokenIDBytes = 4

// textBytes is the text whose token count the engine will tell, 0 if the
// request has token ids.
func textBytes(p *prompt.Prompt) float64 {
	if p.Tokens > 0 {
		return 0
	}
	return float64(p.Bytes + p.Extra)
}
