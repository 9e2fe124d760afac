// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Workload makes up traffic as chat assistants see it: conversations that share
// a few long system prompts and grow turn by turn, and between them single long
// prompts that share nothing. Equal Workloads make equal traffic, but for the
// answers, which are the server's. Fields that are not positive take their
// defaults; a negative OneOffs is none.
type Workload struct {
	// Seed chooses everything that is random.
	Seed uint64
	// Chats is the number of conversations; default 40.
	Chats int
	// SystemPrompts is how many different system prompts they share; default 4.
	SystemPrompts int
	// SystemTokens is a system prompt's length; default 4000.
	SystemTokens int
	// Turns is the mean number of turns of a conversation; default 6. The number
	// is uniform from 1 to 2 × Turns − 1.
	Turns int
	// UserTokens is the mean length of what a user says; default 200. Lengths
	// are uniform from half to one and a half times the mean.
	UserTokens int
	// AnswerTokens is the mean length of an answer, spread likewise; default 150.
	AnswerTokens int
	// Think is the mean time from an answer to the next turn; default 4 s. Times
	// are exponential, and cut at four times the mean.
	Think time.Duration
	// Ramp is the time over which conversations and single prompts start,
	// uniformly; default 60 s.
	Ramp time.Duration
	// OneOffs is the number of single prompts; default a fourth of Chats.
	OneOffs int
	// OneOffTokens is their mean length, spread likewise; default 12000.
	OneOffTokens int
}

// DefaultWorkload is what a Workload is like where it says nothing.
func DefaultWorkload() Workload {
	return Workload{
		Chats:         40,
		SystemPrompts: 4,
		SystemTokens:  4000,
		Turns:         6,
		UserTokens:    200,
		AnswerTokens:  150,
		Think:         4 * time.Second,
		Ramp:          time.Minute,
		OneOffTokens:  12000,
	}
}

// Or returns the workload with what it does not say taken from another. Its seed
// stays.
func (w Workload) Or(other Workload) Workload {
	w.Chats = positiveOr(w.Chats, other.Chats)
	w.SystemPrompts = positiveOr(w.SystemPrompts, other.SystemPrompts)
	w.SystemTokens = positiveOr(w.SystemTokens, other.SystemTokens)
	w.Turns = positiveOr(w.Turns, other.Turns)
	w.UserTokens = positiveOr(w.UserTokens, other.UserTokens)
	w.AnswerTokens = positiveOr(w.AnswerTokens, other.AnswerTokens)
	w.Think = positiveOr(w.Think, other.Think)
	w.Ramp = positiveOr(w.Ramp, other.Ramp)
	w.OneOffs = cmp.Or(w.OneOffs, other.OneOffs)
	w.OneOffTokens = positiveOr(w.OneOffTokens, other.OneOffTokens)
	return w
}

func (w Workload) withDefaults() Workload {
	w = w.Or(DefaultWorkload())
	w.OneOffs = max(0, cmp.Or(w.OneOffs, w.Chats/4))
	return w
}

func positiveOr[T int | time.Duration](value, otherwise T) T {
	if value > 0 {
		return value
	}
	return otherwise
}

// Sessions returns the conversations and single prompts in order of their start.
// Their prompts repeat the answers as they were received; where Next is given
// none, one of the length that was asked for stands in.
func (w Workload) Sessions() iter.Seq[*Session] {
	w = w.withDefaults()
	return func(yield func(*Session) bool) {
		for _, s := range w.starts() {
			if !yield(w.session(s)) {
				return
			}
		}
	}
}

// Requests returns the requests of all sessions in order of arrival, as if
// answers took no time and had the length that was asked for.
func (w Workload) Requests() iter.Seq2[Request, error] {
	return Merge(w.Sessions())
}

// start is when the session with that number begins; those from Chats on are
// single prompts.
type start struct {
	at     time.Duration
	number int
}

func (w Workload) starts() []start {
	rng := w.rng(0)
	all := make([]start, w.Chats+w.OneOffs)
	for i := range all {
		all[i] = start{at: time.Duration(rng.Int64N(int64(w.Ramp) + 1)), number: i}
	}
	slices.SortFunc(all, func(a, b start) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.number, b.number))
	})
	return all
}

// rng returns the random numbers of one stream of the workload.
func (w Workload) rng(stream uint64) *rand.Rand {
	source := splitMix(mix(w.Seed) + mix(stream))
	return rand.New(&source)
}

// around draws a length whose mean is as given.
func around(rng *rand.Rand, mean int) int {
	return max(1, mean/2+rng.IntN(mean+1))
}

func (w Workload) session(s start) *Session {
	c := &conversation{Workload: w, rng: w.rng(1 + uint64(s.number)), at: s.at}
	if s.number < w.Chats {
		c.id = fmt.Sprintf("chat-%d", s.number)
		c.turns = 1 + c.rng.IntN(2*w.Turns-1)
		c.system = 1 + c.rng.IntN(w.SystemPrompts)
	} else {
		c.id = fmt.Sprintf("one-off-%d", s.number-w.Chats)
		c.turns = 1
	}
	return &Session{ID: c.id, Start: s.at, Len: c.turns, WantsAnswers: c.turns > 1, next: c.next}
}

// conversation is a session under way.
type conversation struct {
	Workload
	id     string
	rng    *rand.Rand
	turns  int
	system int // number of the system prompt; 0 is none, for single prompts

	at           time.Duration
	turn         int
	messages     []byte // the array so far, without the closing bracket
	answerTokens int    // asked for in the last request
}

func (c *conversation) next(answer []byte) (Request, error) {
	if c.turn == c.turns {
		c.messages = nil
		return Request{}, io.EOF
	}
	var think time.Duration
	switch {
	case c.turn > 0:
		think = time.Duration(min(c.rng.ExpFloat64(), 4) * float64(c.Think))
		c.at += think
		c.hear(answer)
	case c.system > 0:
		c.say("system", c.systemPrompt())
	}
	c.turn++
	c.say("user", c.words(c.userTokens()))
	c.answerTokens = around(c.rng, c.AnswerTokens)
	messages := append(slices.Clone(c.messages), ']')
	return Request{
		At: c.at, Think: think, Session: c.id, Path: chatPath,
		InputTokens: tokensOf(len(messages)), OutputTokens: c.answerTokens,
		Messages: messages,
	}, nil
}

func (c *conversation) userTokens() int {
	if c.system == 0 {
		return around(c.rng, c.OneOffTokens)
	}
	return around(c.rng, c.UserTokens)
}

// hear adds the answer to the conversation. Random numbers are drawn whether it
// came or not, so that later turns do not depend on it.
func (c *conversation) hear(answer []byte) {
	made := c.words(c.answerTokens)
	if len(answer) == 0 {
		answer = made
	}
	c.say("assistant", answer)
}

func (c *conversation) say(role string, content []byte) {
	if len(c.messages) == 0 {
		c.messages = append(c.messages, '[')
	} else {
		c.messages = append(c.messages, ',')
	}
	c.messages = append(c.messages, `{"role":"`+role+`","content":"`...)
	c.messages = append(c.messages, content...)
	c.messages = append(c.messages, `"}`...)
}

func (c *conversation) words(tokens int) []byte {
	source := splitMix(c.rng.Uint64())
	return appendText(nil, &source, tokens)
}

// systemPrompt is the same for all conversations that have its number.
func (c *conversation) systemPrompt() []byte {
	source := splitMix(mix(c.Seed) ^ mix(uint64(c.system)))
	return appendText(nil, &source, c.SystemTokens)
}

// Merge returns the requests of all sessions in order of arrival, given the
// sessions in order of their start. It holds one request of each session that
// has begun and not ended.
func Merge(sessions iter.Seq[*Session]) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		var waiting arrivals
		emit := func(until time.Duration) bool {
			for len(waiting) > 0 && waiting[0].request.At <= until {
				if !yield(waiting[0].request, nil) || !waiting.advance(yield) {
					return false
				}
			}
			return true
		}
		number := 0
		for s := range sessions {
			if !emit(s.Start) || !waiting.begin(s, number, yield) {
				return
			}
			number++
		}
		emit(math.MaxInt64)
	}
}

// arrivals is a heap of sessions by the arrival of their next request; equal
// arrivals keep the order in which their sessions began.
type arrivals []arrival

type arrival struct {
	request Request
	session *Session
	number  int
}

func (a arrivals) Len() int      { return len(a) }
func (a arrivals) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a arrivals) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(a[i].request.At, a[j].request.At), cmp.Compare(a[i].number, a[j].number)) < 0
}
func (a *arrivals) Push(x any) { *a = append(*a, x.(arrival)) }
func (a *arrivals) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

// begin adds a session; it is false when the sequence has to end.
func (a *arrivals) begin(s *Session, number int, yield func(Request, error) bool) bool {
	r, err := s.Next(nil)
	switch {
	case errors.Is(err, io.EOF):
		return true
	case err != nil:
		yield(Request{}, err)
		return false
	}
	heap.Push(a, arrival{request: r, session: s, number: number})
	return true
}

// advance replaces the first session's request by its next one.
func (a *arrivals) advance(yield func(Request, error) bool) bool {
	r, err := (*a)[0].session.Next(nil)
	switch {
	case errors.Is(err, io.EOF):
		heap.Pop(a)
		return true
	case err != nil:
		yield(Request{}, err)
		return false
	}
	(*a)[0].request = r
	heap.Fix(a, 0)
	return true
}
