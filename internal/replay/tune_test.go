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

func TestTune(t *testing.T) {
	tr, err := trace.Open(os.Getenv("TRACE"))
	if err != nil {
		t.Skip(err)
	}
	type variant struct {
		name string
		p    func() Policy
	}
	base := func(f func(*Aware)) func() Policy {
		return func() Policy {
			a := &Aware{Rule: plan.Default, Terms: plan.DefaultTerms}
			f(a)
			return a
		}
	}
	vs := []variant{
		{"least_conn", LeastConn},
		{"on arrival", base(func(a *Aware) { a.Terms = plan.BindOnArrival })},
		{"planned", base(func(a *Aware) {})},
		{"room 0.3", base(func(a *Aware) { a.Terms.Room = 300 * time.Millisecond })},
		{"age 1000", base(func(a *Aware) { a.Terms.Age = 1000 })},
		{"age 50", base(func(a *Aware) { a.Terms.Age = 50 })},
		{"slip 2", base(func(a *Aware) { a.Terms.Slip = 2 })},
		{"mw 2", base(func(a *Aware) { a.Rule.MatchWeight = 2 })},
		{"per 1000", base(func(a *Aware) { a.Rule.PerRequest = 1000 })},
		{"per 250", base(func(a *Aware) { a.Rule.PerRequest = 250 })},
	}
	for _, rate := range []float64{1, 1.3, 1.6} {
		setup := Setup{Scrape: time.Second, Rate: rate}
		for range 6 {
			setup.Engines = append(setup.Engines, enginesim.Config{Blocks: 30000})
		}
		for _, c := range vs {
			start := time.Now()
			out, err := Run(setup, c.p(), tr.Requests(), nil)
			if err != nil {
				t.Fatal(err)
			}
			s := Summarize(out, 6)
			fmt.Printf("%.2f %-14s hit %.3f ttft %.2f p50 %.2f p90 %.2f p99 %.2f e2e %.1f busy %.2f waited %.2f  (%.1fs)\n", rate, c.name, s.HitRate, s.Mean, s.P50, s.P90, s.P99, s.Total, s.Busiest, s.Waited, time.Since(start).Seconds())
		}
	}
}
