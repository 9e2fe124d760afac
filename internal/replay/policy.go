// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// Request is one request on its way, as a router sees it.
type Request struct {
	// Number counts requests from 0.
	Number int
	// Session names the conversation, "" if the trace does not.
	Session string
	// Text is the chain of its blocks of TextBlockTokens tokens. The first Shared
	// of them are a system prompt that other conversations have as well; Turn of
	// them end within the first user turn, 0 if unknown, and TurnKey stands for
	// everything up to its end.
	Text         []uint64
	Shared, Turn int
	TurnKey      uint64
	// PromptTokens and OutputTokens are its lengths. A router knows the first.
	PromptTokens, OutputTokens int
	// Arrived is when it came; Sent when, Replica where to and Reason why it was
	// sent last. Retries counts the times before that.
	Arrived, Sent time.Duration
	Replica       int
	Reason        string
	Retries       int

	call   *call
	engine *enginesim.Request // where it is now, nil if held by the router
}

// beyond is how far a match reaches beyond its last full block on average. Text
// is cut without regard to where prompts differ; the ids of a Mooncake trace
// stand for whole blocks.
func (r *Request) beyond() float64 {
	if r.call.text {
		return TextBlockTokens / 2
	}
	return 0
}

// Policy decides where requests go. All times are virtual.
type Policy interface {
	// Start is called once, with the fleet that there is.
	Start(f *Fleet)
	// Arrive decides where a request goes, by calling f.Send now or later.
	Arrive(now time.Duration, r *Request)
	// FirstToken and Finished tell how far a request came.
	FirstToken(now time.Duration, r *Request)
	Finished(now time.Duration, r *Request)
	// Lost tells that the request's replica went down; it may arrive again.
	Lost(now time.Duration, r *Request)
	// Changed tells that a replica came, left or restarted.
	Changed(now time.Duration, replica int)
	// Scraped tells what a replica published last.
	Scraped(now time.Duration, replica int, s enginesim.Stats)
	// Next is when the policy wants to act by itself, false if not.
	Next(now time.Duration) (time.Duration, bool)
	// Act is called then.
	Act(now time.Duration)
}

// quiet is the part of a policy that does not care.
type quiet struct{}

func (quiet) FirstToken(time.Duration, *Request)          {}
func (quiet) Finished(time.Duration, *Request)            {}
func (quiet) Lost(time.Duration, *Request)                {}
func (quiet) Changed(time.Duration, int)                  {}
func (quiet) Scraped(time.Duration, int, enginesim.Stats) {}
func (quiet) Next(time.Duration) (time.Duration, bool)    { return 0, false }
func (quiet) Act(time.Duration)                           {}

// Contender is a policy by its name. New makes a fresh one for each run.
type Contender struct {
	Name string
	// About says in one line what it does.
	About string
	// Ours are this module's, and Oracle sees what no router can.
	Ours, Oracle bool
	New          func() Policy
}

// Contenders are all policies that can be compared, in the order of tables.
var Contenders = []Contender{
	{Name: "kv_cache_aware", About: "this module: cache, queues and the plan", Ours: true, New: func() Policy { return NewAware() }},
	{Name: "prefix_hash", About: "this module: rendezvous hashing of the prompt's beginning, bounded load", Ours: true, New: func() Policy { return NewPrefixHash() }},
	{Name: "round_robin", About: "Caddy", New: roundRobin},
	{Name: "least_conn", About: "Caddy: fewest requests in flight", New: leastConn},
	{Name: "random_choose", About: "Caddy: the less busy of two at random", New: randomChoose},
	{Name: "affinity", About: "Caddy's ip_hash or header: each conversation to one replica", New: affinity},
	{Name: "match_or_balance", About: "sglang's rule: longest match, and fewest requests while the fleet is out of balance", New: matchOrBalance},
	{Name: "bounded_hash", About: "KubeAI's rule: consistent hashing of the first 100 characters, bounded by requests", New: boundedHash},
	{Name: "weighted_scores", About: "llm-d's rule: weighted scores of prefix, queue and KV use", New: weightedScores},
	{Name: "overlap_and_load", About: "Dynamo's rule: blocks to prefill and blocks in use", New: overlapAndLoad},
	{Name: "oracle", About: "sees caches and queues as they are; binds on arrival", Oracle: true, New: oracle},
}

// ParseContender reads a policy's name, for ours with settings behind it, such
// as "kv_cache_aware:match_weight=2,room=100ms".
func ParseContender(text string) (Contender, error) {
	name, settings, set := strings.Cut(text, ":")
	i := slices.IndexFunc(Contenders, func(c Contender) bool { return c.Name == name })
	if i < 0 {
		var names []string
		for _, c := range Contenders {
			names = append(names, c.Name)
		}
		return Contender{}, fmt.Errorf("policy %q is unknown; want one of %s", name, strings.Join(names, ", "))
	}
	c := Contenders[i]
	if !set {
		return c, nil
	}
	tunable, ok := c.New().(interface{ settings() map[string]setting })
	if !ok {
		return Contender{}, fmt.Errorf("policy %q: %s has no settings", text, name)
	}
	known := tunable.settings()
	type assignment struct{ key, value string }
	var assigned []assignment
	for pair := range strings.SplitSeq(settings, ",") {
		key, value, _ := strings.Cut(pair, "=")
		write, ok := known[key]
		if !ok {
			return Contender{}, fmt.Errorf("policy %q: %s has no setting %q; want one of %s", text, name, key, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
		if err := write(value); err != nil {
			return Contender{}, fmt.Errorf("policy %q: %s: %w", text, key, err)
		}
		assigned = append(assigned, assignment{key, value})
	}
	fresh := c.New
	c.Name = text
	c.New = func() Policy {
		p := fresh()
		known := p.(interface{ settings() map[string]setting }).settings()
		for _, a := range assigned {
			_ = known[a.key](a.value) // it was tried above
		}
		return p
	}
	return c, nil
}

// setting writes the value of one of a policy's settings.
type setting func(value string) error

func number(to *float64) setting {
	return func(value string) error {
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return fmt.Errorf("%q is no number", value)
		}
		*to = v
		return nil
	}
}

func duration(to *time.Duration) setting {
	return func(value string) error {
		v, err := time.ParseDuration(value)
		if err != nil {
			return fmt.Errorf("%q is no duration, such as 100ms", value)
		}
		*to = v
		return nil
	}
}
