// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// leased are metrics whose label sets come and go together, and the counts of who
// uses them: when a config is replaced, the new one takes them before the old one
// lets go, so that they go on.
type leased struct {
	by      []string // the labels whose values belong to one user
	vectors []vector

	mu    sync.Mutex
	users map[string]int // by the values
}

type vector interface {
	prometheus.Collector
	DeletePartialMatch(prometheus.Labels) int
}

// take keeps the label sets with these values until they are released as often.
func (l *leased) take(values ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users == nil {
		l.users = make(map[string]int)
	}
	l.users[strings.Join(values, "\x00")]++
}

// release removes the label sets with these values when nobody uses them any more.
func (l *leased) release(values ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := strings.Join(values, "\x00")
	if l.users[key]--; l.users[key] > 0 {
		return
	}
	delete(l.users, key)
	labels := make(prometheus.Labels, len(values))
	for i, v := range values {
		labels[l.by[i]] = v
	}
	for _, v := range l.vectors {
		v.DeletePartialMatch(labels)
	}
}
