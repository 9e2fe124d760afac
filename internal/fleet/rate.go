// SPDX-License-Identifier: Apache-2.0

package fleet

import "time"

// DefaultPrefillRate is the prefill speed assumed of a replica, in uncached
// prompt tokens a second, until its own counters have told better.
const DefaultPrefillRate = 10_000

// slowestAssumed is how slow a fleet is taken to be at most, of which nothing is known
// but how long those wait that were sent there.
const slowestAssumed = DefaultPrefillRate / 20

const (
	// rateMemory is the number of computed tokens after which a measurement
	// counts half: some tens of long prompts, so that the mismatch of tokens
	// and seconds within one scrape evens out and a slow-down is followed.
	rateMemory = 300_000
	// rateEnough is the number of computed tokens it takes for a measurement to
	// stand on its own.
	rateEnough = 10_000
	// ratePrior is how many computed tokens [DefaultPrefillRate] counts for, beside
	// what all replicas of a fleet have computed, as long as none has computed
	// enough: so a fleet of slow machines is known for it after its first prompts.
	ratePrior = 2000
	// throughputWindow is the time over which throughput is measured, in
	// seconds, and throughputRequests how many requests it takes: enough for
	// the prompts that straddle its ends to weigh little.
	throughputWindow   = 10
	throughputRequests = 30
	// throughputFades is what each window leaves of the best one before it.
	throughputFades = 0.98
	// rateLean makes the estimate lean high. A queue believed to drain too
	// fast costs little, because finished requests and first-token counters
	// correct it; one believed to drain too slowly keeps work away.
	rateLean = 1.1
)

// rate learns how many uncached prompt tokens a second a replica prefills
// while it has something to prefill.
//
// The engine's own sum of prefill times tells it directly. Where many prompts
// share steps each one's time holds the others'; there the throughput that was
// really reached is a better bound from below. (With few and long prompts it is
// not: the engine counts each as a lump.)
type rate struct {
	tokens, seconds float64 // computed, and the prefill time they took

	window   float64 // tokens computed in the current window
	requests float64 // that got their first token in it
	elapsed  float64 // seconds of it
	best     float64 // tokens a second of the best window, fading

	shown shown
	speed speed
	own   ownRate
}

// shown is what a replica was seen to compute: the tokens of some requests in a
// row, over the time from when the first of them was sent. It can do at least
// that, however few and long they are and whatever else it waited for. That counts
// where many prompts share steps, of which each one's prefill time holds all, and
// stands in where the engine does not tell prefill times.
type shown struct {
	recent   [shownScrapes]stretch
	n        int     // scrapes so far
	most     float64 // tokens a second, fading
	glimpsed float64 // the same of however few tokens
}

// stretch is what was computed between two scrapes: all of it since a time at
// which the first of its requests was sent. Where that is only believed, begun is
// what the engine says it had to compute of those that it began with meanwhile.
type stretch struct {
	since         time.Time
	tokens, begun float64
}

const (
	// shownScrapes is how many scrapes requests in a row may take.
	shownScrapes = 32
	// shownLeast is how many tokens they need: of fewer, the time until the
	// scrape that tells of them is most.
	shownLeast = 8000
	// shownFades is what a scrape with news leaves of what was shown before.
	shownFades = 0.998
)

// observe takes in what was computed until now and had not been at the last scrape.
func (s *shown) observe(last stretch, now time.Time) {
	s.recent[s.n%shownScrapes] = last
	s.n++
	if last.tokens == 0 {
		return
	}
	s.most, s.glimpsed = s.most*shownFades, s.glimpsed*shownFades
	sum, begun := 0.0, 0.0
	for i := s.n - 1; i >= max(0, s.n-shownScrapes); i-- {
		x := s.recent[i%shownScrapes]
		sum, begun = sum+x.tokens, begun+x.begun
		took := now.Sub(x.since).Seconds()
		if took <= 0 {
			continue
		}
		did := min(sum, begun)
		s.glimpsed = max(s.glimpsed, did/took)
		if did >= shownLeast {
			s.most = max(s.most, did/took)
		}
	}
}

// ownRate is what a replica finishes of our own requests in its best windows:
// all there is to go by where no metrics are polled. Short of saturation it is
// below what the replica can do, and a queue then is believed to drain more
// slowly than it does.
type ownRate struct {
	began    time.Time // of the current window
	tokens   float64   // finished in it
	requests int
	peak     float64 // tokens a second of the best window, fading
}

// A window takes at least ownWindow and ownRequests.
const (
	ownWindow   = 10 * time.Second
	ownRequests = 10
)

// finished books a request of so many tokens.
func (o *ownRate) finished(tokens float64, now time.Time) {
	if o.began.IsZero() {
		o.began = now
		return
	}
	o.tokens += tokens
	o.requests++
	if took := now.Sub(o.began); took >= ownWindow && o.requests >= ownRequests {
		o.peak = max(o.peak*throughputFades, o.tokens/took.Seconds())
		o.began, o.tokens, o.requests = now, 0, 0
	}
}

// speed is what a machine prefills at its best, to tell fast machines from
// slow ones. The rate itself can't: it is measured under load, so among equal
// machines the busy one seems slow, is sent less, and never recovers.
type speed struct {
	tokens, seconds float64 // of the current window
	peak            float64 // tokens a second of the best window, fading
}

const (
	// speedWindow is how many computed tokens make a window: enough prompts for
	// the odd one that shared its steps to weigh little.
	speedWindow = 50_000
	// speedFades is what each window leaves of the peak.
	speedFades = 0.995
)

func (s *speed) observe(tokens, seconds float64) {
	if tokens <= 0 || seconds <= 0 {
		return
	}
	s.tokens += tokens
	s.seconds += seconds
	if s.tokens >= speedWindow {
		s.peak = max(s.peak*speedFades, s.tokens/s.seconds)
		s.tokens, s.seconds = 0, 0
	}
}

// work is what an engine counted between two scrapes.
type work struct {
	tokens   float64 // prompt tokens computed
	requests float64 // that got their first token
	// prefill is the prefill time of requests, 0 if the engine does not tell,
	// and prefilled the tokens computed in just that time, if pairs is set. Both
	// are counted when a request ends, and tokens when its prefill does.
	prefill, prefilled float64
	pairs              bool
	seconds            float64 // between the scrapes
}

// observe books what an engine counted.
func (r *rate) observe(w work) {
	if r.tokens > rateMemory {
		r.tokens, r.seconds = r.tokens/2, r.seconds/2
	}
	r.speed.observe(w.prefilled, w.prefill)
	tokens := w.tokens
	if w.pairs {
		tokens = w.prefilled
	}
	if w.prefill > 0 || r.seconds > 0 {
		r.tokens += tokens
		r.seconds += w.prefill
	}
	r.window += w.tokens
	r.requests += w.requests
	if r.elapsed += w.seconds; r.elapsed < throughputWindow {
		return
	}
	r.best *= throughputFades
	if r.requests >= throughputRequests {
		r.best = max(r.best, r.window/r.elapsed)
	}
	r.window, r.requests, r.elapsed = 0, 0, 0
}

// prior is the evidence of a fleet of which nothing is known.
func prior() rate { return rate{tokens: ratePrior, seconds: ratePrior / float64(DefaultPrefillRate)} }

// pool adds what another replica's counters tell to the evidence of the fleet.
func (r *rate) pool(other *rate) {
	if other.seconds > 0 {
		r.tokens += other.tokens
		r.seconds += other.seconds
		r.shown.glimpsed = max(r.shown.glimpsed, other.shown.glimpsed)
	}
}

// pooled is the rate of a fleet of which no replica has told enough. Where its first
// prompts came at once they shared steps, of which the prefill time of each holds
// all: so it is no less than what the fastest was seen to do.
func (r *rate) pooled() float64 { return max(r.tokens/r.seconds, rateLean*r.shown.glimpsed) }

// known tells whether the replica's own counters tell its rate.
func (r *rate) known() bool { return r.seconds > 0 && r.tokens >= rateEnough }

// unseen tells whether nothing at all was seen of the rate.
func (r *rate) unseen() bool { return r.seconds == 0 && r.best == 0 && r.shown.most == 0 }

// perSecond is the learned rate, or what is assumed while nothing was learned,
// and never less than what the replica was seen to do.
func (r *rate) perSecond(assumed float64, polled bool) float64 {
	switch {
	case r.known():
		assumed = rateLean * r.tokens / r.seconds
	case !polled && r.own.peak > 0:
		assumed = r.own.peak
	default:
		assumed = max(assumed, rateLean*r.shown.most)
	}
	return max(1, assumed, r.best, r.shown.most)
}
