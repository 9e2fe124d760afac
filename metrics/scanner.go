// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// Bounds of a page. A real one has 60 to 600 kB, lines of about 1 kB at most,
// and one rank for each data-parallel engine.
const (
	// DefaultMaxBytes is how much of a page is read unless configured.
	DefaultMaxBytes = 8 << 20

	maxLine   = 32 << 10 // longer lines are skipped
	maxRanks  = 256
	maxModels = 16
	maxNames  = 256 // adapters
)

// ErrNoEngine is returned for a page that has no metrics of any known engine:
// a wrong path, a server without metrics, or vLLM with --disable-log-stats.
var ErrNoEngine = errors.New("no engine's metrics on the page; check the path, and that the engine's metrics are on")

// ErrTooLarge is returned for a page of more than the allowed bytes.
var ErrTooLarge = errors.New("page too large")

// ErrTooManyRanks is returned for a page that speaks of more than 256 ranks,
// which is no page of one replica.
var ErrTooManyRanks = errors.New("too many ranks on the page")

// Scanner turns a Prometheus page into a Snapshot. It reads the text format
// and OpenMetrics by sample names alone: TYPE and HELP lines differ between
// front ends and say nothing that is needed. Lines it does not understand are
// skipped. It allocates nothing for each line, and is meant to be used again.
// The zero Scanner is ready. It is not safe for concurrent use.
type Scanner struct {
	// MaxBytes is how long a page may be; 0 means DefaultMaxBytes.
	MaxBytes int64

	in     *bufio.Reader
	page   boundedReader
	ranks  []rank
	last   int    // the rank of the line before
	unread []byte // start of the line before, up to its brace, when its name says nothing
	seen   [dialectCount]bool
	start  cell
	models []modelName
	lora   loraRow
	rows   rowSet
}

// modelName is a model_name and the dialect that said it.
type modelName struct {
	dialect int
	name    string
}

// loraRow is the newest lora_requests_info row: vLLM never removes old ones,
// and writes the time as the value.
type loraRow struct {
	seen             bool
	at               float64
	running, waiting []byte
}

// rank is what one KV cache behind the port said.
type rank struct {
	dialect int
	key     uint64
	cells   [fields][spellings]cell
}

// cell collects one field of one rank.
type cell struct {
	value float64
	shard uint32
	state cellState
}

type cellState uint8

const (
	absent cellState = iota
	known
	spoiled // a row of it was unreadable: the sum means nothing
)

// put adds one row to the cell. Of several shards of a rank (tensor and
// pipeline parallel ones say the same) only the lowest counts.
func (c *cell) put(v float64, ok, most bool, shard uint32) {
	state := known
	if !ok {
		state = spoiled
	}
	switch {
	case c.state == absent || shard < c.shard:
		*c = cell{value: v, shard: shard, state: state}
	case shard > c.shard:
	case c.state == spoiled || state == spoiled:
		c.state = spoiled
	case most:
		c.value = max(c.value, v)
	default:
		c.value += v
	}
}

// Scan reads a page to its end. All of into is overwritten, except At. After an
// error into has no facts, apart from StartTime after ErrNoEngine.
func (s *Scanner) Scan(r io.Reader, into *Snapshot) error {
	*into = Snapshot{At: into.At}
	s.reset(r)
	if err := s.read(); err != nil {
		return err
	}
	into.StartTime = s.start.fact()
	d := slices.Index(s.seen[:], true)
	if d < 0 {
		return ErrNoEngine
	}
	s.settle(d, into)
	return nil
}

func (s *Scanner) reset(r io.Reader) {
	limit := s.MaxBytes
	if limit <= 0 {
		limit = DefaultMaxBytes
	}
	s.page = boundedReader{from: r, left: limit, limit: limit}
	if s.in == nil {
		s.in = bufio.NewReaderSize(&s.page, maxLine)
	} else {
		s.in.Reset(&s.page)
	}
	s.ranks = s.ranks[:0]
	s.last = 0
	s.unread = s.unread[:0]
	clear(s.seen[:])
	s.start = cell{}
	s.models = s.models[:0]
	s.lora.seen = false
	s.rows.clear()
}

// read feeds the page to line, line by line.
func (s *Scanner) read() error {
	defer func() { s.page.from = nil }()
	tail := false // within a line too long to be read
	for {
		line, err := s.in.ReadSlice('\n')
		if !tail && err != bufio.ErrBufferFull {
			if err := s.line(line); err != nil {
				return err
			}
		}
		switch err {
		case nil:
			tail = false
		case bufio.ErrBufferFull:
			tail = true
		case io.EOF:
			return nil
		default:
			return err
		}
	}
}

// line reads one line, its end included.
func (s *Scanner) line(line []byte) error {
	if len(line) == 0 || line[0] == '#' {
		return nil
	}
	line = skipBlanks(trimEnd(line))
	if len(line) == 0 {
		return nil
	}
	if line[0] == 'p' {
		s.startTime(line)
		return nil
	}
	// Half of a page are buckets of histograms, in rows of one name.
	if len(s.unread) > 0 && bytes.HasPrefix(line, s.unread) {
		return nil
	}
	d, rest, ok := dialectOf(line)
	if !ok {
		return nil
	}
	// An engine is known by its prefix. Old TensorRT-LLM has none and names that
	// others may use as well, so only its first-token histogram tells it.
	s.seen[d] = s.seen[d] || d != oldTRTLLMDialect || line[0] == 't'
	name, tail := cutName(rest)
	meaning, ok := dialects[d].names[string(name)]
	if !ok || meaning.field == ignored && meaning.label == "" {
		if end := len(line) - len(rest) + len(name); end < len(line) && line[end] == '{' {
			s.unread = append(s.unread[:0], line[:end+1]...)
		}
		return nil
	}
	return s.sample(d, meaning, name, tail)
}

func (s *Scanner) startTime(line []byte) {
	const name = "process_start_time_seconds"
	if !bytes.HasPrefix(line, []byte(name)) {
		return
	}
	found, rest := cutName(line)
	if len(found) != len(name) {
		return
	}
	var l labels
	if rest, ok := l.read(&dialects[vllmDialect], series{}, rest); ok {
		v, ok := cutValue(rest)
		s.start.put(v, ok, true, 0)
	}
}

// labels are the labels of one row that matter here. Byte slices point into
// the line.
type labels struct {
	rank  uint64 // identity of the rank
	shard uint32
	pid   bool
	part  bool // one priority of a row that may also be there as a whole
	model []byte
	pick  []byte // value of the label that picks the field

	blockSize, blocks, tokens, caching []byte // of cacheConfig
	runningAdapters, waitingAdapters   []byte // of loraInfo
}

// read reads the labels at the start of b, if any, and returns what follows.
func (l *labels) read(d *dialect, s series, b []byte) (rest []byte, ok bool) {
	if len(b) == 0 || b[0] != '{' {
		return b, true
	}
	b = b[1:]
	for {
		name, value, rest, ok := nextLabel(b)
		if !ok || name == nil {
			return rest, ok
		}
		l.take(d, s, name, value)
		b = rest
	}
}

func (l *labels) take(d *dialect, s series, name, value []byte) {
	if s.label != "" && string(name) == s.label {
		l.pick = value
		return
	}
	for _, r := range d.ranks {
		if string(name) == r {
			l.rank ^= fingerprint(name, value)
		}
	}
	if string(name) == d.model {
		l.model = value
		return
	}
	switch s.field {
	case cacheConfig:
		l.takeCacheConfig(name, value)
		return
	case loraInfo:
		l.takeAdapters(name, value)
		return
	}
	switch string(name) {
	case "pid":
		l.pid = true
	case "tp_rank":
		l.shard |= shardNumber(value)
	case "pp_rank":
		l.shard |= shardNumber(value) << 16
	case "priority":
		l.part = len(value) > 0
	}
}

func (l *labels) takeCacheConfig(name, value []byte) {
	switch string(name) {
	case "block_size", "page_size":
		l.blockSize = value
	case "num_gpu_blocks", "num_pages":
		l.blocks = value
	case "kv_cache_size_tokens":
		l.tokens = value
	case "enable_prefix_caching":
		l.caching = value
	case "tp_rank":
		l.shard |= shardNumber(value)
	case "pp_rank":
		l.shard |= shardNumber(value) << 16
	}
}

func (l *labels) takeAdapters(name, value []byte) {
	switch string(name) {
	case "running_lora_adapters":
		l.runningAdapters = value
	case "waiting_lora_adapters":
		l.waitingAdapters = value
	}
}

// sample reads a row of a known name, from behind the name.
func (s *Scanner) sample(d int, meaning series, name, rest []byte) error {
	var l labels
	row := rest
	rest, ok := l.read(&dialects[d], meaning, rest)
	if !ok {
		return nil
	}
	row = row[:len(row)-len(rest)]
	f := meaning.field
	if meaning.label != "" {
		if f, ok = meaning.values[string(l.pick)]; !ok {
			return nil
		}
	}
	v, ok := cutValue(rest)
	// No engine writes a row twice. Which of the two would count?
	ok = !s.rows.repeats(xxhash.Sum64(name)^bits.RotateLeft64(xxhash.Sum64(row), 1)) && ok
	if f == loraInfo {
		s.adapters(&l, v, ok)
		return nil
	}
	s.model(d, l.model)
	r := s.rank(d, l.rank)
	if r == nil {
		return ErrTooManyRanks
	}
	if f == cacheConfig {
		r.configure(&l)
		return nil
	}
	if f == kvUsage {
		v, ok = share(v, ok)
	}
	spelling := meaning.spelling
	if l.part && spelling < deprecated {
		spelling += deprecated
	}
	// vLLM 0.11 with several API servers wrote a gauge once for each process
	// (#28792): they mean the same engine, and the largest is the liveliest.
	r.cells[f][spelling].put(v, ok, isMost[f] || l.pid, l.shard)
	return nil
}

// rowSet remembers which rows of known names a page had, as far as it has room:
// the page of one rank has some thirty.
type rowSet struct {
	slots [1 << 10]uint64 // 0 is free
	n     int
}

func (x *rowSet) clear() {
	if x.n > 0 {
		*x = rowSet{}
	}
}

// repeats tells whether a row was there already.
func (x *rowSet) repeats(row uint64) bool {
	row = max(row, 1)
	for i := row % uint64(len(x.slots)); ; i = (i + 1) % uint64(len(x.slots)) {
		switch {
		case x.slots[i] == row:
			return true
		case x.slots[i] != 0:
			continue
		case x.n < len(x.slots)/2:
			x.slots[i] = row
			x.n++
		}
		return false
	}
}

// configure reads vLLM's cache_config_info or SGLang's.
func (r *rank) configure(l *labels) {
	put := func(f field, text []byte) {
		if text != nil {
			v, ok := number(text)
			r.cells[f][deprecated].put(v, ok && v > 0, true, l.shard)
		}
	}
	put(blockTokens, l.blockSize)
	put(capacityBlocks, l.blocks)
	put(capacityTokens, l.tokens)
	switch string(l.caching) {
	case "True":
		r.cells[prefixCaching][current].put(1, true, true, l.shard)
	case "False":
		r.cells[prefixCaching][current].put(0, true, true, l.shard)
	}
}

// share accepts a number of 0 to 1, with room for a rounding error above.
func share(v float64, ok bool) (float64, bool) {
	return min(v, 1), ok && v <= 1+1e-6
}

func (s *Scanner) adapters(l *labels, at float64, ok bool) {
	if !ok || s.lora.seen && at < s.lora.at {
		return
	}
	s.lora.seen, s.lora.at = true, at
	s.lora.running = append(s.lora.running[:0], l.runningAdapters...)
	s.lora.waiting = append(s.lora.waiting[:0], l.waitingAdapters...)
}

func (s *Scanner) model(d int, name []byte) {
	if len(name) == 0 || len(s.models) == maxModels {
		return
	}
	for _, m := range s.models {
		if m.dialect == d && m.name == string(name) {
			return
		}
	}
	s.models = append(s.models, modelName{d, string(name)})
}

// rank finds or adds a rank; it is nil when there are too many.
func (s *Scanner) rank(d int, key uint64) *rank {
	// Rows of one name usually go from rank to rank, in the same order each time.
	for range s.ranks {
		if r := &s.ranks[s.last]; r.key == key && r.dialect == d {
			return r
		}
		s.last = (s.last + 1) % len(s.ranks)
	}
	if len(s.ranks) == maxRanks {
		return nil
	}
	s.last = len(s.ranks)
	s.ranks = append(s.ranks, rank{dialect: d, key: key})
	return &s.ranks[s.last]
}

// fingerprint hashes one label (FNV-1a); those of a row are combined by XOR, so
// that their order does not matter.
func fingerprint(name, value []byte) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range name {
		h = (h ^ uint64(c)) * 1099511628211
	}
	h = (h ^ '=') * 1099511628211
	for _, c := range value {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h
}

// shardNumber reads a tp_rank or pp_rank; what is no number sorts last.
func shardNumber(value []byte) uint32 {
	v, ok := number(value)
	if !ok {
		return math.MaxUint16
	}
	return uint32(min(v, math.MaxUint16))
}

func trimEnd(line []byte) []byte {
	for len(line) > 0 && (line[len(line)-1] == '\n' || line[len(line)-1] == '\r') {
		line = line[:len(line)-1]
	}
	return line
}

// boundedReader ends a page that is too large with an error.
type boundedReader struct {
	from        io.Reader
	left, limit int64
}

func (b *boundedReader) Read(p []byte) (int, error) {
	// One byte more than allowed is asked for, to tell a page of exactly the
	// limit from a longer one.
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.from.Read(p)
	if int64(n) > b.left {
		b.left = 0
		return 0, fmt.Errorf("%w: more than %d bytes", ErrTooLarge, b.limit)
	}
	b.left -= int64(n)
	return n, err
}

// count is how many bytes were read.
func (b *boundedReader) count() int64 {
	return b.limit - b.left
}
