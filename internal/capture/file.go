// SPDX-License-Identifier: Apache-2.0

// Package capture writes down what became of each request, one JSON line a
// request, without any of its text: time, lengths, keyed hashes of the prompt's
// blocks, model, and the replica that was chosen. package trace reads it.
//
// Writing is off the request path. A disk that is slow, full or not there costs
// lines, which are counted, and never a request's time.
package capture

import (
	"bytes"
	"encoding/json"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/DeRuina/timberjack"
	"go.uber.org/zap"
)

const (
	// DefaultRollSize is how large a file grows before it is rotated, in bytes.
	DefaultRollSize = 100 << 20
	// DefaultRollKeep is how many rotated files are kept.
	DefaultRollKeep = 10
	// MinRollSize is the least that RollSize can be: several of the longest lines.
	MinRollSize = 1 << 20

	// What waits to be written is bounded in lines and in block hashes.
	queueLines  = 4096
	queueBlocks = 1 << 20

	// closeWithin is how long Close waits for what is queued: long enough for
	// any disk that works, short enough for a reload.
	closeWithin = 2 * time.Second
	// logEvery is the least time between two log entries of failed writes.
	logEvery = 10 * time.Minute
)

// Options say how a file is rotated.
type Options struct {
	// RollSize is how large the file grows before it is rotated, in bytes.
	// Default: DefaultRollSize. Rounded up to whole MiB.
	RollSize int64
	// RollKeep is how many rotated files are kept. Default: DefaultRollKeep.
	RollKeep int
}

// Record is a line to be written, with the chain of block hashes in place of
// Line.Blocks. The chain must not change any more.
type Record struct {
	Line
	Chain []uint64
}

// Stats counts lines since the file was opened.
type Stats struct {
	// Written is how many are in the file. Full is how many were dropped
	// because too many waited, Failed how many could not be written.
	Written, Full, Failed uint64
}

// File is a capture file that is being written. Its methods may be called by
// any goroutine, and none of them waits for the disk but Close.
type File struct {
	path   string
	logger func() *zap.Logger
	secret *secret

	options atomic.Pointer[Options]
	queue   chan Record
	blocks  atomic.Int64 // in queue
	begin   sync.Once
	stop    chan struct{}
	ended   chan struct{}
	closed  atomic.Bool

	written, full, failed atomic.Uint64

	// Of the writing goroutine.
	applied *Options
	out     *timberjack.Logger
	buf     bytes.Buffer
	torn    bool // the file's last line lacks its end
	failing bool
	logged  time.Time
}

// New returns the capture file at path. Nothing is opened before Start or the
// first Write. logger gives the logger to use at the moment.
func New(path string, o Options, logger func() *zap.Logger) *File {
	f := &File{
		path: path, logger: logger, secret: newSecret(),
		queue: make(chan Record, queueLines),
		stop:  make(chan struct{}), ended: make(chan struct{}),
	}
	f.Configure(o)
	return f
}

// Configure changes the options from the next line on.
func (f *File) Configure(o Options) {
	if o.RollSize <= 0 {
		o.RollSize = DefaultRollSize
	}
	if o.RollKeep <= 0 {
		o.RollKeep = DefaultRollKeep
	}
	if old := f.options.Load(); old == nil || *old != o {
		f.options.Store(&o)
	}
}

// Start opens the file ahead of the first line, so that one that cannot be
// written is logged at once.
func (f *File) Start() {
	f.begin.Do(func() { go f.run() })
}

// Write queues a line. It never waits: where too many are queued already, the
// line is dropped and counted.
func (f *File) Write(r Record) {
	if f.closed.Load() {
		return
	}
	f.Start()
	n := int64(len(r.Chain))
	if f.blocks.Add(n) > queueBlocks {
		f.blocks.Add(-n)
		f.full.Add(1)
		return
	}
	select {
	case f.queue <- r:
	default:
		f.blocks.Add(-n)
		f.full.Add(1)
	}
}

// Stats tells how many lines were written and dropped.
func (f *File) Stats() Stats {
	return Stats{Written: f.written.Load(), Full: f.full.Load(), Failed: f.failed.Load()}
}

// Close writes what is queued and closes the file. Where the disk hangs, it
// gives up waiting after two seconds.
func (f *File) Close() {
	if f.closed.Swap(true) {
		return
	}
	f.begin.Do(func() { close(f.ended) }) // there is nothing to end
	close(f.stop)
	timeout := time.NewTimer(closeWithin)
	defer timeout.Stop()
	select {
	case <-f.ended:
	case <-timeout.C:
	}
}

// Destruct implements caddy.Destructor.
func (f *File) Destruct() error {
	f.Close()
	return nil
}

func (f *File) run() {
	defer close(f.ended)
	defer func() {
		if f.out != nil {
			_ = f.out.Close() // each line was handed to the system already
		}
	}()
	if err := f.open(); err != nil {
		f.failure(err)
	}
	for {
		select {
		case r := <-f.queue:
			f.take(r)
		case <-f.stop:
			for {
				select {
				case r := <-f.queue:
					f.take(r)
				default:
					return
				}
			}
		}
	}
}

// open tells whether the file can be written, which makes it if it is not
// there, and whether someone stopped writing it in the middle of a line.
func (f *File) open() error {
	f.configured()
	if _, err := f.out.Write(nil); err != nil {
		return err
	}
	file, err := os.Open(f.path)
	if err != nil {
		return nil // it can be written, which is enough
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		var last [1]byte
		_, err := file.ReadAt(last[:], info.Size()-1)
		f.torn = err == nil && last[0] != '\n'
	}
	return nil
}

// configured makes the rotation follow the options.
func (f *File) configured() {
	o := f.options.Load()
	if o == f.applied {
		return
	}
	if f.out != nil {
		_ = f.out.Close()
	}
	const mega = 1 << 20
	f.applied = o
	f.out = &timberjack.Logger{
		Filename:   f.path,
		MaxSize:    int((o.RollSize + mega - 1) / mega),
		MaxBackups: o.RollKeep,
		FileMode:   0o600,
		// Hashes do not compress, and readers want plain lines.
		Compression: "none",
	}
}

func (f *File) take(r Record) {
	f.blocks.Add(-int64(len(r.Chain)))
	f.configured()
	f.buf.Reset()
	if f.torn {
		f.buf.WriteByte('\n')
	}
	r.Version, r.Salt, r.Blocks = Version, f.secret.name, f.secret.blocks(r.Chain)
	e := json.NewEncoder(&f.buf)
	e.SetEscapeHTML(false)
	if err := e.Encode(&r.Line); err != nil {
		f.failure(err)
		f.failed.Add(1)
		return
	}
	n, err := f.out.Write(f.buf.Bytes())
	if err != nil {
		f.torn = f.torn || n > 0
		f.failed.Add(1)
		f.failure(err)
		return
	}
	f.torn = false
	f.written.Add(1)
	if f.failing {
		f.failing = false
		f.logger().Info("the capture file can be written again", zap.String("file", f.path), zap.Uint64("lost_lines", f.failed.Load()))
	}
}

// failure logs that writing fails, once for as long as it does.
func (f *File) failure(err error) {
	if now := time.Now(); !f.failing && now.Sub(f.logged) >= logEvery {
		f.logged = now
		f.logger().Error("the capture file can't be written; requests are not concerned", zap.String("file", f.path), zap.Error(err))
	}
	f.failing = true
}
