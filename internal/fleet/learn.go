// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"time"
)

// DefaultBytesPerToken is how many bytes of prompt text one token is assumed
// to take until the engines' own counts tell: about right for English.
const DefaultBytesPerToken = 4

// textRatio learns how many bytes of prompt text make one token, from the text
// of requests whose first token came between two scrapes and the engine's own
// count of prompt tokens over the same time.
type textRatio struct {
	bytes, tokens float64
	open          texts // what came since the last measurement
}

// texts are requests that got their first token, and what the engine counted
// meanwhile.
type texts struct {
	requests, bytes float64 // ours, and their text
	given           float64 // tokens of those that came as token ids
	firsts, tokens  float64 // first tokens and prompt tokens by the engine's count
	counted         bool    // whether it counts first tokens; of embeddings none does
}

// add counts one of our requests. One without a known prompt is like another
// sender's.
func (x *texts) add(r *Reservation) {
	if r.Prompt == 0 {
		return
	}
	x.requests++
	x.bytes += r.Bytes
	if r.Bytes == 0 {
		x.given += r.Prompt
	}
}

const (
	// textMemory is the number of tokens after which an older measurement counts
	// half.
	textMemory = 500_000
	// textSlack is how far, as a share, the engine's count of requests may be
	// from ours for its tokens to be those of our texts. A few requests must
	// agree exactly.
	textSlack = 0.05
	// textPatience is how many requests may differ before all of them are left
	// out: somebody else's are among them.
	textPatience = 16
)

// observe takes in what came between two scrapes. A scrape can fall between a
// request and its tokens, so that the next ones bring the other half; only
// requests that both sides count are a measurement.
func (t *textRatio) observe(x texts) {
	o := &t.open
	o.requests += x.requests
	o.bytes += x.bytes
	o.given += x.given
	o.firsts += x.firsts
	o.tokens += x.tokens
	missing := math.Abs(o.firsts - o.requests)
	quiet := x.requests == 0 && x.firsts == 0
	switch {
	case x.counted && o.firsts > 0 && missing > textSlack*o.requests:
		// In a quiet moment the other half would have come.
		if quiet || missing > textPatience {
			t.skip()
		}
		return
	case o.bytes == 0 || o.tokens <= o.given:
		return
	}
	bytes, tokens := o.bytes, o.tokens-o.given
	t.skip()
	t.measure(bytes, tokens)
}

// measure takes in prompts whose text and tokens are both known. What is beyond
// any tokenizer is another sender's.
func (t *textRatio) measure(bytes, tokens float64) {
	if r := bytes / tokens; !(r >= 0.5 && r <= 16) {
		return
	}
	if t.tokens > textMemory {
		t.bytes, t.tokens = t.bytes/2, t.tokens/2
	}
	t.bytes += bytes
	t.tokens += tokens
}

// skip leaves out what came since the last measurement.
func (t *textRatio) skip() { t.open = texts{} }

// calibration compares the hits that we believed in with those that the engine
// counted.
type calibration struct {
	believed, counted float64

	// the same since the believed capacity was last looked at, and by how much
	// that is below what the engine tells
	since  struct{ believed, counted float64 }
	shrunk float64

	// the same without forgetting, since the engine's start
	allBelieved, allCounted float64
}

const (
	// calibrationMemory is the number of believed hit tokens after which an
	// older comparison counts half: a few scrapes of a busy replica.
	calibrationMemory = 50_000
	// calibrationFloor is how many believed tokens it takes before the
	// comparison says anything.
	calibrationFloor = 20_000
	// Of a replica that confirms less than shrinkBelow of what is believed, the
	// believed capacity shrinks, to the shrinkMost-th part at most: others use
	// it too, or its engine evicts in another order. It grows back, by growStep
	// each time, while it confirms more than growAbove. That is judged each time
	// that hits worth shrinkWindow of the capacity were believed in: a few long
	// prompts that missed are no reason to forget what is there.
	shrinkBelow  = 0.5
	growAbove    = 0.75
	growStep     = 0.1
	shrinkMost   = 8
	shrinkWindow = 0.25
)

// observe books hits that were believed and counted, at a replica whose KV
// cache has so many tokens.
func (c *calibration) observe(believed, counted, capacity float64) {
	if c.believed > calibrationMemory {
		c.believed, c.counted = c.believed/2, c.counted/2
	}
	c.believed += believed
	// Hits that were not believed in are no credit for later.
	c.counted = min(c.counted+counted, c.believed+calibrationFloor)
	c.since.believed += believed
	c.since.counted += counted
	if c.since.believed >= max(calibrationFloor, shrinkWindow*capacity) {
		c.adjust(c.since.counted / c.since.believed)
		c.since.believed, c.since.counted = 0, 0
	}
	c.allBelieved += believed
	c.allCounted += counted
}

// adjust corrects the believed capacity by the share of hits confirmed.
func (c *calibration) adjust(confirmed float64) {
	switch {
	case confirmed < shrinkBelow:
		left := max((1-c.shrunk)*max(confirmed, 0.75), 1.0/shrinkMost)
		c.shrunk = 1 - left
	case confirmed > growAbove:
		c.shrunk = max(0, c.shrunk-growStep)
	}
}

// capacity is the share of the engine's capacity that is believed to keep what
// we send.
func (c *calibration) capacity() float64 { return 1 - c.shrunk }

// trust is the share of a believed hit that is worth counting on, 0..1.
func (c *calibration) trust() float64 {
	if c.believed < calibrationFloor {
		return 1
	}
	return min(1, c.counted/c.believed)
}

// foreign notices requests of other senders: first tokens that we did not ask for.
type foreign struct {
	count float64
	last  time.Time
}

const (
	// foreignFor is how long other senders are reckoned with after the last
	// sign of them.
	foreignFor = 30 * time.Second
	// foreignSlack is how many stray first tokens (a health probe, a request
	// that outlived a Caddy restart) are not yet another sender.
	foreignSlack = 3
)

func (f *foreign) add(n float64, now time.Time) {
	if now.Sub(f.last) > foreignFor {
		f.count = 0
	}
	f.count += n
	f.last = now
}

func (f *foreign) now(now time.Time) bool {
	return f.count > foreignSlack && now.Sub(f.last) <= foreignFor
}

// warmUp lets a replica that was not there a moment ago (new, restarted, back
// from unhealthy) take on work gradually: two requests at first, and two more
// for each that is known to have its first token, until that are warmAfter.
type warmUp struct {
	cold    bool
	answers int
	since   time.Time
}

const (
	warmAfter = 16
	warmStep  = 2
	// warmWithin ends a warm-up that got no traffic to prove itself by.
	warmWithin = time.Minute
	// recentStart is the age below which an engine's process is new.
	recentStart = time.Minute
)

func (w *warmUp) start(now time.Time) { *w = warmUp{cold: true, since: now} }

// answered notes that so many more requests have their first token.
func (w *warmUp) answered(n uint64) {
	if w.answers += int(min(n, warmAfter)); w.answers >= warmAfter {
		w.cold = false
	}
}

// up tells whether the replica, with so many requests in flight, warms up.
func (w *warmUp) up(inFlight int, now time.Time) bool {
	return w.cold && (now.Sub(w.since) <= warmWithin || inFlight > 0)
}

// room is how many more requests may be sent while it does.
func (w *warmUp) room(inFlight int) int { return warmStep + warmStep*w.answers - inFlight }
