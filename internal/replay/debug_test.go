package replay

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

type spy struct {
	*Aware
	sent [][]*Request
}

func (s *spy) Scraped(now time.Duration, i int, st enginesim.Stats) {
	if now < 320*time.Second && now.Milliseconds()%5000 == 0 {
		n, tok := 0, 0
		for r := range s.booked {
			if r.Replica == i && (r.engine.FirstToken == 0) {
				n++
				tok += r.PromptTokens - r.engine.Cached
			}
		}
		before := s.replicas[i].Load(epoch.Add(now))
		s.Aware.Scraped(now, i, st)
		l := s.replicas[i].Load(epoch.Add(now))
		fmt.Printf("%6.1f %d true m=%d tok=%d | run %d wait %d | belief %.0f -> %.0f rate %.0f known %v inflight %.0f room %d avoid %v held %d hit %.3f\n", now.Seconds(), i, n, tok, st.Running, st.Waiting, before.Queue, l.Queue, l.Rate, l.QueueKnown, l.InFlight, l.Room, l.Avoid, s.schedule.Waiting(), l.Trust)
		return
	}
	s.Aware.Scraped(now, i, st)
}

func TestDebug(t *testing.T) {
	tr, err := trace.Open(os.Getenv("TRACE"))
	if err != nil {
		t.Skip(err)
	}
	setup := Setup{Scrape: time.Second, Rate: 1}
	for range 6 {
		setup.Engines = append(setup.Engines, enginesim.Config{Blocks: 30000})
	}
	out, err := Run(setup, &spy{Aware: &Aware{Rule: plan.Default, Terms: plan.DefaultTerms}}, tr.Requests(), nil)
	s := Summarize(out, 6)
	fmt.Println(s, err)
}
