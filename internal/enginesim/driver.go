// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"sync"
	"time"
)

// minPause is the least wall time between two timed wake-ups of a driver. Steps
// that end in between are completed together at their exact engine times, so a
// fast clock costs no more wake-ups than this and loses no precision.
const minPause = time.Millisecond

// driver runs an engine on a clock. One goroutine completes steps when they are
// due; handlers take the mutex to submit and abort.
type driver struct {
	mu     sync.Mutex
	engine *Engine
	clock  clock
	meters *meters
	dirty  []*generation // have news since the last flush

	wake chan struct{} // the time of the next step has changed
	quit chan struct{}
	done chan struct{}
}

func startDriver(config Config, speed float64, started time.Time, events EventSink) *driver {
	d := &driver{
		engine: New(config),
		clock:  clock{speed: speed, origin: started},
		meters: newMeters(config.withDefaults().MaxModelTokens, speed),
		wake:   make(chan struct{}, 1),
		quit:   make(chan struct{}),
		done:   make(chan struct{}),
	}
	d.engine.OnStep = d.meters.observeStep
	if events != nil {
		n := narrate(d.engine, events)
		d.engine.OnStep = func(s Step) {
			d.meters.observeStep(s)
			n.publish()
		}
	}
	go d.run()
	return d
}

// close stops the driver's goroutine and waits for it.
func (d *driver) close() {
	close(d.quit)
	<-d.done
}

func (d *driver) run() {
	defer close(d.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var woke time.Time
	for {
		wait, busy := d.advance()
		if busy {
			timer.Reset(max(wait, minPause-time.Since(woke)))
		} else {
			timer.Stop()
		}
		select {
		case <-timer.C:
			woke = time.Now()
		case <-d.wake:
		case <-d.quit:
			return
		}
	}
}

// advance completes the steps that are due and returns the wall time until the
// next one ends; false means that there is none, or that the clock stands still.
func (d *driver) advance() (time.Duration, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.engine.Advance(d.clock.now())
	d.flush()
	end, busy := d.engine.Next()
	return d.clock.until(end), busy && !d.clock.stopped
}

// submit hands all sequences of a generation to the engine, or none.
func (d *driver) submit(g *generation) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.flush()
	now := d.clock.now()
	_, busy := d.engine.Next()
	for i, r := range g.requests {
		err := d.engine.Submit(now, r)
		if err == nil {
			continue
		}
		for _, accepted := range g.requests[:i] {
			d.engine.Abort(now, accepted)
		}
		return err
	}
	if !busy {
		d.kick()
	}
	return nil
}

// abort ends all sequences of a generation that are not finished.
func (d *driver) abort(g *generation) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.clock.now()
	for _, r := range g.requests {
		d.engine.Abort(now, r)
	}
	d.flush()
}

// resetCache clears the prefix cache, if no sequence is running.
func (d *driver) resetCache() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	ok := d.engine.Reset(d.clock.now())
	d.flush()
	return ok
}

// stats returns the figures published by the last step.
func (d *driver) stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.engine.Advance(d.clock.now())
	d.flush()
	return d.engine.Stats()
}

// stop halts the engine's clock, start lets it go on from where it stood.
func (d *driver) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock.stop()
}

func (d *driver) start() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock.start()
	d.kick()
}

func (d *driver) kick() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// mark notes that a generation has news. The mutex is held.
func (d *driver) mark(g *generation) {
	if !g.dirty {
		g.dirty = true
		d.dirty = append(d.dirty, g)
	}
}

// flush tells the handlers of all marked generations their news, once for however
// many steps were completed. The mutex is held.
func (d *driver) flush() {
	for _, g := range d.dirty {
		g.dirty = false
		g.publish()
	}
	clear(d.dirty)
	d.dirty = d.dirty[:0]
}
