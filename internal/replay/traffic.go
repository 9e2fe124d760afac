// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"container/heap"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// TextBlockTokens is how many tokens a block of a router's own chain stands
// for: prompt.BlockSize bytes of text.
const TextBlockTokens = 64

// sharedBy is the share of all requests from which on a block counts as
// shared between conversations, where the trace has no sessions to tell.
const sharedBy = 0.05

// Traffic is a trace in memory, as chains of block hashes: 0.6 bytes a token of
// prompt. It can be played any number of times, also at once.
type Traffic struct {
	sizes    []int // engine block sizes; a record's chains are of these, after the text chain
	sessions [][]*record
	count    int
	closed   bool
}

// record is one recorded request.
type record struct {
	at, think                  time.Duration
	session                    string
	promptTokens, outputTokens int
	chains                     [][]uint64 // text blocks, then engine blocks of each size
	shared                     []int      // how many leading blocks of each chain other conversations share
	text                       bool       // blocks are cut out of text
	turn                       int        // text blocks of the first user turn, 0 if unknown
	turnKey                    uint64
}

// Load reads requests, or the sessions of a closed loop if sessions is not nil,
// for engines with blocks of the given sizes in tokens. In a closed loop a
// request comes after the answer to the one before it and the time to think.
func Load(requests iter.Seq2[trace.Request, error], sessions iter.Seq[*trace.Session], blockTokens ...int) (*Traffic, error) {
	slices.Sort(blockTokens)
	t := &Traffic{sizes: slices.Compact(blockTokens), closed: sessions != nil}
	if sessions == nil {
		for r, err := range requests {
			if err != nil {
				return nil, err
			}
			t.sessions = append(t.sessions, []*record{t.record(&r)})
			t.count++
		}
	} else if err := t.loadSessions(sessions); err != nil {
		return nil, err
	}
	if t.count == 0 {
		return nil, errors.New("no request to replay")
	}
	t.findShared()
	t.findTurns()
	return t, nil
}

func (t *Traffic) loadSessions(sessions iter.Seq[*trace.Session]) error {
	for s := range sessions {
		var records []*record
		for {
			r, err := s.Next(nil)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			records = append(records, t.record(&r))
			records[len(records)-1].session = s.ID
			records[0].at = s.Start
		}
		if len(records) > 0 {
			t.sessions = append(t.sessions, records)
			t.count += len(records)
		}
	}
	return nil
}

// Count is the number of requests, without copies.
func (t *Traffic) Count() int { return t.count }

// Closed tells whether there are sessions whose requests wait for answers.
func (t *Traffic) Closed() bool { return t.closed }

// PromptTokens is the sum of all prompts' lengths.
func (t *Traffic) PromptTokens() int {
	sum := 0
	for _, s := range t.sessions {
		for _, r := range s {
			sum += r.promptTokens
		}
	}
	return sum
}

func (t *Traffic) record(r *trace.Request) *record {
	rec := &record{
		at: r.At, think: r.Think, session: r.Session,
		text:         r.HashIDs == nil,
		promptTokens: max(1, r.InputTokens), outputTokens: r.OutputTokens,
		chains: [][]uint64{r.AppendBlocks(nil, TextBlockTokens)},
	}
	for _, size := range t.sizes {
		rec.chains = append(rec.chains, r.AppendBlocks(nil, size))
	}
	rec.shared = make([]int, len(rec.chains))
	return rec
}

// findShared finds which leading blocks several conversations have in common:
// those of more than one session, or, where there are no sessions, those of
// more than sharedBy of all requests.
func (t *Traffic) findShared() {
	least := 2
	if !t.closed {
		least = max(least, int(sharedBy*float64(t.count)))
	}
	type user struct{ sessions, last int }
	users := make(map[uint64]user)
	for n, s := range t.sessions {
		for _, r := range s {
			for _, b := range r.chains[0] {
				if u, ok := users[b]; !ok || u.last != n {
					users[b] = user{u.sessions + 1, n}
				}
			}
		}
	}
	for _, s := range t.sessions {
		for _, r := range s {
			for r.shared[0] < len(r.chains[0]) && users[r.chains[0][r.shared[0]]].sessions >= least {
				r.shared[0]++
			}
			for i, size := range t.sizes {
				r.shared[1+i] = min(r.shared[0]*TextBlockTokens/size, len(r.chains[1+i]))
			}
		}
	}
}

// findTurns takes a session's first prompt for what its first user turn ends.
func (t *Traffic) findTurns() {
	for _, s := range t.sessions {
		first := s[0].chains[0]
		for _, r := range s {
			r.turnKey = hashOf(uint64(s[0].promptTokens), first)
			if t.closed {
				r.turn = common(first, r.chains[0])
			}
			if r.turn == 0 {
				r.turnKey = hashOf(uint64(r.promptTokens), r.chains[0])
			}
		}
	}
}

func common(a, b []uint64) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// hashOf stands for a whole prompt.
func hashOf(x uint64, chain []uint64) uint64 {
	if len(chain) > 0 {
		x ^= chain[len(chain)-1]
	}
	return mix(x)
}

// mix spreads a number over 64 bits (the finaliser of SplitMix64, by Sebastiano
// Vigna, in the public domain).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// call is a record that is played, as part of one copy of its session.
type call struct {
	*record
	play  *play
	step  int
	at    time.Duration
	order int // among those at the same time
}

// play is one copy of a session.
type play struct {
	records []*record
	copy    int
	salt    uint64
	order   int
	rate    float64
}

// source lays the traffic out in time.
func (t *Traffic) source(setup Setup) source {
	rng := rand.New(rand.NewPCG(setup.Seed, 0x7472616666696373))
	s := make(schedule, 0, len(t.sessions)*setup.Copies)
	for _, records := range t.sessions {
		for k := range setup.Copies {
			p := &play{records: records, copy: k, order: len(s), rate: setup.Rate}
			if k > 0 {
				p.salt = mix(uint64(k))
			}
			at := records[0].at
			if setup.Ramp > 0 {
				at = time.Duration(rng.Int64N(int64(setup.Ramp)))
			}
			if setup.Jitter > 0 {
				at += time.Duration(rng.Int64N(int64(setup.Jitter)))
			}
			s = append(s, &call{record: records[0], play: p, at: time.Duration(float64(at) / setup.Rate), order: p.order})
		}
	}
	heap.Init(&s)
	return &s
}

// after is the session's next request, due after its time to think.
func (c *call) after(now time.Duration) *call {
	step := c.step + 1
	if step == len(c.play.records) {
		return nil
	}
	r := c.play.records[step]
	return &call{record: r, play: c.play, step: step, at: now + time.Duration(float64(r.think)/c.play.rate), order: c.play.order}
}

func (c *call) session() string {
	if c.record.session == "" || c.play.copy == 0 {
		return c.record.session
	}
	return fmt.Sprintf("%s/%d", c.record.session, c.play.copy)
}

// chain returns one of the record's chains. A copy's differs from where its
// session has its own text on.
func (c *call) chain(n int) []uint64 {
	chain := c.chains[n]
	if c.play.salt == 0 {
		return chain
	}
	salted := slices.Clone(chain)
	for i := c.shared[n]; i < len(salted); i++ {
		salted[i] = mix(salted[i] ^ c.play.salt)
	}
	return salted
}

func (c *call) turnKey() uint64 {
	if c.play.salt == 0 {
		return c.record.turnKey
	}
	return mix(c.record.turnKey ^ c.play.salt)
}
