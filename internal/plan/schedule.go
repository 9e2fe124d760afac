// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
)

// Terms bounds how requests wait.
type Terms struct {
	// Room is how much prefill work a replica may have queued and still be
	// sent more, as the time that it takes. A request whose replica has more is
	// held back, free to change its mind. An infinite Room binds every request
	// on arrival.
	Room time.Duration
	// Age is how fast waiting makes a request more urgent, in tokens of cost a
	// second.
	Age float64
	// Slip bounds what others may cost a request: it goes first when it has
	// waited Slip times as long as first come, first served would have made it
	// wait, plus Grace.
	Slip  float64
	Grace time.Duration
	// Longest is how long a request may wait at all; then it is sent wherever
	// it costs least.
	Longest time.Duration
	// Waiting is how many requests may wait; the next are bound on arrival.
	Waiting int
}

// DefaultTerms are used when nothing is configured; docs/choice.md tells where
// the figures come from.
var DefaultTerms = Terms{
	Room:    300 * time.Millisecond,
	Age:     200,
	Slip:    2,
	Grace:   2 * time.Second,
	Longest: 200 * time.Second,
	Waiting: 16384,
}

// BindOnArrival never lets a request wait.
var BindOnArrival = Terms{Room: math.MaxInt64}

// lookAhead is how many waiting requests one event plans for, at most. The
// plan ends earlier when no replica has room left, which is the rule.
const lookAhead = 256

// Request is one that a replica is wanted for.
type Request struct {
	// Chain, Tokens and PerBlock describe the prompt: its block hashes, its
	// length, and how many tokens a block stands for. Extra is further work in
	// tokens that no cache saves.
	Chain            []uint64
	Tokens, PerBlock float64
	Extra            float64
	// Beyond is how far a match reaches beyond its last full block on average,
	// in tokens: half a block, where the blocks are cut without regard to where
	// prompts differ.
	Beyond float64
	// Key makes the rendezvous order.
	Key uint64
	// Replicas are those to choose from, and Caller knows more of them.
	Replicas []*fleet.Replica
	Caller   Caller
	// Serves tells which of them serve the request's model; nil for all.
	Serves []bool
	// Holder corrects what is believed of the replicas' caches; nil for nobody.
	Holder Holder

	held     []float64 // tokens, by place in Replicas; empty without a Holder
	blocks   []int32   // matched, by slot
	matched  time.Time
	arrived  time.Time
	deadline time.Time
	least    float64 // tokens to compute where most of the prompt is held
	rank     float64 // smaller goes first
	bound    bool
	ready    chan struct{}
}

// Caller is who wants a replica. The scheduler calls it under its lock, so it
// must be quick and must not call back.
type Caller interface {
	// Open tells whether the request's i-th replica may be chosen at this moment.
	Open(i int) bool
	// Tried tells whether an attempt of the request failed there.
	Tried(i int) bool
	// Send books the choice on its replica, so that the next choice sees it.
	Send(Choice)
}

// Holder knows from the engines themselves what replicas hold of a request's
// prompt. The scheduler calls it under its lock.
type Holder interface {
	// Held returns how many of the prompt's tokens a replica holds that is
	// believed to hold so many.
	Held(p *fleet.Replica, believed float64) float64
}

// Choice is the replica that a request goes to.
type Choice struct {
	// Index is the replica's place in the request's Replicas, -1 if none is open.
	Index int
	// Matched is how many blocks of the chain it is believed to hold, Longest
	// how many any open replica holds, Hit the tokens this saves, and Uncached
	// those that remain.
	Matched, Longest int
	Hit, Uncached    float64
	// Open is how many replicas there were to choose from, Cost what the choice
	// costs and Next the cost of the next best, +Inf if there is none.
	Open       int
	Cost, Next float64
	// Waited is how long the request was held back.
	Waited time.Duration
}

// Scheduler decides for the requests of one fleet where each goes and when. It
// holds requests back while the replica where they would cost least has work
// queued: bound on arrival they would wait there all the same, behind long
// prompts, while their prefix may be evicted and a better place come free.
//
// At each event (a request comes or leaves, one finishes, a scrape arrives, a
// queue is believed to have drained) a small list schedule is made anew: in
// order of urgency each request takes the replica where it costs least,
// counting those before it into the queues, and those whose replica has room
// are sent.
//
// All methods take the time, so that a replay runs them in virtual time.
type Scheduler struct {
	Rule  Rule
	Terms Terms

	index *residency.Index
	rate  func() float64 // the fleet's mean prefill rate

	held atomic.Int64 // how many wait; read without the lock

	mu       sync.Mutex
	waiting  []*Request // by rank
	queued   []*Request // the same by arrival, with some that were sent already
	backlog  float64    // what the waiting would compute at least, in tokens
	lanes    []lane     // by slot
	epoch    uint64
	cands    []Candidate
	choices  []int
	hits     []float64
	order    []*Request
	sentKeys []uint64 // of those that this event has sent
}

// lane is what an event knows of one replica.
type lane struct {
	epoch    uint64
	load     fleet.Load
	queue    float64 // with what this event's plan adds
	inFlight float64
	free     float64
	roomy    float64 // queue at or below this: more may be sent
}

// NewScheduler returns a scheduler for the replicas of an index. rate tells the
// fleet's mean prefill rate in tokens a second.
func NewScheduler(index *residency.Index, rate func() float64) *Scheduler {
	return &Scheduler{Rule: Default, Terms: DefaultTerms, index: index, rate: rate}
}

// Submit decides at once, if it can: the choice has then been sent. Otherwise
// the request waits, until Ready is closed or Leave is called.
func (s *Scheduler) Submit(r *Request, now time.Time) (sent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch++
	r.arrived, r.bound, r.ready = now, false, nil // it may be used again
	s.match(r, now)
	full := len(s.waiting) >= s.Terms.Waiting
	if c, fits := s.choose(r, now); full || c.Index < 0 || fits && len(s.waiting) == 0 {
		s.send(r, c, now)
		return true
	}
	r.ready = make(chan struct{})
	s.hold(r, now)
	s.plan(now)
	return r.bound
}

// Ready is closed when a waiting request has been sent. It is nil if Submit
// sent the request without making it wait at all: only then the scheduler has
// no hold of it, and it may be used again.
func (r *Request) Ready() <-chan struct{} { return r.ready }

// Leave takes a waiting request out: its client left. It reports whether the
// request still waited; if not, it has been sent.
func (s *Scheduler) Leave(r *Request, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.bound {
		return false
	}
	s.drop(r)
	return true
}

// Event makes the plan anew: something has changed.
func (s *Scheduler) Event(now time.Time) {
	if s.held.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch++
	s.plan(now)
}

// Waiting is the number of requests held back.
func (s *Scheduler) Waiting() int { return int(s.held.Load()) }

// Next is when the next event is due by itself, because a queue is believed to
// have drained by then; false if nobody waits.
func (s *Scheduler) Next(now time.Time) (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) == 0 {
		return time.Time{}, false
	}
	s.epoch++
	soonest := math.Inf(1)
	for _, p := range s.waiting[0].Replicas {
		// A replica with room that was passed over is no event to wait for.
		if l := s.lane(p, now); l.load.Queue > l.roomy {
			soonest = min(soonest, (l.load.Queue-l.roomy)/l.load.Rate)
		}
	}
	soonest = min(max(soonest, shortestPause.Seconds()), longestPause.Seconds())
	return now.Add(time.Duration(soonest * float64(time.Second))), true
}

// oneBatch is the least a replica may have queued and still be sent more, in
// tokens: what an engine computes in one step anyway (vLLM's default
// max_num_batched_tokens for online serving).
const oneBatch = 2048

const (
	shortestPause = time.Millisecond
	longestPause  = time.Second
	// rematchAfter is how old a waiting request's match may be when it is
	// planned for.
	rematchAfter = 100 * time.Millisecond
)

// hold puts a request among the waiting.
func (s *Scheduler) hold(r *Request, now time.Time) {
	backlog, rate := s.backlog, 0.0
	for i, p := range r.Replicas {
		if r.Caller.Open(i) {
			l := s.lane(p, now)
			backlog += l.load.Queue
			rate += l.load.Rate
		}
	}
	fair := time.Duration(backlog / max(rate, 1) * float64(time.Second))
	r.deadline = now.Add(min(time.Duration(s.Terms.Slip*float64(fair))+s.Terms.Grace, s.Terms.Longest))
	// Urgency grows with waiting at the same pace for all, so the order of two
	// requests does not change with time, and the time of arrival stands for it.
	r.least = s.leastUncached(r)
	r.rank = s.Rule.MatchWeight*r.least + s.Terms.Age*float64(r.arrived.UnixNano())/float64(time.Second)
	s.backlog += r.least
	s.waiting = slices.Insert(s.waiting, s.find(func(w float64) bool { return w > r.rank }), r)
	s.queued = append(s.queued, r)
	s.held.Store(int64(len(s.waiting)))
}

// drop takes a request from among the waiting.
func (s *Scheduler) drop(r *Request) {
	r.bound = true
	i := s.find(func(w float64) bool { return w >= r.rank })
	for s.waiting[i] != r {
		i++
	}
	s.waiting = slices.Delete(s.waiting, i, i+1)
	s.held.Store(int64(len(s.waiting)))
	if s.backlog -= r.least; len(s.waiting) == 0 {
		s.backlog, s.queued = 0, s.queued[:0]
	}
}

// find returns the first place among the waiting whose rank is beyond.
func (s *Scheduler) find(beyond func(float64) bool) int {
	return sort.Search(len(s.waiting), func(i int) bool { return beyond(s.waiting[i].rank) })
}

// match looks up which replicas hold how much of the prompt.
func (s *Scheduler) match(r *Request, now time.Time) {
	r.blocks = s.index.Match(r.Chain, r.blocks[:0])
	r.matched = now
	r.held = r.held[:0]
	if r.Holder == nil {
		return
	}
	for _, p := range r.Replicas {
		r.held = append(r.held, r.Holder.Held(p, r.believed(p)))
	}
}

// heldBy is how many of the prompt's tokens its i-th replica holds.
func (r *Request) heldBy(i int) float64 {
	if r.Holder != nil {
		return r.held[i]
	}
	return r.believed(r.Replicas[i])
}

// believed is how many of the prompt's tokens a replica is believed to hold.
func (r *Request) believed(p *fleet.Replica) float64 {
	m := p.Matched(r.blocks)
	if m == 0 {
		return 0
	}
	tokens := float64(m) * r.PerBlock
	return tokens + max(0, min(r.Beyond, (r.Tokens-tokens)/2))
}

// blocksAt is the same in blocks of the chain.
func (r *Request) blocksAt(i int) int {
	if r.Holder != nil {
		return min(len(r.Chain), int(r.held[i]/r.PerBlock))
	}
	return r.Replicas[i].Matched(r.blocks)
}

// leastUncached is what the replica that holds most of the prompt would compute.
func (s *Scheduler) leastUncached(r *Request) float64 {
	least := r.Tokens
	for i := range r.Replicas {
		least = min(least, r.Tokens-r.heldBy(i))
	}
	return max(0, least) + r.Extra
}

// plan is the list schedule.
func (s *Scheduler) plan(now time.Time) {
	s.inOrder(now)
	s.sentKeys = s.sentKeys[:0]
	full := len(s.order) > 0 && !s.anyRoom(s.order[0], now)
	for _, w := range s.order {
		late := now.Sub(w.arrived) >= s.Terms.Longest
		if full && !late { // those come first
			break
		}
		if now.Sub(w.matched) > rematchAfter || slices.Contains(s.sentKeys, w.Key) {
			s.match(w, now)
		}
		c, fits := s.choose(w, now)
		if c.Index < 0 || fits || late {
			s.drop(w)
			s.send(w, c, now)
			s.sentKeys = append(s.sentKeys, w.Key)
		} else {
			l := s.lane(w.Replicas[c.Index], now)
			l.queue += c.Uncached
			l.inFlight++
			l.free -= w.Tokens + w.Extra
		}
		full = !s.anyRoom(w, now)
	}
}

// inOrder lists the waiting that this event looks at: whoever has waited
// longer than promised, oldest first, and then by rank.
func (s *Scheduler) inOrder(now time.Time) {
	s.order = s.order[:0]
	s.forgetSent()
	for _, w := range s.queued[:min(len(s.queued), lookAhead)] {
		if !w.bound && !now.Before(w.deadline) {
			s.order = append(s.order, w)
		}
	}
	overdue := len(s.order)
	for _, w := range s.waiting[:min(len(s.waiting), lookAhead)] {
		if now.Before(w.deadline) || !slices.Contains(s.order[:overdue], w) {
			s.order = append(s.order, w)
		}
	}
}

// forgetSent clears the head of the queue by arrival of those that were sent,
// and the whole of it when most were.
func (s *Scheduler) forgetSent() {
	n := 0
	for n < len(s.queued) && s.queued[n].bound {
		n++
	}
	s.queued = slices.Delete(s.queued, 0, n)
	if len(s.queued) > 2*len(s.waiting)+lookAhead {
		s.queued = slices.DeleteFunc(s.queued, func(w *Request) bool { return w.bound })
	}
}

// anyRoom tells whether some replica can still be sent work by this event.
func (s *Scheduler) anyRoom(r *Request, now time.Time) bool {
	for _, p := range r.Replicas {
		if l := s.lane(p, now); l.queue <= l.roomy {
			return true
		}
	}
	return false
}

// lane returns the state of a replica at this event.
func (s *Scheduler) lane(p *fleet.Replica, now time.Time) *lane {
	slot := int(p.Slot)
	if slot < 0 { // in no index: that is full, or the replica's config was replaced
		l := new(lane)
		s.read(l, p, now)
		return l
	}
	for slot >= len(s.lanes) {
		s.lanes = append(s.lanes, lane{})
	}
	l := &s.lanes[slot]
	if l.epoch != s.epoch {
		l.epoch = s.epoch
		s.read(l, p, now)
	}
	return l
}

func (s *Scheduler) read(l *lane, p *fleet.Replica, now time.Time) {
	l.load = p.Load(now)
	l.queue, l.inFlight, l.free = l.load.Queue, l.load.InFlight, l.load.Free()
	l.roomy = math.Inf(1)
	if l.load.QueueKnown {
		l.roomy = max(s.Terms.Room.Seconds()*l.load.Rate, oneBatch)
	}
}

// send binds a request to a choice and lets the next one see it.
func (s *Scheduler) send(r *Request, c Choice, now time.Time) {
	c.Waited = now.Sub(r.arrived)
	r.bound = true
	r.Caller.Send(c)
	if c.Index >= 0 {
		p := r.Replicas[c.Index]
		l := s.lane(p, now)
		planned := l.queue - l.load.Queue
		s.read(l, p, now)
		l.queue += planned
	}
	if r.ready != nil {
		close(r.ready)
	}
}

// strictness says which replicas are good enough. The strictest set that is
// not empty is taken, so that a request is never refused which the replicas
// could serve.
type strictness int

const (
	anyOpen   strictness = iota // even one tried already
	untried                     // by this request
	serving                     // and known to serve the model, if any is
	eligible                    // and not to be avoided
	strictest                   // and, if it warms up, with room for another request
)

func (t strictness) allows(l *fleet.Load, tried, serves bool) bool {
	return !(t >= untried && tried ||
		t >= serving && !serves ||
		t >= eligible && l.Avoid != fleet.Eligible ||
		t >= strictest && l.Room <= 0)
}

// choose finds the replica where the request costs least, and whether that has
// room for it now.
func (s *Scheduler) choose(r *Request, now time.Time) (c Choice, fits bool) {
	for t := strictest; t >= anyOpen; t-- {
		if s.gather(r, t, now); len(s.cands) > 0 {
			break
		}
	}
	c = Choice{Index: -1, Open: len(s.cands), Next: math.Inf(1)}
	best, cost := s.Rule.Choose(s.cands)
	if best < 0 {
		return c, true
	}
	c.Index, c.Cost = s.choices[best], cost
	for i, at := range s.choices {
		c.Longest = max(c.Longest, r.blocksAt(at))
		if i != best {
			c.Next = min(c.Next, s.cands[i].cost)
		}
	}
	p := r.Replicas[c.Index]
	c.Matched, c.Hit, c.Uncached = r.blocksAt(c.Index), s.hits[best], s.cands[best].Uncached
	l := s.lane(p, now)
	return c, l.queue <= l.roomy
}

// gather lists the candidates that are good enough.
func (s *Scheduler) gather(r *Request, t strictness, now time.Time) {
	s.cands, s.choices, s.hits = s.cands[:0], s.choices[:0], s.hits[:0]
	for i, p := range r.Replicas {
		if !r.Caller.Open(i) {
			continue
		}
		l := s.lane(p, now)
		if !t.allows(&l.load, r.Caller.Tried(i), r.Serves == nil || r.Serves[i]) {
			continue
		}
		hit := believedHit(r.heldBy(i), r.Tokens, l.load.BlockTokens)
		s.choices = append(s.choices, i)
		s.hits = append(s.hits, hit)
		s.cands = append(s.cands, Candidate{
			Queue:      l.queue,
			Uncached:   max(r.Tokens-hit*l.load.Trust, min(r.Tokens, l.load.BlockTokens)) + r.Extra,
			Need:       r.Tokens + r.Extra,
			Free:       l.free,
			InFlight:   l.inFlight,
			Pace:       l.load.Pace,
			KVFree:     1 - l.load.KVUsage.Value,
			Spare:      l.load.Spare,
			Rendezvous: Rendezvous(r.Key, p.ID),
		})
	}
}

// believedHit is how many of a prompt's tokens an engine that holds held of
// them will not compute: whole engine blocks only, and never the last token,
// which it needs for its first step.
func believedHit(held, tokens, blockTokens float64) float64 {
	return max(0, math.Floor(min(held, tokens-1)/blockTokens)*blockTokens)
}

// Rendezvous gives each replica a pseudo-random place in the order of a key
// that does not depend on which other replicas there are: the highest is the
// key's home.
func Rendezvous(key, replica uint64) uint64 {
	// The finaliser of MurmurHash3, by Austin Appleby, in the public domain.
	x := key ^ replica
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
