// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

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
	if d.Simulated() {
		fmt.Fprintf(p, "%d simulated replicas of %d KV cache tokens, on a clock %g times as fast:\n",
			len(d.Replicas()), d.CacheTokens(), d.Speed())
	} else {
		fmt.Fprintf(p, "%d real servers, model %s:\n", len(d.Replicas()), d.Model())
	}
	p.wrap("  ", d.Replicas())
	fmt.Fprintf(p, "Caddy takes requests at %s%s%s and plays %d per policy.\n", p.bold, d.URL(), p.plain, d.Requests())
	if !d.Simulated() {
		fmt.Fprintln(p, "Prompts begin with random characters, others for each policy, so that no run")
		fmt.Fprintln(p, "finds what another left in the caches.")
	}
	fmt.Fprintln(p)
}

// wrap writes words in lines of at most width characters.
func (p *printer) wrap(indent string, words []string) {
	line := indent
	for i, word := range words {
		if i > 0 && len(line)+1+len(word) > width {
			fmt.Fprintln(p, line)
			line = indent
		}
		if line != indent {
			line += " "
		}
		line += word
	}
	fmt.Fprintln(p, line)
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
	best := slices.MinFunc(outcomes, func(a, b demo.Outcome) int { return compare(a.TTFT.Mean, b.TTFT.Mean) })
	fmt.Fprintf(p, `Hit rate is the share of prompt tokens that replicas had in their KV cache. What
they had not is computed before the first token (TTFT, in seconds; mean × is
against %s). Spread is the busiest replica's computing over a fair share:
1.00 is even.
`, base.Policy)
	if best.Policy != base.Policy && best.TTFT.Mean > 0 {
		fmt.Fprintf(p, "%sLook at the TTFT: with %s it is %s that of %s.%s\n",
			p.bold, best.Policy, times(best.TTFT.Mean, base.TTFT.Mean), base.Policy, p.plain)
	}
}

// warn tells of all that makes results doubtful.
func (p *printer) warn(outcomes []demo.Outcome) {
	for _, o := range outcomes {
		if failed := o.Measured - o.Succeeded; failed > 0 {
			fmt.Fprintf(p, "Warning: %s: %d of %d requests failed: %s.\n", o.Policy, failed, o.Measured, kinds(o.Failures))
		}
		if o.CachedReported == 0 && o.Succeeded > 0 {
			fmt.Fprintf(p, "Warning: %s: the servers did not tell hits (vLLM: --enable-prompt-tokens-details).\n", o.Policy)
		}
		if o.Lag.P90 > 0.1*o.TTFT.Mean && o.Lag.P90 > 0.01 {
			fmt.Fprintf(p, "Warning: %s: this machine sent requests late (p90 %ss); use a lower --speed.\n", o.Policy, seconds(o.Lag.P90))
		}
		if o.HeldRequests > 0 {
			fmt.Fprintf(p, "Warning: %s: %d requests waited, as too many were under way.\n", o.Policy, o.HeldRequests)
		}
	}
}

// invite tells how to go on by hand.
func (p *printer) invite(d *demo.Demo, policy demo.Policy) {
	fmt.Fprintf(p, `
Caddy keeps serving with %s%s%s. Send a request of your own, twice, and see
X-Replica, X-Reason and usage.prompt_tokens_details.cached_tokens:

  curl -i %s/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": %q, "max_tokens": 16, "messages":
         [{"role": "user", "content": "A long prompt, of 64 characters or more, is worth a cache hit."}]}'

Metrics of Caddy:    curl %s/metrics
Metrics of a replica: curl http://%s/metrics
Press Ctrl-C to end.
`, p.bold, policy.Name, p.plain, d.URL(), d.Model(), d.AdminURL(), d.Replicas()[0])
}

func hitRate(o demo.Outcome) string {
	if o.CachedReported == 0 && o.Succeeded > 0 {
		return "unknown"
	}
	return fmt.Sprintf("%.1f%%", 100*o.HitRate)
}

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

func compare(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// kinds lists counts by kind, the most frequent first.
func kinds(counts map[string]int) string {
	var names []string
	for name := range counts {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
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
