// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Kind is a kind of traffic that others have and the recorded traces do not
// show, made up: to see that a rule which suits one does not fail another. The
// requests come at set times, whether answers came or not.
type Kind struct {
	// Name is how commands call it, and About tells what it is in a few words.
	Name, About string

	lasts   time.Duration // until the last conversation begins
	arrive  func(m *maker, now time.Duration) (perSecond float64)
	prompts int // shared ones
	shared  func(m *maker) (tokens float64)
	even    bool // the shared prompts are equally frequent; otherwise the n-th as 1/n
	turns   func(m *maker) int
	says    func(m *maker) (tokens float64)
	answer  func(m *maker) (tokens float64)
	think   time.Duration // on average, after the answer
	forgets bool          // turns do not build on one another
}

// Kinds are all there are.
var Kinds = []Kind{
	{
		Name: "tools", About: "agents with forty long tool prompts and a few steps each",
		lasts: 15 * time.Minute, arrive: always(4),
		prompts: 40, shared: between(2_000, 10_000),
		turns: about(2.5, 12), says: spread(3_300, 1), answer: spread(180, 0.8), think: 4 * time.Second,
	},
	{
		Name: "documents", About: "long documents, each asked some questions",
		lasts: 20 * time.Minute, arrive: always(0.5),
		prompts: 1, shared: exactly(512),
		turns: about(4.5, 24), says: document, answer: spread(250, 0.7), think: 25 * time.Second, forgets: true,
	},
	{
		Name: "labels", About: "many short texts under four instructions, with answers of a few tokens",
		lasts: 5 * time.Minute, arrive: always(60),
		prompts: 4, shared: between(1_500, 4_000),
		turns: once, says: spread(900, 0.5), answer: between(2, 20),
	},
	{
		Name: "reasoning", About: "short prompts with long answers",
		lasts: 15 * time.Minute, arrive: always(3),
		prompts: 5, shared: exactly(1_536), even: true,
		turns: about(1.6, 6), says: spread(1_100, 0.9), answer: spread(1_400, 1), think: 15 * time.Second,
	},
	{
		Name: "bursts", About: "chats that come six times as fast in every third minute",
		lasts: 15 * time.Minute, arrive: everyThirdMinute(6, 1),
		prompts: 25, shared: between(1_000, 6_000),
		turns: about(2.6, 12), says: spread(2_800, 1.1), answer: spread(300, 0.8), think: 10 * time.Second,
	},
	{
		Name: "distinct", About: "prompts that share nothing, where no cache helps",
		lasts: 10 * time.Minute, arrive: always(14),
		turns: once, says: spread(2_800, 1), answer: spread(60, 1),
	},
}

// longest is the length in tokens at which a made-up conversation ends.
const longest = 120_000

// KindNamed returns the kind of that name.
func KindNamed(name string) (k Kind, found bool) {
	i := slices.IndexFunc(Kinds, func(k Kind) bool { return k.Name == name })
	if i < 0 {
		return k, false
	}
	return Kinds[i], true
}

// Requests returns the traffic in order of arrival; equal seeds make equal
// traffic.
func (k Kind) Requests(seed uint64) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		source := splitMix(mix(seed))
		m := &maker{Kind: k, Rand: rand.New(&source)}
		for _, r := range m.requests() {
			if !yield(r, nil) {
				return
			}
		}
	}
}

// maker makes the requests of one kind up.
type maker struct {
	Kind
	*rand.Rand
	heads [][]uint64 // the shared prompts
	ids   uint64     // given out so far
	turn  int        // of the conversation being made
}

func (m *maker) requests() []Request {
	for range m.prompts {
		m.heads = append(m.heads, m.stretch(nil, m.shared(m)))
	}
	var all []Request
	for now := time.Duration(0); ; {
		now += time.Duration(m.ExpFloat64() / m.arrive(m, now) * float64(time.Second))
		if now > m.lasts {
			break
		}
		all = m.conversation(all, now)
	}
	slices.SortStableFunc(all, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	return all
}

// conversation adds one that begins at that time. An answer is taken to need
// 30 ms a token.
func (m *maker) conversation(all []Request, at time.Duration) []Request {
	const perToken = 30 * time.Millisecond
	prompt := slices.Clone(m.head())
	turns := m.turns(m)
	for m.turn = 0; m.turn < turns; m.turn++ {
		prompt = m.stretch(prompt, max(idTokens, m.says(m)))
		tokens := len(prompt) * idTokens
		if tokens > longest {
			break
		}
		answer := max(1, int(m.answer(m)))
		all = append(all, Request{
			At: at, Path: chatPath,
			InputTokens: tokens - m.IntN(idTokens), OutputTokens: answer,
			HashIDs: slices.Clone(prompt),
		})
		if m.forgets {
			if m.turn > 0 {
				prompt = prompt[:len(prompt)-1]
			}
		} else {
			prompt = m.stretch(prompt, float64(answer-idTokens/2))
		}
		at += time.Duration(answer)*perToken + time.Duration(m.ExpFloat64()*float64(m.think))
	}
	return all
}

// head is one of the shared prompts.
func (m *maker) head() []uint64 {
	if len(m.heads) == 0 {
		return nil
	}
	if m.even {
		return m.heads[m.IntN(len(m.heads))]
	}
	sum := 0.0
	for i := range m.heads {
		sum += 1 / float64(i+1)
	}
	at := m.Float64() * sum
	for i := range m.heads {
		if at -= 1 / float64(i+1); at < 0 {
			return m.heads[i]
		}
	}
	return m.heads[len(m.heads)-1]
}

// stretch adds new text of about that length.
func (m *maker) stretch(prompt []uint64, tokens float64) []uint64 {
	for range int(math.Round(tokens / idTokens)) {
		m.ids++
		prompt = append(prompt, m.ids)
	}
	return prompt
}

func always(perSecond float64) func(*maker, time.Duration) float64 {
	return func(*maker, time.Duration) float64 { return perSecond }
}

func everyThirdMinute(high, low float64) func(*maker, time.Duration) float64 {
	return func(_ *maker, now time.Duration) float64 {
		if int(now/time.Minute)%3 == 0 {
			return high
		}
		return low
	}
}

func once(*maker) int { return 1 }

// about draws a number of turns with that mean, geometrically, up to most.
func about(mean float64, most int) func(*maker) int {
	return func(m *maker) int { return min(most, 1+int(m.ExpFloat64()*(mean-1))) }
}

func exactly(tokens float64) func(*maker) float64 {
	return func(*maker) float64 { return tokens }
}

func between(least, most float64) func(*maker) float64 {
	return func(m *maker) float64 { return least + m.Float64()*(most-least) }
}

// spread draws a length with that mean from a log-normal distribution.
func spread(mean, sigma float64) func(*maker) float64 {
	return func(m *maker) float64 {
		return mean * math.Exp(sigma*m.NormFloat64()-sigma*sigma/2)
	}
}

// document is a long text in the first turn and a question, which replaces the
// one before it, in those that follow.
func document(m *maker) float64 {
	if m.turn > 0 {
		return idTokens
	}
	return min(longest/2, spread(24_000, 0.7)(m))
}
