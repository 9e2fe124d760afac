// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/capture"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Capture has one line written for each request: time, lengths, keyed hashes of
// the prompt's blocks, model, the replica chosen and what came of it. It holds
// no text. docs/capture.md tells what it reveals all the same.
//
// The file is written off the request path. Where it cannot be written, lines
// are lost and counted, and requests go on. So a path that cannot be written is
// no error of the config either: it is logged when the config starts, and the
// path may appear later.
type Capture struct {
	// The file to write, with mode 0600. It may have placeholders that are known
	// when the config is loaded. Policies that name the same file share it.
	File string `json:"file,omitempty"`

	// How large the file grows before it is rotated, in bytes, rounded up to
	// whole MiB. At least 1MiB. Default: 100MiB.
	RollSize int64 `json:"roll_size,omitempty"`

	// How many rotated files are kept. Default: 10.
	RollKeep int `json:"roll_keep,omitempty"`
}

func (c *Capture) validate() error {
	switch {
	case c == nil:
		return nil
	case c.File == "":
		return errors.New("capture has no file: name one to write")
	case c.RollSize != 0 && c.RollSize < capture.MinRollSize:
		return fmt.Errorf("capture roll_size is %d bytes, but must be at least 1MiB", c.RollSize)
	case c.RollKeep < 0:
		return fmt.Errorf("capture roll_keep is %d files, but can't be negative", c.RollKeep)
	}
	return nil
}

// unmarshal parses `capture <file> { … }`.
func (c *Capture) unmarshal(d *caddyfile.Dispenser) error {
	if err := parse(d, &c.File, text); err != nil {
		return err
	}
	seen := make(options)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if err := seen.add(d); err != nil {
			return err
		}
		var err error
		switch d.Val() {
		case "roll_size":
			err = parse(d, &c.RollSize, size)
		case "roll_keep":
			err = parse(d, &c.RollKeep, positiveInt)
		default:
			err = d.Errf("unrecognized option '%s'", d.Val())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// captureFiles are those of all configs, by path, so that a file stays open, and
// its secret the same, over a reload.
var captureFiles = caddy.NewUsagePool()

// captureFile is one of them, exported to the metrics while it is in use.
type captureFile struct {
	*capture.File
	unwatch func()
}

// Destruct implements caddy.Destructor.
func (f *captureFile) Destruct() error {
	f.unwatch()
	f.Close()
	return nil
}

// open returns the file to write to, and its key among captureFiles.
func (c *Capture) open() (f *capture.File, key string, err error) {
	if err := c.validate(); err != nil {
		return nil, "", err
	}
	path, err := caddy.NewReplacer().ReplaceOrErr(c.File, true, true)
	if err != nil {
		return nil, "", fmt.Errorf("capture file '%s': %v", c.File, err)
	}
	if key, err = filepath.Abs(path); err != nil {
		return nil, "", fmt.Errorf("capture file '%s': %v", path, err)
	}
	o := capture.Options{RollSize: c.RollSize, RollKeep: c.RollKeep}
	v, loaded, err := captureFiles.LoadOrNew(key, func() (caddy.Destructor, error) {
		f := capture.New(key, o, func() *zap.Logger { return caddy.Log().Named("kv_cache.capture") })
		return &captureFile{f, metrics.WatchCapture(key, func() metrics.CaptureView { return metrics.CaptureView(f.Stats()) })}, nil
	})
	if err != nil {
		return nil, "", err
	}
	f = v.(*captureFile).File
	if loaded {
		f.Configure(o)
	}
	return f, key, nil
}

// report tells the metrics and the capture of a request that has ended. The
// decision's lock is held.
func (c *core) report(d *decision, o outcome, now time.Time) {
	told := d.meter.Tokens()
	first, streamed := d.meter.FirstToken()
	a := d.latest()
	if a != nil && d.reason == "" {
		g := c.group
		if a.reason == ReasonOther {
			g = c.otherGroup
		}
		g.Ended(a.Prompt, a.Hit, a.expected)
		if streamed {
			g.FirstToken(first.Sub(d.arrived))
		}
		if told.Prompt != nil && told.Cached != nil {
			g.Reported(*told.Prompt, *told.Cached, a.Hit)
		}
	}
	if c.captured == nil {
		return
	}
	p := &d.prompt
	r := capture.Record{Chain: p.Chain, Line: capture.Line{
		Micros:       d.arrived.UnixMicro(),
		Model:        p.Model,
		Stream:       p.Stream,
		Bytes:        p.Bytes,
		Extra:        p.Extra,
		Cut:          p.Truncated,
		MaxTokens:    p.MaxTokens,
		Policy:       c.policy,
		Reason:       string(d.reason),
		Attempts:     len(d.attempts),
		Status:       o.status,
		PromptTokens: told.Prompt,
		CachedTokens: told.Cached,
		OutputTokens: told.Output,
	}}
	if d.reason == "" {
		r.API = p.API.String()
	}
	if a != nil {
		r.Replica, r.Reason = a.replica.Addr, string(a.reason)
		r.Prompt, r.Hit, r.WaitedMillis = int(a.Prompt), int(a.Hit), millis(a.waited)
		if a.reason == ReasonOther {
			r.Policy = c.otherName
		}
	}
	if streamed {
		r.TTFTMillis = ref(millis(first.Sub(d.arrived)))
	}
	if o.done {
		r.TotalMillis = ref(millis(now.Sub(d.arrived)))
	}
	c.captured.Write(r)
}

// millis is a duration as it is written down, to the microsecond.
func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func ref[T any](v T) *T { return &v }
