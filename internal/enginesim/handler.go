// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
)

// Response headers that let a test see what a server received, behind any proxy.
const (
	// HeaderAddr names the server that answered, by its address.
	HeaderAddr = "X-Enginesim-Addr"
	// HeaderBytes is the number of bytes of the request's body.
	HeaderBytes = "X-Enginesim-Bytes"
	// HeaderSum is the xxhash64 of the request's body, in 16 hexadecimal digits.
	HeaderSum = "X-Enginesim-Sum"
)

// handler routes all endpoints.
func (p *instance) handler() http.Handler {
	mux := http.NewServeMux()
	for path, e := range endpoints {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			p.counted(w, r, path, func(w http.ResponseWriter) { p.inference(w, r, e) })
		})
	}
	for path, e := range renderEndpoints {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			p.counted(w, r, path, func(w http.ResponseWriter) { p.render(w, r, e) })
		})
	}
	mux.HandleFunc("GET /v1/responses/{id}", p.recall)
	mux.HandleFunc("GET /v1/models", p.models)
	mux.HandleFunc("GET /metrics", p.metrics)
	mux.HandleFunc("GET /metrics/", p.filteredMetrics)
	mux.HandleFunc("GET /health", p.health)
	mux.HandleFunc("/ping", p.health)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"version": Version})
	})
	mux.HandleFunc("POST /reset_prefix_cache", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]bool{"success": p.driver.resetCache()})
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	})
	return p.gated(mux)
}

// gated lets requests in while the server is neither paused nor closing.
func (p *instance) gated(next http.Handler) http.Handler {
	addr := p.addr
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !p.handlers.enter() {
			panic(http.ErrAbortHandler)
		}
		defer p.handlers.leave()
		if p.faults.wait(r.Context()) != nil {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set(HeaderAddr, addr)
		next.ServeHTTP(w, r)
	})
}

// counted books a request to http_requests_total and its companions.
func (p *instance) counted(w http.ResponseWriter, r *http.Request, path string, serve func(http.ResponseWriter)) {
	begin := time.Now()
	recorder := &statusRecorder{ResponseWriter: w, status: http.StatusOK}
	defer func() {
		p.visits.observe(visit{path, r.Method, recorder.status / 100 * 100}, time.Since(begin))
	}()
	serve(recorder)
}

// statusRecorder remembers the status of an answer.
type statusRecorder struct {
	http.ResponseWriter
	status int
}

func (w *statusRecorder) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController find Flush.
func (w *statusRecorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// inference serves one request to an endpoint that runs the engine.
func (p *instance) inference(w http.ResponseWriter, r *http.Request, e endpoint) {
	raw, kept, err := p.readBody(w, r)
	if err != nil {
		panic(http.ErrAbortHandler) // the client is gone
	}
	if hook := p.config.OnRequest; hook != nil {
		hook(r, raw)
	}
	if status, retryAfter, fail := p.faults.takeFailure(); fail {
		if status == 0 {
			panic(http.ErrAbortHandler)
		}
		if retryAfter != "" {
			w.Header().Set("Retry-After", retryAfter)
		}
		writeError(w, status, fmt.Errorf("status %d was asked for by a drill", status))
		return
	}
	if p.config.Instant {
		p.answerInstantly(w, raw, e)
		return
	}
	if !kept {
		writeError(w, http.StatusBadRequest, fmt.Errorf("body is longer than %d bytes", p.config.KeepBody))
		return
	}
	a, status, err := p.prepare(raw, e)
	if err != nil {
		writeError(w, status, err)
		return
	}
	if err := p.driver.submit(a.generation); err != nil {
		p.refuse(w, err)
		return
	}
	if a.body.Stream && e.dialect.delta != nil {
		p.stream(w, r, a)
		return
	}
	p.unary(w, r, a)
}

// readBody reads a request's body to its end and says in headers what it was.
func (p *instance) readBody(w http.ResponseWriter, r *http.Request) (raw []byte, kept bool, err error) {
	limit := p.config.KeepBody
	if p.config.Instant {
		limit = min(limit, 1<<20)
	}
	buf := make([]byte, 0, min(max(r.ContentLength, 511), limit)+1)
	for int64(len(buf)) <= limit {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := r.Body.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if errors.Is(err, io.EOF) {
			w.Header().Set(HeaderBytes, strconv.Itoa(len(buf)))
			w.Header().Set(HeaderSum, fmt.Sprintf("%016x", xxhash.Sum64(buf)))
			return buf, true, nil
		}
		if err != nil {
			return nil, false, err
		}
	}
	digest := xxhash.New()
	_, _ = digest.Write(buf)
	rest, err := io.Copy(digest, r.Body)
	if err != nil {
		return nil, false, err
	}
	w.Header().Set(HeaderBytes, strconv.FormatInt(int64(len(buf))+rest, 10))
	w.Header().Set(HeaderSum, fmt.Sprintf("%016x", digest.Sum64()))
	return nil, false, nil
}

// prepare decodes a body and renders its prompts.
func (p *instance) prepare(raw []byte, e endpoint) (*answer, int, error) {
	a := &answer{endpoint: e, created: time.Now().Unix(), instance: p}
	if err := json.Unmarshal(raw, &a.body); err != nil {
		return nil, http.StatusBadRequest, fmt.Errorf("body is not the JSON object expected: %w", err)
	}
	adapter, ok := p.adapterOf(a.body.Model)
	if !ok { // with vLLM's text
		//lint:ignore ST1005 vLLM's text, which clients see
		return nil, http.StatusNotFound, fmt.Errorf("The model `%s` does not exist.", a.body.Model)
	}
	a.model = a.body.Model
	if a.model == "" {
		a.model = p.config.Model
	}
	ids, err := e.prompts(p, a)
	if err != nil {
		if errors.Is(err, errUnknownResponse) {
			return nil, http.StatusNotFound, err
		}
		return nil, http.StatusBadRequest, err
	}
	tokens, choices := 0, 1
	if e.generates {
		if tokens, err = a.body.outputTokens(); err != nil {
			return nil, http.StatusBadRequest, err
		}
		if choices, err = a.body.choices(); err != nil {
			return nil, http.StatusBadRequest, err
		}
	}
	in := space{adapter, a.body.CacheSalt}
	prompts := make([]*prompt, 0, len(ids)*choices)
	for _, list := range ids {
		for range choices {
			prompts = append(prompts, newPrompt(p.tokenizer, p.config.BlockTokens, in, list))
		}
	}
	a.generation = newGeneration(p.driver, prompts, tokens, a.body.Stream)
	a.id = fmt.Sprintf("%s-%x-%d", e.dialect.idPrefix, p.started.UnixNano(), p.serial.Add(1))
	return a, http.StatusOK, nil
}

// refuse answers a request that the engine did not take.
func (p *instance) refuse(w http.ResponseWriter, err error) {
	if errors.Is(err, ErrQueueFull) {
		writeError(w, http.StatusServiceUnavailable, err)
		return
	}
	writeError(w, http.StatusBadRequest, fmt.Errorf("this model's maximum context length is %d tokens: %w", p.config.MaxModelTokens, err))
}

// unary waits for the whole answer and writes it in one piece.
func (p *instance) unary(w http.ResponseWriter, r *http.Request, a *answer) {
	for !a.generation.finished.Load() {
		select {
		case <-a.generation.ready:
		case <-r.Context().Done():
			p.driver.abort(a.generation)
			panic(http.ErrAbortHandler) // returning would send an empty 200
		}
	}
	a.remember()
	writeJSON(w, http.StatusOK, a.endpoint.dialect.unary(a))
}

// stream writes the answer as server-sent events. Nothing is sent, headers
// included, before the first token. Tokens that are due together leave in one write.
func (p *instance) stream(w http.ResponseWriter, r *http.Request, a *answer) {
	g, d := a.generation, a.endpoint.dialect
	flush := http.NewResponseController(w).Flush
	sent := make([]int, len(g.requests))
	var out, text []byte
	for {
		select {
		case <-g.ready:
		case <-r.Context().Done():
			p.driver.abort(g)
			panic(http.ErrAbortHandler)
		}
		finished := g.finished.Load() // before progress, so that the end is sent complete
		out = out[:0]
		if !a.opened {
			a.opened = true
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			out = d.open(out, a)
		}
		for i, prompt := range g.prompts {
			for n := int(g.progress[i].Load()); sent[i] < n; sent[i]++ {
				text = prompt.answerToken(text[:0], sent[i])
				out = d.delta(out, a, i, text, sent[i]+1 == g.requests[i].OutputTokens)
			}
		}
		if finished {
			a.remember()
			out = d.close(out, a)
		}
		if _, err := w.Write(out); err != nil {
			p.driver.abort(g)
			return
		}
		if err := flush(); err != nil || finished {
			p.driver.abort(g)
			return
		}
	}
}

// render serves the endpoints that show a prompt's tokens instead of running it.
func (p *instance) render(w http.ResponseWriter, r *http.Request, e renderEndpoint) {
	if e.scaleOut && !p.config.ScaleOut { // with vLLM's text
		//lint:ignore ST1005 vLLM's text, which clients see
		writeError(w, http.StatusForbidden, errors.New("Scale-out endpoints are disabled"))
		return
	}
	raw, kept, err := p.readBody(w, r)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if !kept {
		writeError(w, http.StatusBadRequest, fmt.Errorf("body is longer than %d bytes", p.config.KeepBody))
		return
	}
	a, status, err := p.prepare(raw, e.endpoint)
	if err != nil {
		writeError(w, status, err)
		return
	}
	writeJSON(w, http.StatusOK, e.show(a))
}

func (p *instance) models(w http.ResponseWriter, _ *http.Request) {
	type entry map[string]any
	now := time.Now().Unix()
	data := []entry{{
		"id": p.config.Model, "object": "model", "created": now, "owned_by": "vllm", "root": p.config.Model,
		"parent": nil, "max_model_len": p.config.MaxModelTokens,
	}}
	for _, adapter := range p.config.Adapters {
		data = append(data, entry{
			"id": adapter, "object": "model", "created": now, "owned_by": "vllm", "root": adapter,
			"parent": p.config.Model, "max_model_len": nil,
		})
	}
	writeJSON(w, http.StatusOK, entry{"object": "list", "data": data})
}

func (p *instance) health(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(p.faults.healthStatus())
}

// recall answers GET /v1/responses/{id}, which only the server can that made it.
func (p *instance) recall(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if _, ok := p.memory.load(id); !ok {
		writeError(w, http.StatusNotFound, fmt.Errorf("%w: %s", errUnknownResponse, id))
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"id": id, "object": "response", "status": "completed"})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // an error means that the client is gone
}

// errorTypes are vLLM's names for the statuses it answers with.
var errorTypes = map[int]string{
	http.StatusBadRequest:         "BadRequestError",
	http.StatusForbidden:          "Forbidden",
	http.StatusNotFound:           "NotFoundError",
	http.StatusServiceUnavailable: "Service Unavailable",
}

func writeError(w http.ResponseWriter, status int, err error) {
	kind, ok := errorTypes[status]
	if !ok {
		kind = "InternalServerError"
	}
	writeJSON(w, status, map[string]any{
		"error": map[string]any{"message": err.Error(), "type": kind, "param": nil, "code": status},
	})
}

// handlerGroup counts handlers at work. Unlike a sync.WaitGroup it may be entered
// while it is being waited for, and then refuses.
type handlerGroup struct {
	mu      sync.Mutex
	group   sync.WaitGroup
	closing bool
}

func (h *handlerGroup) enter() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closing {
		return false
	}
	h.group.Add(1)
	return true
}

func (h *handlerGroup) leave() { h.group.Done() }

// wait lets no further handler in and returns when none is left.
func (h *handlerGroup) wait() {
	h.mu.Lock()
	h.closing = true
	h.mu.Unlock()
	h.group.Wait()
}
