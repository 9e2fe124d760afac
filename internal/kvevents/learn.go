// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// LearnerConfig bounds a [Learner]. A zero field means its default.
type LearnerConfig struct {
	// Client makes the calls; it decides about TLS, proxies and connections (default [http.DefaultClient]). No redirect is followed,
	// whatever it says: prompt and key must not go where an engine points.
	Client *http.Client
	// PerSecond is the largest number of prompts asked about in a second (default 5). A call takes an engine some milliseconds of its
	// front end's time and none of the accelerator's.
	PerSecond float64
	// Timeout bounds the calls for one prompt together (default 5 s).
	Timeout time.Duration
	// Queue and QueueBytes bound the prompts waiting, by number (default 64) and by the size of their bodies (default 16 MiB).
	Queue, QueueBytes int
	// MaxAge is how long a prompt may wait before it is dropped unasked (default 10 s), so that no body is kept for long.
	MaxAge time.Duration
	// AnswerBytes is the largest answer read (default 32 MiB).
	AnswerBytes int64
	// Confirm, if not nil, says whether the engine that has answered a prompt holds what these tokens make of it. If not, they are
	// not what it computed with, and are not learned.
	Confirm func(r Request, tokens []uint32) bool
	// Notify, if not nil, is told why when an engine ceases to tell tokens, and nil when it tells them again.
	Notify func(base string, err error)
}

func (c LearnerConfig) withDefaults() LearnerConfig {
	if c.Client == nil {
		c.Client = http.DefaultClient
	}
	client := *c.Client
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.Client = &client
	if !(c.PerSecond > 0) {
		c.PerSecond = 5
	}
	c.Timeout = positiveOr(c.Timeout, 5*time.Second)
	c.Queue = positiveOr(c.Queue, 64)
	c.QueueBytes = positiveOr(c.QueueBytes, 16<<20)
	c.MaxAge = positiveOr(c.MaxAge, 10*time.Second)
	if c.AnswerBytes <= 0 {
		c.AnswerBytes = 32 << 20
	}
	return c
}

// Request is a prompt to be learned: what was sent to an engine, and its text chain.
type Request struct {
	// Base is the engine's URL without the API's path, such as http://10.0.0.7:8000.
	Base string
	// Path is the request's path at the engine, such as /v1/chat/completions.
	Path string
	// Header is sent along; leave out all but what the engine wants, such as Authorization.
	Header http.Header
	// Body is the request's JSON body. It is kept until the engine was asked, MaxAge at the longest.
	Body []byte
	// Prompt has everything but the tokens.
	Prompt Prompt
}

// LearnerStats are a learner's counters.
type LearnerStats struct {
	// Offered counts prompts offered; Known those not asked about because they or nearly all of them are known, or are waiting
	// already; Full those dropped because too many wait; Stale those dropped because they waited too long.
	Offered, Known, Full, Stale uint64
	// Rendered counts prompts learned by /render, Tokenized those learned by /tokenize.
	Rendered, Tokenized uint64
	// RenderRefused counts answers that /render is not offered (403, 404, 405, 501).
	RenderRefused uint64
	// Unsupported counts prompts that cannot be learned: the engine offers neither way for this API, or the prompt has images.
	Unsupported uint64
	// Mismatched counts prompts whose tokens, as told, are not those that the engine computed with by its events.
	Mismatched uint64
	// Failed counts calls that failed: no connection, time-out, another status, an answer that cannot be read.
	Failed uint64
	// Waiting is the number of prompts in the queue.
	Waiting int
}

// Learner feeds an [Alignment] off the request path: it asks an engine how it tokenizes a prompt after the request has been routed.
// It never delays a request.
//
// It asks {path}/render with the same body, which gives the very tokens but answers 403 unless vLLM runs with --enable-scale-out, then
// /tokenize, which knows chat and text completions and leaves out documents and reasoning_effort. What an engine has refused is not
// asked of it again for ten minutes.
type Learner struct {
	config    LearnerConfig
	alignment *Alignment
	wake      chan struct{}

	mu      sync.Mutex
	queue   []waiting
	bytes   int
	pending map[uint64]struct{} // last text block of each prompt in the queue or being asked about
	refused map[string]time.Time
	silent  map[string]struct{} // engines that failed to tell tokens the last time
	stats   LearnerStats
}

type waiting struct {
	Request
	since time.Time
}

// refusedFor is how long a refusal is believed, and maxRefused how many are remembered.
const (
	refusedFor = 10 * time.Minute
	maxRefused = 4096
)

// NewLearner returns a learner that does nothing before [Learner.Run].
func NewLearner(alignment *Alignment, config LearnerConfig) *Learner {
	return &Learner{
		config: config.withDefaults(), alignment: alignment, wake: make(chan struct{}, 1),
		pending: map[uint64]struct{}{}, refused: map[string]time.Time{}, silent: map[string]struct{}{},
	}
}

// Offer queues a prompt and says whether it did. It never blocks. A prompt is left out when at least three quarters of its text blocks
// are known already, when the same text is waiting, or when the queue is full.
func (l *Learner) Offer(r Request) bool {
	chain := r.Prompt.Chain
	known := len(chain) == 0 || l.alignment.Known(chain)*4 >= len(chain)*3
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Offered++
	if !known {
		_, known = l.pending[chain[len(chain)-1]]
	}
	if known {
		l.stats.Known++
		return false
	}
	if len(l.queue) >= l.config.Queue || l.bytes+len(r.Body) > l.config.QueueBytes {
		l.stats.Full++
		return false
	}
	l.queue = append(l.queue, waiting{r, time.Now()})
	l.bytes += len(r.Body)
	l.pending[chain[len(chain)-1]] = struct{}{}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return true
}

// Stats returns the counters.
func (l *Learner) Stats() LearnerStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.stats
	st.Waiting = len(l.queue)
	return st
}

func (l *Learner) count(change func(*LearnerStats)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.stats)
}

// Run asks engines, one at a time, until ctx ends, whose error it returns.
func (l *Learner) Run(ctx context.Context) error {
	pause := time.Duration(float64(time.Second) / l.config.PerSecond)
	for {
		w, ok := l.take()
		if !ok {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-l.wake:
				continue
			}
		}
		l.learn(ctx, w.Request)
		l.mu.Lock()
		delete(l.pending, w.Prompt.Chain[len(w.Prompt.Chain)-1])
		l.mu.Unlock()
		if !sleep(ctx, pause) {
			return ctx.Err()
		}
	}
}

// take returns the newest prompt that waits, for its prefix is the likeliest to be asked for next, and drops those that waited too long.
func (l *Learner) take() (waiting, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fresh := 0
	for fresh < len(l.queue) && time.Since(l.queue[fresh].since) > l.config.MaxAge {
		l.drop(fresh)
		l.stats.Stale++
		fresh++
	}
	l.queue = append(l.queue[:0], l.queue[fresh:]...)
	clear(l.queue[len(l.queue):cap(l.queue)]) // keep no body alive
	last := len(l.queue) - 1
	if last < 0 {
		return waiting{}, false
	}
	w := l.queue[last]
	l.bytes -= len(w.Body)
	l.queue[last] = waiting{}
	l.queue = l.queue[:last]
	return w, true
}

func (l *Learner) drop(i int) {
	w := &l.queue[i]
	l.bytes -= len(w.Body)
	delete(l.pending, w.Prompt.Chain[len(w.Prompt.Chain)-1])
}

var (
	errRefused     = errors.New("not offered by the engine")
	errUnsupported = errors.New("prompt cannot be learned")
	errMismatched  = errors.New("tokens are not those of the engine's events")
)

func (l *Learner) learn(ctx context.Context, r Request) {
	ctx, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	tokens, err := l.ask(ctx, r, r.Path+"/render")
	rendered := err == nil
	if errors.Is(err, errRefused) {
		tokens, err = nil, errUnsupported
		if path, ok := tokenizePath(r.Path); ok {
			tokens, err = l.ask(ctx, r, path)
		}
	}
	if err == nil && l.config.Confirm != nil && !l.config.Confirm(r, tokens) {
		err = errMismatched
	}
	if err == nil {
		r.Prompt.Tokens = tokens
		l.alignment.Learn(r.Prompt)
	}
	if ctx.Err() == nil || !errors.Is(err, context.Canceled) {
		l.notify(r.Base, err)
	}
	l.count(func(st *LearnerStats) {
		switch {
		case errors.Is(err, errUnsupported) || errors.Is(err, errRefused):
			st.Unsupported++
		case errors.Is(err, errMismatched):
			st.Mismatched++
		case err != nil:
			st.Failed++
		case rendered:
			st.Rendered++
		default:
			st.Tokenized++
		}
	})
}

// notify tells of an engine that begins or ends to fail. A prompt that cannot be learned says nothing of the engine.
func (l *Learner) notify(base string, err error) {
	if errors.Is(err, errUnsupported) || l.config.Notify == nil {
		return
	}
	l.mu.Lock()
	_, was := l.silent[base]
	if len(l.silent) >= maxRefused {
		clear(l.silent)
	}
	if delete(l.silent, base); err != nil {
		l.silent[base] = struct{}{}
	}
	l.mu.Unlock()
	if was != (err != nil) {
		l.config.Notify(base, err)
	}
}

// tokenizePath returns where the bodies of an API's requests can be tokenized.
func tokenizePath(path string) (string, bool) {
	for _, api := range []string{"/v1/chat/completions", "/v1/completions"} {
		if prefix, ok := strings.CutSuffix(path, api); ok {
			return prefix + "/tokenize", true
		}
	}
	return "", false
}

// ask posts the body to an engine and reads the tokens from its answer.
func (l *Learner) ask(ctx context.Context, r Request, path string) ([]uint32, error) {
	url := strings.TrimSuffix(r.Base, "/") + path
	if l.hasRefused(url) {
		return nil, errRefused
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(r.Body))
	if err != nil {
		return nil, err
	}
	for name, values := range r.Header {
		req.Header[name] = values
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := l.config.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body := io.LimitReader(res.Body, l.config.AnswerBytes)
	switch res.StatusCode {
	case http.StatusOK:
		return readTokens(body)
	case http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		l.refuse(url)
		return nil, errRefused
	}
	_, _ = io.CopyN(io.Discard, body, 4096) // so that the connection can be used again
	return nil, fmt.Errorf("%s answered %s", path, res.Status)
}

func (l *Learner) hasRefused(url string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	at, ok := l.refused[url]
	if ok && time.Since(at) > refusedFor {
		delete(l.refused, url)
		return false
	}
	return ok
}

func (l *Learner) refuse(url string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.refused) >= maxRefused {
		clear(l.refused)
	}
	l.refused[url] = time.Now()
	if strings.HasSuffix(url, "/render") {
		l.stats.RenderRefused++
	}
}

// answer is what matters of a render's or a tokenizer's answer.
type answer struct {
	TokenIDs []uint32 `json:"token_ids"`
	Tokens   []uint32 `json:"tokens"`
	Features *struct {
		Hashes map[string]json.RawMessage `json:"mm_hashes"`
	} `json:"features"`
}

// readTokens reads an answer: an object, or for text completions a list of them, of which the first stands for the request.
func readTokens(r io.Reader) ([]uint32, error) {
	body, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	var one answer
	if bytes.HasPrefix(bytes.TrimSpace(body), []byte("[")) {
		var several []answer
		if err = json.Unmarshal(body, &several); err == nil && len(several) > 0 {
			one = several[0]
		}
	} else {
		err = json.Unmarshal(body, &one)
	}
	if err != nil {
		return nil, fmt.Errorf("answer of %d bytes: %w", len(body), err)
	}
	if one.Features != nil && len(one.Features.Hashes) > 0 {
		return nil, errUnsupported // the blocks' extra keys are not known
	}
	tokens := one.TokenIDs
	if len(tokens) == 0 {
		tokens = one.Tokens
	}
	if len(tokens) == 0 {
		return nil, fmt.Errorf("answer of %d bytes has no tokens", len(body))
	}
	return tokens, nil
}
