// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"runtime"
	"sync"
)

// brief is a lock that is held for microseconds. A plain one parks who finds it
// taken after a few of them, and then its processor, if there is nothing else to
// do; to wake both takes longer than the lock is held, and two callers on two
// processors get no more done than one. Who finds this one taken first lets
// others run, some times, and looks again.
type brief struct{ sync.Mutex }

// yields is how often that is: where nobody else wants to run, for longer than
// a choice takes.
const yields = 64

// Lock hides that of sync.Mutex.
func (b *brief) Lock() {
	for range yields {
		if b.TryLock() {
			return
		}
		runtime.Gosched()
	}
	b.Mutex.Lock()
}
