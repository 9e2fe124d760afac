// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
)

// Study plays the same traffic for several policies and seeds.
type Study struct {
	Setup      Setup
	Traffic    *Traffic
	Contenders []Contender
	// Seeds is how many runs each policy gets, with Setup.Seed and those after it.
	Seeds int
	// Parallel is how many runs go on at once. Default: one for each processor.
	Parallel int
	// Progress, if not nil, is called now and then with the requests that are
	// done and how many there are. Calls may overlap.
	Progress func(done, all int)
}

// Result is what a policy made of the traffic.
type Result struct {
	Policy string `json:"policy"`
	About  string `json:"about"`
	Ours   bool   `json:"ours"`
	Oracle bool   `json:"oracle"`
	// Mean is the mean over the seeds, Spread the standard deviation between
	// them, 0 for one seed.
	Mean   Summary `json:"mean"`
	Spread Summary `json:"spread"`
	// Runs has a summary for each seed, and Detail more of the first.
	Runs   []Summary `json:"runs"`
	Detail Detail    `json:"detail"`
}

// Run plays everything and returns a result for each contender, in their order.
func (s Study) Run(ctx context.Context) ([]Result, error) {
	s.Seeds = max(1, s.Seeds)
	if s.Parallel <= 0 {
		s.Parallel = runtime.GOMAXPROCS(0)
	}
	results := make([]Result, len(s.Contenders))
	for i, c := range s.Contenders {
		results[i] = Result{Policy: c.Name, About: c.About, Ours: c.Ours, Oracle: c.Oracle, Runs: make([]Summary, s.Seeds)}
	}
	all := len(s.Contenders) * s.Seeds * s.Traffic.Count() * max(1, s.Setup.Copies)
	var done atomic.Int64
	step := int64(max(1, all/1000))
	tick := func() {
		if n := done.Add(1); s.Progress != nil && (n%step == 0 || n == int64(all)) {
			s.Progress(int(n), all)
		}
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	free := make(chan struct{}, s.Parallel)
	for seed := range s.Seeds {
		for i, c := range s.Contenders {
			free <- struct{}{}
			if ctx.Err() != nil {
				<-free
				continue
			}
			wg.Go(func() {
				defer func() { <-free }()
				setup := s.Setup
				setup.Seed += uint64(seed)
				out, err := run(setup, setup.behind(c), s.Traffic, tick)
				if err != nil {
					stop(fmt.Errorf("%s: %w", c.Name, err))
					return
				}
				results[i].Runs[seed] = Summarize(out, len(setup.Engines))
				if seed == 0 {
					results[i].Detail = detail(out, len(setup.Engines))
				}
			})
		}
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	for i := range results {
		results[i].sumUp()
	}
	return results, nil
}

// sumUp works out mean and spread over the seeds.
func (r *Result) sumUp() {
	n := float64(len(r.Runs))
	r.Mean, r.Spread = r.Runs[0], Summary{}
	mean, spread := r.Mean.figures(), r.Spread.figures()
	for f := range mean {
		sum, square := 0.0, 0.0
		for i := range r.Runs {
			v := *r.Runs[i].figures()[f]
			sum += v
			square += v * v
		}
		*mean[f] = sum / n
		if n > 1 {
			*spread[f] = math.Sqrt(max(0, (square-sum*sum/n)/(n-1)))
		}
	}
	r.Mean.Failed, r.Mean.Retries = 0, 0
	for _, run := range r.Runs {
		r.Mean.Failed += run.Failed
		r.Mean.Retries += run.Retries
	}
}

// Verdict says whether a difference means anything.
type Verdict int

const (
	// Unknown: there was one seed.
	Unknown Verdict = iota
	// Noise: the difference could be chance.
	Noise
	// Lower and Higher: a is below or above b by more than chance explains.
	Lower
	Higher
)

// Compare tells whether a figure of a is below or above that of b, by a paired
// t-test over the seeds at 95 %. Both must come from one study.
func Compare(a, b *Result, figure func(*Summary) float64) Verdict {
	n := min(len(a.Runs), len(b.Runs))
	if n < 2 {
		return Unknown
	}
	sum, square := 0.0, 0.0
	for i := range n {
		d := figure(&a.Runs[i]) - figure(&b.Runs[i])
		sum += d
		square += d * d
	}
	mean := sum / float64(n)
	variance := max(0, (square-sum*mean)/float64(n-1))
	switch bound := student(n-1) * math.Sqrt(variance/float64(n)); {
	case mean < -bound:
		return Lower
	case mean > bound:
		return Higher
	}
	return Noise
}

// student is the two-sided 95 % quantile of Student's t with so many degrees of
// freedom.
func student(freedom int) float64 {
	table := [...]float64{12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23}
	if freedom <= len(table) {
		return table[freedom-1]
	}
	return 1.96 + 2.5/float64(freedom)
}
