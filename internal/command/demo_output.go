// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/demo"
)

// width is what fits a terminal that nobody made wider.
const width = 80

// printer writes what a person reads.
type printer struct {
	io.Writer
	bold, plain string // switch bold text on and off
}

func newPrinter(out io.Writer) *printer {
	p := &printer{Writer: out}
	if isTerminal(out) && os.Getenv("NO_COLOR") == "" {
		p.bold, p.plain = "\x1b[1m", "\x1b[0m"
	}
	return p
}

func isTerminal(w io.Writer) bool {
	f, isFile := w.(*os.File)
	return isFile && term.IsTerminal(int(f.Fd()))
}

// introduce says what runs where.
func (p *printer) introduce(d *demo.Demo) {
	replicas := strings.Join(d.Replicas(), " ")
	if d.Simulated() {
		p.say("%d simulated replicas with a KV cache of %d tokens each, played at %g times their speed: %s",
			len(d.Replicas()), d.CacheTokens(), d.Speed(), replicas)
	} else {
		p.say("%d real servers, model %s: %s", len(d.Replicas()), d.Model(), replicas)
		p.say("Prompts begin with random characters, others for each policy, so that no run finds what another left in the caches.")
	}
	p.stress("Caddy takes requests at %s", d.URL())
	p.say("and shows what the policies do at %s", d.URL()+demo.PagePath)
	p.say("Each policy gets the same %d requests.", d.Requests())
	fmt.Fprintln(p)
}

// say writes text in lines of at most width characters.
func (p *printer) say(format string, args ...any) {
	line := 0
	for i, word := range strings.Fields(fmt.Sprintf(format, args...)) {
		n := utf8.RuneCountInString(word)
		switch {
		case i > 0 && line+1+n > width:
			fmt.Fprintln(p)
			line = 0
		case i > 0:
			fmt.Fprint(p, " ")
			line++
		}
		fmt.Fprint(p, word)
		line += n
	}
	fmt.Fprintln(p)
}

// stress is say in bold.
func (p *printer) stress(format string, args ...any) {
	fmt.Fprint(p, p.bold)
	defer fmt.Fprint(p, p.plain)
	p.say(format, args...)
}

// table compares policies, against the first of them.
func (p *printer) table(outcomes []demo.Outcome) {
	const format = "%-18s %8s %10s %7s %7s %7s %7s %8s\n"
	base := outcomes[baseOf(outcomes)]
	fmt.Fprint(p, p.bold)
	fmt.Fprintf(p, format, "policy", "hit rate", "TTFT mean", "p50", "p90", "p99", "spread", "mean ×")
	fmt.Fprint(p, p.plain)
	for _, o := range outcomes {
		fmt.Fprintf(p, format, short(o.Policy, 18), hitRate(o),
			seconds(o.TTFT.Mean), seconds(o.TTFT.P50), seconds(o.TTFT.P90), seconds(o.TTFT.P99),
			fmt.Sprintf("%.2f", o.UncachedSpread), times(o.TTFT.Mean, base.TTFT.Mean))
	}
	fmt.Fprintln(p)
	p.explain(outcomes, base)
	p.warn(outcomes)
}

// baseOf is the place of the outcome that the others are compared with.
func baseOf(outcomes []demo.Outcome) int {
	return max(0, slices.IndexFunc(outcomes, func(o demo.Outcome) bool { return o.Policy == "round_robin" }))
}

// explain says what to look at.
func (p *printer) explain(outcomes []demo.Outcome, base demo.Outcome) {
	p.say(`Hit rate is the share of prompt tokens that replicas had in their KV cache. What they had not is
		computed before the first token (TTFT, in seconds; mean × is against %s). Spread is the busiest
		replica's computing over a fair share: 1.00 is even.`, base.Policy)
	if limit := base.OneCacheHitRate; limit > 0 {
		p.say("One cache as large as those of all replicas together would have a hit rate of about %.1f%%.", 100*limit)
	}
	best := slices.MinFunc(outcomes, func(a, b demo.Outcome) int { return cmp.Compare(a.TTFT.Mean, b.TTFT.Mean) })
	if best.Policy != base.Policy && best.TTFT.Mean > 0 {
		p.stress("Look at the TTFT: with %s it is %s that of %s.", best.Policy, times(best.TTFT.Mean, base.TTFT.Mean), base.Policy)
	}
}

// warn tells of all that makes results doubtful.
func (p *printer) warn(outcomes []demo.Outcome) {
	for _, o := range outcomes {
		if failed := o.Measured - o.Succeeded; failed > 0 {
			p.say("Warning: %s: %d of %d requests failed: %s.", o.Policy, failed, o.Measured, kinds(o.Failures))
		}
		if hitsUnknown(o) {
			p.say("Warning: %s: the servers did not tell hits; start vLLM with --enable-prompt-tokens-details.", o.Policy)
		}
		if o.Lag.P90 > max(0.01, 0.2*o.TTFT.Mean) {
			p.say("Warning: %s: this machine sent requests late (p90 %s s), which counts as TTFT; use a lower --speed.", o.Policy, seconds(o.Lag.P90))
		}
		if o.HeldRequests > 0 {
			p.say("Warning: %s: %d requests waited to be sent, as too many were under way.", o.Policy, o.HeldRequests)
		}
	}
}

// invite tells how to go on by hand.
func (p *printer) invite(d *demo.Demo, policy demo.Policy) {
	fmt.Fprintf(p, `
Caddy keeps serving with %[1]s%[2]s%[3]s. Send a request of your own, twice, and
look at X-Replica, X-Reason and cached_tokens:

  curl -si %[4]s/v1/chat/completions --json '{"model": %[5]q,
    "max_tokens": 8, "messages": [{"role": "user",
    "content": "'"$(seq -s ' ' 500)"'"}]}'

Live page:            %[4]s%[8]s
Metrics of Caddy:     %[6]s/metrics
Metrics of a replica: http://%[7]s/metrics
Press Ctrl-C to end.
`, p.bold, policy.Name, p.plain, d.URL(), d.Model(), d.AdminURL(), d.Replicas()[0], demo.PagePath)
}

func hitRate(o demo.Outcome) string {
	if hitsUnknown(o) {
		return "unknown"
	}
	return fmt.Sprintf("%.1f%%", 100*o.HitRate)
}

// hitsUnknown tells whether no answer stated cached tokens.
func hitsUnknown(o demo.Outcome) bool { return o.CachedReported == 0 && o.Succeeded > 0 }

// seconds has three digits where there are any to tell.
func seconds(s float64) string {
	switch {
	case s >= 100:
		return fmt.Sprintf("%.0f", s)
	case s >= 10:
		return fmt.Sprintf("%.1f", s)
	case s >= 1:
		return fmt.Sprintf("%.2f", s)
	}
	return fmt.Sprintf("%.3f", s)
}

func times(v, base float64) string {
	if base == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f×", v/base)
}

// kinds lists counts by kind, the most frequent first.
func kinds(counts map[string]int) string {
	var names []string
	for name := range counts {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%d %s", counts[name], name)
	}
	return strings.Join(names, ", ")
}

// short cuts text to so many characters.
func short(text string, most int) string {
	letters := []rune(text)
	if len(letters) <= most {
		return text
	}
	return string(letters[:most-1]) + "…"
}

// bar shows how far a run is, on a terminal only.
type bar struct{ *progressbar.ProgressBar }

func newBar(w io.Writer, name string, total int) bar {
	if !isTerminal(w) {
		return bar{}
	}
	return bar{progressbar.NewOptions(total,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetDescription(fmt.Sprintf("%-18s", short(name, 18))),
		progressbar.OptionSetWidth(30),
		progressbar.OptionShowCount(),
		progressbar.OptionClearOnFinish(),
	)}
}

func (b bar) progress(done, _ int) {
	if b.ProgressBar != nil {
		_ = b.Set(done) // a terminal that is gone is no reason to stop
	}
}

func (b bar) finish() {
	if b.ProgressBar != nil {
		_ = b.Finish()
	}
}
