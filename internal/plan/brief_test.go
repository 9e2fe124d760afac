// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"sync"
	"testing"
	"time"
)

// One at a time, however many want it and however long it is held.
func TestBrief(t *testing.T) {
	var (
		lock    brief
		counted int
		all     sync.WaitGroup
	)
	for range 8 {
		all.Go(func() {
			for i := range 500 {
				lock.Lock()
				counted++
				if i%100 == 0 { // for longer than anyone looks again
					time.Sleep(time.Millisecond)
				}
				lock.Unlock()
			}
		})
	}
	all.Wait()
	if counted != 8*500 {
		t.Errorf("counted to %d, want %d", counted, 8*500)
	}
}
