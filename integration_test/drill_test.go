// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"cmp"
	"debug/buildinfo"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// The steady load of a drill: chats that share a few system prompts, most answered at once, some streamed.
const (
	systemPrompts = 24
	systemBytes   = 4000
	questionBytes = 400
	streamTokens  = 100
	streamClients = 6
	shortClients  = 6
	thinking      = 20 * time.Millisecond // between two requests of a client
)

// Retries as in Caddyfile.example, and of POST too, so that what fails before its first byte is served by
// another replica; a replica that failed is back in use sooner, so that a drill can see it.
const drillOptions = `
	lb_retries 2
	lb_try_interval 50ms
	lb_retry_match {
		method POST
	}
	fail_duration 1s
	transport http {
		keepalive 2s
	}`

// full plays the drills at the size that they are about, and thorough plays those with least_conn, too, where
// the comparison says something but takes its time. Otherwise they are of a size that takes seconds.
var (
	full     = os.Getenv("DRILLS") == "full"
	thorough = full || os.Getenv("UPDATE_RELIABILITY") != ""
)

// sized is how many of something a drill has.
func sized(usual, documented int) int {
	if full {
		return documented
	}
	return usual
}

// drill is one fault that happens to a fleet under load, and what must hold nevertheless.
type drill struct {
	number, name string

	replicas int                                       // default 3
	engine   func(i int, c *enginesim.ServerConfig)    // changes the settings of a replica
	front    func(*exercise, *enginesim.Server) string // stands before each replica
	others   func(*exercise) []string                  // further upstreams
	policy   string                                    // options of kv_cache_aware
	hash     bool                                      // prefix_hash chooses instead
	options  string                                    // of reverse_proxy, instead of drillOptions
	resend   bool                                      // what Caddy closed the connection of, as clients do
	site     func(*exercise) string                    // further directives
	extra    func(*exercise) string                    // another site
	disturb  func(*exercise)                           // begins the fault
	mend     func(*exercise)                           // ends it
	check    func(*exercise)                           // what must hold besides what holds for all
	excused  []string                                  // failures that no policy can help
	compare  bool                                      // is played with least_conn as well
	seldom   bool                                      // the comparison only where it is asked for
	uneven   string                                    // why new prompts are not spread evenly afterwards; "" if they are
	hangs    bool                                      // least_conn's clients, all of them
	kept     int                                       // goroutines and files, for connections that outlive the load
	stays    string                                    // why something stays of what the drill has opened; "" if nothing does
	env      []string                                  // of Caddy's process
	memory   int                                       // MiB that the process may take; default 300
	files    int                                       // that Caddy's process may have open; 0 for as many as the system allows
	dynamic  []string                                  // hosts at which DNS finds the one engine; it listens on all
	spread   bool                                      // new prompts come with the end of the fault, and all replicas must share in them
}

// Kinds of failure beside a status that is not 200.
const (
	noAnswer = "no answer"
	cut      = "cut after the first byte"
	hollow   = "200 without an answer"
)

// phase is a part of a drill.
type phase int

const (
	before phase = iota
	during
	after
	mending // between the two, in no column of the table
)

// atOnce is how many drills are played at a time. They wait more than they compute.
const atOnce = 6

// exercise is a drill as it is played.
type exercise struct {
	*testing.T
	drill
	policy string // that chooses
	proxy  *proxy
	fleet  enginesim.Fleet
	addrs  []string

	// of the drill at hand
	victim  *enginesim.Server
	faulty  atomic.Bool // the fault is on
	known   time.Time   // since when it is known, or has been on for a while
	hanging int         // clients that wait for far longer than an answer takes

	first, second atomic.Pointer[proxy] // that clients use; half of them the second, if there is one
	resolver      *resolver             // that tells the upstreams, if they are dynamic
	process       *os.Process           // of a replica outside of this process, at the address outside
	outside       string
	secure        string               // address of the other site
	strangers     []string             // upstreams of other policies
	narrators     map[string]*narrator // that publish what engines store
	spoiled       atomic.Int64         // of the drill's own requests, those that failed
	note          string               // of what the table has no column for
	phase         atomic.Int32
	fresh         atomic.Bool // system prompts are others than at the beginning
	hot           atomic.Bool // nearly all requests have one prompt
	serial        atomic.Int64
	over          chan struct{}
	clients       sync.WaitGroup

	mu       sync.Mutex
	records  []record
	open     map[int64]time.Time // requests without an answer, and since when
	visits   map[string][]string // replicas that a request was seen at
	repeated int                 // visits to a replica that had seen the request
}

// record is what became of a request.
type record struct {
	phase                   phase // at its start
	began                   time.Time
	stream                  bool
	kind                    string // of failure, "" if it was answered
	replica                 string // by the engine's own account
	prompt, cached, matched int    // tokens
	resent                  int
}

// outcome is a line of the table.
type outcome struct {
	drill
	sent, answered, resent int
	failed, compared       map[string]int // by kind
	hits                   [3]float64     // share of prompt tokens
	share                  [2]float64     // of uncached tokens, the busiest replica's as a multiple of a fair one
	even, comparedEven     float64        // the same of new prompts, within five seconds of the end of the fault
	memory                 int64
	held                   [2]holdings // by the idle Caddy
	comparedNote           string
	note                   string
	verdict                string
}

func TestDrills(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes")
	}
	binary(t) // so that no drill waits for it
	var mu sync.Mutex
	var rows []outcome
	inParallel(len(drills), atOnce, func(i int) {
		d := drills[i]
		t.Run(d.number+" "+d.name, func(t *testing.T) {
			policy := "kv_cache_aware"
			if d.hash {
				policy = "prefix_hash"
			}
			row := play(t, d, policy)
			if row.drill.compare = d.compare && (thorough || !d.seldom); row.drill.compare {
				other := play(t, d, "least_conn")
				row.compared, row.comparedEven, row.comparedNote = other.failed, other.even, other.note
			}
			mu.Lock()
			defer mu.Unlock()
			rows = append(rows, row)
		})
	})
	report(t, rows)
}

// play runs a drill from the start of its processes to the idle fleet afterwards.
func play(t *testing.T, d drill, policy string) outcome {
	x := &exercise{T: t, drill: d, policy: policy, over: make(chan struct{}), visits: make(map[string][]string), open: make(map[int64]time.Time)}
	x.startFleet()
	x.proxy = newProxy(t)
	x.proxy.level, x.proxy.env, x.proxy.files = "WARN", d.env, d.files
	x.first.Store(x.proxy)
	if d.extra != nil {
		x.proxy.extra = d.extra(x)
	}
	x.proxy.run(x.proxy.caddyfile(x.directives(x.addrs)))
	if x.ours() && !d.hash && !strings.Contains(d.policy, "metrics_off") {
		x.proxy.awaitScrapes(x.fleetAddrs()...)
	}
	row := outcome{drill: d}
	row.held[0] = x.proxy.holds()
	fleets := x.proxy.labels("fleet")
	for i := range streamClients + shortClients {
		x.clients.Go(func() { x.client(i) })
	}
	ended := false
	end := func() {
		if !ended {
			ended = true
			close(x.over)
			x.clients.Wait()
		}
	}
	defer end() // also where a check gives up
	x.dwell()
	x.phase.Store(int32(during))
	if d.disturb != nil {
		d.disturb(x)
	}
	if x.ours() || !d.hangs {
		x.dwell()
	}
	x.phase.Store(int32(mending))
	x.fresh.Store(d.spread) // old ones would stay where they are cached, as they should
	if d.mend != nil {
		d.mend(x)
	}
	x.phase.Store(int32(after))
	row.even = x.evenness()
	x.dwell()
	end()
	row.memory, _ = x.proxy.memory()
	if x.ours() {
		x.proxy.awaitIdle()
		row.held[1] = x.leftOver(row.held[0])
		x.tellNothing()
		for name := range x.proxy.labels("fleet") {
			if !fleets[name] {
				x.Errorf("the metrics have the fleet %s, which was not there before", name)
			}
		}
	}
	if n := x.spoiled.Load(); n > 0 {
		x.note += fmt.Sprintf("; %d of the drill's own", n)
	}
	row.note = x.note
	x.sumUp(&row)
	if x.ours() {
		x.judge(&row)
		if d.check != nil {
			d.check(x)
		}
	}
	row.verdict = "holds"
	if t.Failed() {
		row.verdict = "FAILS"
	}
	return row
}

// ours tells whether a policy of this plugin chooses, and not the one it is compared with.
func (x *exercise) ours() bool { return x.policy != "least_conn" }

// steady is an engine that takes a moment to compute a system prompt, and far less to find it in its cache.
var steady = enginesim.ServerConfig{Speed: 2}

func (x *exercise) startFleet() {
	if x.dynamic != nil {
		x.startDynamic()
		return
	}
	n := x.replicas
	if n == 0 {
		n = 3
	}
	for i := range n {
		config := steady
		config.OnRequest = x.visited
		if x.engine != nil {
			x.engine(i, &config)
		}
		engine := engines(x.T, 1, config)[0]
		x.fleet = append(x.fleet, engine)
		if x.front == nil {
			x.addrs = append(x.addrs, engine.Addr())
		} else {
			x.addrs = append(x.addrs, x.front(x, engine))
		}
	}
	if x.others != nil {
		x.addrs = append(x.addrs, x.others(x)...)
	}
}

// startDynamic starts one engine that listens on all addresses, and a resolver that names some of them.
func (x *exercise) startDynamic() {
	_, port, _ := net.SplitHostPort(loopback.FreeAddr(x))
	config := steady
	config.OnRequest, config.Addr = x.visited, net.JoinHostPort("0.0.0.0", port)
	engine, err := enginesim.StartServer(config)
	if err != nil {
		x.Skipf("this system can't listen on all addresses: %v", err)
	}
	x.Cleanup(engine.Close)
	x.fleet = append(x.fleet, engine)
	x.resolver = startResolver(x.T, x.dynamic...)
	x.drill.options += fmt.Sprintf("%s\ndynamic a {\nname llm.test\nport %s\nrefresh 50ms\nversions ipv4\nresolvers tcp/%s\n}", // packets hold less than 300 addresses
		drillOptions, port, x.resolver.tcp.Addr())
}

// fleetAddrs are the upstreams that are engines.
func (x *exercise) fleetAddrs() []string { return x.addrs[:min(len(x.addrs), len(x.fleet))] }

// directives are the site's, with the given upstreams.
func (x *exercise) directives(addrs []string) string {
	options := x.drill.options
	if options == "" {
		options = drillOptions
	}
	site := ""
	if x.site != nil {
		site = x.site(x)
	}
	if x.policy == "kv_cache_aware" {
		return site + aware(addrs, x.drill.policy, options)
	}
	return site + reverseProxy(addrs, x.policy, options)
}

// visited is told by each engine of each request that reached it.
func (x *exercise) visited(r *http.Request, body []byte) {
	id := r.Header.Get("X-Drill-Request")
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if id == "" || local == nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if slices.Contains(x.visits[id], local.String()) {
		x.repeated++
	}
	x.visits[id] = append(x.visits[id], local.String())
	if a := x.narrators[local.String()]; a != nil && len(a.bodies) < cap(a.bodies) {
		a.bodies <- body
	}
}

// client sends one request after the other until the drill is over.
func (x *exercise) client(i int) {
	random := rand.New(rand.NewPCG(1, uint64(i)))
	for {
		select {
		case <-x.over:
			return
		case <-time.After(thinking):
		}
		system := random.IntN(systemPrompts)
		if x.hot.Load() && random.IntN(20) > 0 {
			system = 0
		}
		if x.fresh.Load() {
			system += systemPrompts
		}
		x.send(i, system, i < streamClients)
	}
}

// send asks a question and keeps what became of it.
func (x *exercise) send(client, system int, stream bool) {
	n := x.serial.Add(1)
	request := map[string]any{
		"model": "sim", "max_tokens": 4,
		"messages": []message{
			{"system", text(fmt.Sprint("system ", system), systemBytes)},
			{"user", text(fmt.Sprint("question ", n), questionBytes)},
		},
	}
	if stream {
		request["max_tokens"], request["stream"] = streamTokens, true
		request["stream_options"] = map[string]bool{"include_usage": true}
	}
	body := asJSON(request)
	rec := record{phase: phase(x.phase.Load()), began: time.Now(), stream: stream}
	p := x.first.Load()
	if second := x.second.Load(); second != nil && client%2 == 1 {
		p = second
	}
	x.mu.Lock()
	x.open[n] = rec.began
	x.mu.Unlock()
	a := x.try(p, body, fmt.Sprint(n))
	for a.status == 0 && x.resend && rec.resent < 100 {
		rec.resent++
		p = x.first.Load()
		a = x.try(p, body, fmt.Sprint(n, " again ", rec.resent))
	}
	rec.take(a)
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.open, n)
	x.records = append(x.records, rec)
}

// countHanging notes how many clients wait for far longer than an answer takes.
func (x *exercise) countHanging() {
	const long = 2 * time.Second
	x.mu.Lock()
	defer x.mu.Unlock()
	hang := 0
	for _, began := range x.open {
		if time.Since(began) > long {
			hang++
		}
	}
	x.hanging = hang
	x.note += fmt.Sprintf("; %d of %d clients hang", hang, streamClients+shortClients)
}

func (x *exercise) try(p *proxy, body, id string) answer {
	r, err := http.NewRequestWithContext(x.Context(), http.MethodPost, "http://"+p.addr+chatPath, nil)
	if err != nil {
		return answer{err: err}
	}
	setBody(r, body)
	r.Header.Set("X-Drill-Request", id)
	return exchange(p.client, r)
}

var (
	promptTokens = regexp.MustCompile(`"prompt_tokens":\s*(\d+)`)
	cachedTokens = regexp.MustCompile(`"cached_tokens":\s*(\d+)`)
)

// take reads an answer.
func (r *record) take(a answer) {
	switch {
	case a.status == 0:
		r.kind = noAnswer
	case a.err != nil || a.status == http.StatusOK && r.stream && !strings.Contains(string(a.body), "[DONE]"):
		r.kind = cut
	case a.status != http.StatusOK:
		r.kind = fmt.Sprint("status ", a.status)
	}
	r.replica = a.header.Get(enginesim.HeaderAddr)
	r.matched, _ = strconv.Atoi(a.header.Get(matchedField)) // 0 without the policy
	r.prompt, r.cached = lastNumber(promptTokens, a.body), lastNumber(cachedTokens, a.body)
	if a.status == http.StatusOK && a.err == nil && r.prompt == 0 {
		r.kind = hollow
	}
}

func lastNumber(pattern *regexp.Regexp, text []byte) int {
	all := pattern.FindAllSubmatch(text, -1)
	if len(all) == 0 {
		return 0
	}
	n, _ := strconv.Atoi(string(all[len(all)-1][1])) // of digits
	return n
}

// dwell lets the load go on for a while: in time, and in requests where the machine is slow.
func (x *exercise) dwell() {
	x.Helper()
	enough, begin := x.ended()+60, time.Now()
	await(x, "requests to end", func() bool {
		return x.ended() >= enough && time.Since(begin) > 1200*time.Millisecond
	})
}

func (x *exercise) ended() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.records)
}

// join adds short clients to the load, for when it may be that all the others wait for one replica.
func (x *exercise) join() {
	for i := range shortClients {
		x.clients.Go(func() { x.client(streamClients + shortClients + i) })
	}
}

// of lists the records that a condition holds for.
func (x *exercise) of(is func(record) bool) []record {
	x.mu.Lock()
	defer x.mu.Unlock()
	var some []record
	for _, r := range x.records {
		if is(r) {
			some = append(some, r)
		}
	}
	return some
}

// sumUp fills in a line of the table.
func (x *exercise) sumUp(row *outcome) {
	row.failed = make(map[string]int)
	for ph := before; ph <= mending; ph++ {
		prompt, cached := 0, 0
		computed := make(map[string]int)
		for _, r := range x.of(func(r record) bool { return r.phase == ph }) {
			row.sent++
			row.resent += r.resent
			if r.kind != "" {
				row.failed[r.kind]++
				continue
			}
			row.answered++
			prompt += r.prompt
			cached += r.cached
			computed[r.replica] += r.prompt - r.cached
		}
		if ph == mending {
			continue
		}
		row.hits[ph] = float64(cached) / float64(max(prompt, 1))
		if ph < after {
			row.share[ph] = busiest(computed)
		}
	}
}

// busiest is the largest share as a multiple of a fair one.
func busiest(shares map[string]int) float64 {
	all := 0
	for _, n := range shares {
		all += n
	}
	return float64(largest(shares)*len(shares)) / float64(max(all, 1))
}

const (
	// evenAfter is when new prompts must be spread over the replicas, after any change.
	evenAfter = 5 * time.Second
	// evenShare is how much of their tokens the busiest replica may compute, as a multiple of a fair share.
	evenShare = 1.5
)

// evenness sends new prompts, all of one length, on top of the load, and returns the share of the busiest
// replica: as soon as it is as it must be, or else when the time is over.
func (x *exercise) evenness() float64 {
	const prompts, together = 90, 8
	for begin := time.Now(); ; {
		var mu sync.Mutex
		computed := make(map[string]int)
		for _, s := range x.fleet {
			computed[s.Addr()] = 0
		}
		if x.outside != "" {
			computed[x.outside] = 0
		}
		inParallel(prompts, together, func(int) {
			n := x.serial.Add(1)
			var rec record
			rec.take(x.try(x.first.Load(), ask(text(fmt.Sprint("new prompt ", n), systemBytes)), fmt.Sprint("new ", n)))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case rec.kind == "":
				computed[rec.replica] += rec.prompt - rec.cached
			case x.ours() && !slices.Contains(x.excused, rec.kind):
				x.Errorf("a new prompt failed: %s", rec.kind)
			}
		})
		if share := busiest(computed); share <= evenShare || time.Since(begin) > evenAfter {
			return share
		}
	}
}

// holdings are what an idle Caddy has open.
type holdings struct{ goroutines, files int }

func (p *proxy) holds() holdings {
	p.tb.Helper()
	p.client.CloseIdleConnections()
	h := holdings{goroutines: p.goroutines()}
	if files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)); err == nil { // where there is one
		h.files = len(files)
	}
	return h
}

// leftOver waits until Caddy holds no more than before the drill, give or take what a timer, a scrape or
// a connection that is just closing takes. Connections to replicas are kept for two seconds.
func (x *exercise) leftOver(before holdings) (left holdings) {
	x.Helper()
	slack := 4 + x.kept
	back := func() bool {
		left = x.proxy.holds()
		return left.goroutines <= before.goroutines+slack && left.files <= before.files+slack
	}
	if x.stays != "" {
		back()
		return left
	}
	for end := time.Now().Add(patience); !back(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			x.Errorf("Caddy is left with %d goroutines and %d files, and had %d and %d before", left.goroutines, left.files, before.goroutines, before.files)
			break
		}
	}
	for replica := range x.proxy.labels("replica") {
		if !slices.Contains(x.addrs, replica) && !slices.Contains(x.strangers, replica) {
			x.Errorf("the metrics still have the replica %s", replica)
		}
	}
	return left
}

// tellNothing checks that nothing of a prompt is to be found where operators look.
func (x *exercise) tellNothing() {
	_, decisions := x.proxy.ask(http.MethodGet, "/kv_cache/decisions?limit=1000", "", nil)
	_, stacks := x.proxy.ask(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", nil)
	for where, told := range map[string]string{
		"the log": x.proxy.log.String(), "the page of metrics": string(x.proxy.metricsPage().body),
		"the latest decisions": decisions, "the stacks": stacks,
	} {
		if i := strings.Index(told, textMark); i >= 0 {
			x.Errorf("%s has text of a prompt: %.200s", where, told[max(0, i-100):])
		}
	}
}

func largest(of map[string]int) int {
	most := 0
	for _, n := range of {
		most = max(most, n)
	}
	return most
}

// judge checks what must hold in every drill.
func (x *exercise) judge(row *outcome) {
	for kind, n := range row.failed {
		if !slices.Contains(x.excused, kind) {
			x.Errorf("%d requests failed: %s", n, kind)
		}
	}
	x.mu.Lock()
	repeated := x.repeated
	x.mu.Unlock()
	if repeated > 0 {
		x.Errorf("%d times a request was sent to a replica that had seen it", repeated)
	}
	if x.uneven == "" && row.even > evenShare {
		x.Errorf("%v after the fault one replica computes %.2f times its fair share of new prompts", evenAfter, row.even)
	}
	if row.memory > int64(cmp.Or(x.memory, 300))<<20 && !withRaceDetector(x) {
		x.Errorf("Caddy took %d MiB of memory", row.memory>>20)
	}
}

// withRaceDetector tells whether the Caddy under test was built with the race detector, which takes some
// times as much memory.
func withRaceDetector(tb testing.TB) bool {
	info, err := buildinfo.ReadFile(binary(tb))
	return err == nil && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// goroutines counts those of the process.
func (p *proxy) goroutines() int {
	p.tb.Helper()
	_, profile := p.ask(http.MethodGet, "/debug/pprof/goroutine?debug=1", "", nil)
	var n int
	if _, err := fmt.Sscanf(profile, "goroutine profile: total %d", &n); err != nil {
		p.tb.Errorf("the profile of goroutines begins %.60q", profile)
	}
	return n
}

// Marks around the tables in the documentation.
const (
	reliabilityPage = "../docs/reliability.md"
	tableBegin      = "<!-- table of TestDrills -->\n"
	fullTableBegin  = "<!-- table of TestDrills at full size -->\n"
	tableEnd        = "<!-- end of table -->\n"
)

// tableHead begins the table.
const tableHead = "| drill | sent | answered | failed, why | hit rate before, during, after | busiest replica, × fair: before, during; new prompts | with least_conn: failed; new prompts | memory, MiB | goroutines, files | |\n" +
	"|---|---|---|---|---|---|---|---|---|---|\n"

// line is a drill's line of the table.
func (r *outcome) line() string {
	compared := ""
	if r.drill.compare {
		compared = fmt.Sprintf("%s%s; %.2f", reasons(r.compared), r.comparedNote, r.comparedEven)
	}
	failed := reasons(r.failed) + r.note
	if r.resent > 0 {
		failed += fmt.Sprintf("; %d resent", r.resent)
	}
	return fmt.Sprintf("| %s %s | %d | %d | %s | %.0f, %.0f, %.0f %% | %.2f, %.2f; %.2f | %s | %d | %d → %d, %d → %d | %s |\n",
		r.number, r.name, r.sent, r.answered, failed,
		100*r.hits[before], 100*r.hits[during], 100*r.hits[after],
		r.share[before], r.share[during], r.even, compared, r.memory>>20,
		r.held[0].goroutines, r.held[1].goroutines, r.held[0].files, r.held[1].files, r.verdict)
}

// report prints the table. Where $UPDATE_RELIABILITY is set, the lines of the drills that were played
// replace theirs in the documentation.
func report(t *testing.T, rows []outcome) {
	lines := make(map[string]string)
	for _, r := range rows {
		lines[r.number] = r.line()
	}
	t.Logf("outcomes:\n%s", tableOf(lines))
	if os.Getenv("UPDATE_RELIABILITY") == "" {
		return
	}
	page, err := os.ReadFile(reliabilityPage)
	if err != nil {
		t.Fatal(err)
	}
	mark := tableBegin
	if full {
		mark = fullTableBegin
	}
	head, rest, begins := strings.Cut(string(page), mark)
	table, tail, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		t.Fatalf("%s lacks the marks of the table", reliabilityPage)
	}
	for line := range strings.Lines(table) {
		number, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " ")
		if _, played := lines[number]; !played && slices.ContainsFunc(drills, func(d drill) bool { return d.number == number }) {
			lines[number] = line
		}
	}
	if err := os.WriteFile(reliabilityPage, []byte(head+mark+tableOf(lines)+tableEnd+tail), 0o644); err != nil {
		t.Fatal(err)
	}
}

// tableOf puts the lines in order.
func tableOf(lines map[string]string) string {
	table := tableHead
	for _, number := range slices.Sorted(maps.Keys(lines)) {
		table += lines[number]
	}
	return table
}

// reasons lists failures by kind.
func reasons(failed map[string]int) string {
	if len(failed) == 0 {
		return "0"
	}
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(failed)) {
		all = append(all, fmt.Sprintf("%d %s", failed[kind], kind))
	}
	return strings.Join(all, ", ")
}
