// SPDX-License-Identifier: Apache-2.0

package enginesim

import "time"

// clock maps the wall clock to an engine's time, which may run faster and may be
// stopped. It is guarded by its driver's mutex.
type clock struct {
	speed   float64
	base    time.Duration // engine time at origin
	origin  time.Time
	stopped bool
}

func (c *clock) now() time.Duration {
	if c.stopped {
		return c.base
	}
	return c.base + time.Duration(float64(time.Since(c.origin))*c.speed)
}

// until returns the wall time left before the given engine time.
func (c *clock) until(t time.Duration) time.Duration {
	return time.Duration(float64(t-c.now()) / c.speed)
}

func (c *clock) stop() {
	c.base, c.stopped = c.now(), true
}

func (c *clock) start() {
	if c.stopped {
		c.origin, c.stopped = time.Now(), false
	}
}
