// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const (
	// unseenFor is how long a replica that a dynamic source stopped naming is
	// kept, so that a short absence does not cost its state.
	unseenFor = 10 * time.Minute
	// sweepEvery is how often such replicas are looked for.
	sweepEvery = time.Minute
	// largeFleet is from how many members on what they have in common is not
	// worked out after each scrape, which takes time in proportion to them, but
	// about so many times for each time that all of them are scraped.
	largeFleet = 64
	// youngFor is how long a fleet that learns its replicas from requests can't
	// tell a new one from one that it only hears of now.
	youngFor = 10 * time.Second
)

// Config is what a fleet needs to know besides its replicas.
type Config struct {
	// Name tells fleets apart in metrics and logs.
	Name string
	// Poll gives the settings for scraping the replica at a dial address, or
	// false if it is not to be scraped. A nil Poll scrapes nothing.
	Poll func(addr string) (metrics.PollConfig, bool)
	// Interval is the time between scrapes.
	Interval time.Duration
	// Elsewhere says that the metrics pages have another port than the
	// requests, so that a refused connection tells nothing of the engine.
	Elsewhere bool
	// Capacity is the KV cache assumed of a replica whose engine does not tell
	// its own, in tokens. Default: 500,000.
	Capacity int
	// Events says how the replicas' KV events are followed; nil for not at all.
	Events *Events
	// API is the way to the engines' front ends. Without it neither tokens nor
	// lists of models are asked for.
	API *API
	// Changed, if not nil, is called after each scrape was taken in.
	Changed func(now time.Time)
	// Logger may be nil.
	Logger *zap.Logger
}

// Fleet is the set of replicas that one policy chooses from. It holds each of
// them in the registry from the moment it first hears of it, and scrapes them
// from Start to Stop.
type Fleet struct {
	Config
	Registry *Registry

	members atomic.Pointer[map[string]*member] // read-mostly; replaced whole

	mu       sync.Mutex // guards changes of members and what follows
	ctx      context.Context
	cancel   context.CancelFunc
	pollers  sync.WaitGroup
	released bool
	first    time.Time // when the first replica joined by a request, if it was the first of all

	learner  *kvevents.Learner        // nil if no tokens are learned
	unlisted chan *Replica            // whose lists of models are wanted
	common   atomic.Pointer[[]string] // models that every member's metrics page names

	observed atomic.Uint64 // scrapes

	ratio atomic.Uint64 // bytes per token, as float bits
	rate  atomic.Uint64 // mean prefill rate, as float bits
}

type member struct {
	replica *Replica
	static  bool
	seen    atomic.Int64 // of the last request whose pool named it, in seconds after epoch
	stop    context.CancelFunc
	truth   *truth // nil if its events are not followed
}

// New returns a fleet with the given static members. It opens no connection.
func (g *Registry) New(cfg Config, addrs []string) *Fleet {
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	f := &Fleet{Config: cfg, Registry: g, unlisted: make(chan *Replica, 64)}
	if cfg.Events != nil && cfg.API != nil {
		f.learner = kvevents.NewLearner(g.alignment, kvevents.LearnerConfig{Client: cfg.API.Client, Confirm: f.confirms, Notify: f.tokensTold})
	}
	f.ratio.Store(math.Float64bits(DefaultBytesPerToken))
	f.rate.Store(math.Float64bits(DefaultPrefillRate))
	members := make(map[string]*member, len(addrs))
	for _, a := range addrs {
		if members[a] == nil {
			members[a] = &member{replica: f.hold(a), static: true}
		}
	}
	f.members.Store(&members)
	f.lend(time.Now()) // what an earlier configuration has learned
	return f
}

func (f *Fleet) hold(addr string) *Replica {
	p := f.Registry.hold(addr)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.assumed.elsewhere = f.Elsewhere
	if f.Interval > 0 {
		p.assumed.staleAfter = max(3*f.Interval, 5*time.Second)
	}
	if f.Capacity > 0 {
		p.assumed.capacity = float64(f.Capacity)
		p.resize()
	}
	return p
}

// Start begins to scrape the members and to follow their events, now and
// later ones.
func (f *Fleet) Start() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx != nil || f.released {
		return
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	for _, m := range *f.members.Load() {
		f.follow(m)
	}
	f.pollers.Go(func() { f.sweep(f.ctx) })
	if f.API != nil {
		f.pollers.Go(func() { f.readModels(f.ctx) })
	}
	if f.learner != nil {
		f.pollers.Go(func() { _ = f.learner.Run(f.ctx) }) // ends with the context's error
	}
}

// Stop ends scraping and lets go of the replicas. Requests may still be chosen
// for and finished afterwards: they see the state as it was.
func (f *Fleet) Stop() {
	f.mu.Lock()
	if f.released {
		f.mu.Unlock()
		return
	}
	f.released = true
	if f.cancel != nil {
		f.cancel()
	}
	members := *f.members.Load()
	f.mu.Unlock()
	f.pollers.Wait()
	for addr, m := range members {
		f.Registry.leave(m.truth)
		f.Registry.release(addr)
	}
}

// Replica returns the member at addr, which joins if it is new.
func (f *Fleet) Replica(addr string, now time.Time) *Replica {
	m := (*f.members.Load())[addr]
	if m == nil {
		m = f.join(addr, now)
	}
	if s := second(now); !m.static && m.seen.Load() != s {
		m.seen.Store(s)
	}
	return m.replica
}

// epoch is what short times are counted from. It has a monotonic reading, so
// they do not jump with the clock.
var epoch = time.Now()

func second(now time.Time) int64 { return int64(now.Sub(epoch) / time.Second) }

func (f *Fleet) join(addr string, now time.Time) *member {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := *f.members.Load()
	if m := old[addr]; m != nil {
		return m
	}
	if f.released { // a straggler of a config that was replaced
		return &member{replica: f.Registry.stray(addr)}
	}
	m := &member{replica: f.hold(addr)}
	members := make(map[string]*member, len(old)+1)
	for a, o := range old {
		members[a] = o
	}
	members[addr] = m
	m.seen.Store(second(now))
	if len(old) == 0 {
		f.first = now
	}
	if now.Sub(f.first) > youngFor {
		m.replica.join(now)
	}
	f.members.Store(&members)
	if f.ctx != nil {
		f.follow(m)
	}
	f.Logger.Info("replica joined", zap.String("fleet", f.Name), zap.String("replica", addr))
	return m
}

// follow starts the poller of one member, and the streams of its events. The
// caller holds f.mu.
func (f *Fleet) follow(m *member) {
	if f.Events != nil {
		m.truth = f.Registry.listen(m.replica, f.Events, f.Logger.With(zap.String("fleet", f.Name)))
	}
	if f.Poll == nil {
		return
	}
	cfg, ok := f.Poll(m.replica.Addr)
	if !ok {
		return
	}
	p, err := metrics.NewPoller(cfg, func(s metrics.Scrape) { f.Observe(m.replica, s, time.Now()) })
	if err != nil {
		f.Logger.Error("replica can't be polled", zap.String("fleet", f.Name), zap.String("replica", m.replica.Addr), zap.Error(err))
		return
	}
	ctx, cancel := context.WithCancel(f.ctx)
	m.stop = cancel
	f.pollers.Go(func() { p.Run(ctx) })
}

// Observe takes in a scrape of a member.
func (f *Fleet) Observe(p *Replica, s metrics.Scrape, now time.Time) {
	changes := p.Observe(s, now)
	if t := p.truth.Load(); t != nil && f.Events != nil && s.Snapshot != nil {
		t.widen(s.Snapshot.Rows, f.Events, f.Logger.With(zap.String("fleet", f.Name)))
	}
	if every := uint64(max(1, len(*f.members.Load())/largeFleet)); f.observed.Add(1)%every == 0 {
		f.lend(now)
		f.findCommon()
	}
	if f.Changed != nil {
		f.Changed(now)
	}
	for _, c := range changes {
		f.Logger.Info("replica changed", zap.String("fleet", f.Name), zap.String("replica", p.Addr),
			zap.String("fact", c.Fact), zap.String("from", c.Old), zap.String("to", c.New))
	}
}

// lend works out the fleet's means and lends them to members that know no better.
func (f *Fleet) lend(now time.Time) {
	var rates, n, speeds, fast, bytes, tokens float64
	all := prior()
	members := *f.members.Load()
	for _, m := range members {
		m.replica.mu.RLock()
		if m.replica.rate.known() {
			rates += m.replica.rate.perSecond(0, true)
			n++
		}
		all.pool(&m.replica.rate)
		if peak := m.replica.rate.speed.peak; peak > 0 {
			speeds += peak
			fast++
		}
		bytes += m.replica.text.bytes
		tokens += m.replica.text.tokens
		m.replica.mu.RUnlock()
	}
	ratio, mean := float64(DefaultBytesPerToken), all.pooled()
	if tokens > 0 {
		ratio = bytes / tokens
	}
	if n > 0 {
		mean = rates / n
	}
	f.ratio.Store(math.Float64bits(ratio))
	f.rate.Store(math.Float64bits(mean))
	measured := all.seconds > prior().seconds
	for _, m := range members {
		m.replica.mu.Lock()
		m.replica.assumed.rate, m.replica.assumed.bytesPerToken = mean, ratio
		m.replica.assumed.measured = measured
		m.replica.assumed.speed = speeds / max(1, fast)
		m.replica.settle(now)
		m.replica.mu.Unlock()
	}
}

// BytesPerToken is how many bytes of prompt text make one token, as learned
// from the members' own counts.
func (f *Fleet) BytesPerToken() float64 { return math.Float64frombits(f.ratio.Load()) }

// Rate is the members' mean prefill rate, in uncached prompt tokens a second.
func (f *Fleet) Rate() float64 { return math.Float64frombits(f.rate.Load()) }

// Members lists the replicas in order of their address.
func (f *Fleet) Members() []*Replica {
	var out []*Replica
	for _, m := range *f.members.Load() {
		out = append(out, m.replica)
	}
	slices.SortFunc(out, func(a, b *Replica) int { return strings.Compare(a.Addr, b.Addr) })
	return out
}

func (f *Fleet) sweep(ctx context.Context) {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			f.dropUnseen(now)
		}
	}
}

// dropUnseen lets go of dynamic members that no pool named for a while.
func (f *Fleet) dropUnseen(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.released {
		return
	}
	old := *f.members.Load()
	members := make(map[string]*member, len(old))
	for addr, m := range old {
		if m.static || second(now)-m.seen.Load() < int64(unseenFor/time.Second) {
			members[addr] = m
			continue
		}
		if m.stop != nil {
			m.stop()
		}
		f.Registry.leave(m.truth)
		f.Registry.release(addr)
		f.Logger.Info("replica left", zap.String("fleet", f.Name), zap.String("replica", addr))
	}
	if len(members) < len(old) {
		f.members.Store(&members)
	}
}

// join starts the warm-up of a replica that joined a fleet at work.
func (p *Replica) join(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.scrapes.Good == 0 && p.seq == 0 {
		p.warm.start(now)
	}
}
