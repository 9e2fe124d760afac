// SPDX-License-Identifier: Apache-2.0

package replay

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
)

// Report is a page about a study.
type Report struct {
	// Title, Command and Facts say what was played and how to do it again.
	Title, Command string
	Facts          []string
	Seeds          int
	Results        []Result
}

//go:embed report.html
var reportPage string

var reportTemplate = template.Must(template.New("report").Parse(reportPage))

// Write writes the report as one page of HTML that loads nothing.
func (r *Report) Write(w io.Writer) error {
	if len(r.Results) == 0 {
		return fmt.Errorf("no result to report")
	}
	return reportTemplate.Execute(w, r)
}

// Rows are the lines of the report's table.
func (r *Report) Rows() []Row { return Rows(r.Results) }

// Row is a line of a table, as text.
type Row struct {
	Policy, About string
	Ours, Oracle  bool
	HitRate       string
	Mean, P50     string
	P90, P99      string
	Total, Held   string
	Busiest       string
	Failed        int
	// Against compares the mean TTFT with the best of the rules that are not
	// ours: "0.53×", "0.98× (noise)", or "" for that rule itself.
	Against string
}

// Rows puts results into words.
func Rows(results []Result) []Row {
	base := bestOther(results)
	rows := make([]Row, len(results))
	for i := range results {
		x := &results[i]
		rows[i] = Row{
			Policy: x.Policy, About: x.About, Ours: x.Ours, Oracle: x.Oracle, Failed: x.Mean.Failed,
			HitRate: spread(100*x.Mean.HitRate, 100*x.Spread.HitRate, "%.1f"),
			Mean:    seconds(x.Mean.Mean, x.Spread.Mean), P50: seconds(x.Mean.P50, x.Spread.P50),
			P90: seconds(x.Mean.P90, x.Spread.P90), P99: seconds(x.Mean.P99, x.Spread.P99),
			Total: seconds(x.Mean.Total, x.Spread.Total), Held: seconds(x.Mean.Held, 0),
			Busiest: fmt.Sprintf("%.2f", x.Mean.Busiest),
		}
		if base != nil && base != x && base.Mean.Mean > 0 {
			rows[i].Against = fmt.Sprintf("%.2f×", x.Mean.Mean/base.Mean.Mean)
			if Compare(x, base, func(s *Summary) float64 { return s.Mean }) == Noise {
				rows[i].Against += " (noise)"
			}
		}
	}
	return rows
}

// bestOther is the result with the lowest mean TTFT of the rules that are
// neither ours nor see everything.
func bestOther(results []Result) *Result {
	var best *Result
	for i := range results {
		if r := &results[i]; !r.Ours && !r.Oracle && (best == nil || r.Mean.Mean < best.Mean.Mean) {
			best = r
		}
	}
	return best
}

// Base names the rule that Against compares with, "" if there is none.
func Base(results []Result) string {
	if b := bestOther(results); b != nil {
		return b.Policy
	}
	return ""
}

// Base is the template's way to it.
func (r *Report) Base() string { return Base(r.Results) }

func seconds(v, s float64) string {
	if v >= 100 {
		return spread(v, s, "%.0f")
	}
	if v >= 10 {
		return spread(v, s, "%.1f")
	}
	return spread(v, s, "%.2f")
}

// spread writes a figure with its standard deviation over the seeds.
func spread(v, s float64, format string) string {
	text := fmt.Sprintf(format, v)
	if s > 0 {
		text += " ±" + fmt.Sprintf(format, s)
	}
	return text
}

// Explained says what each reason means.
var explained = map[string]string{
	reasonOnly:     "one replica was there to choose from",
	reasonNoMatch:  "no replica held any of the prompt",
	reasonMatch:    "it went where most of its prompt was held",
	reasonBalance:  "another replica held more of it, but was too busy",
	reasonHome:     "it went to its home by hash",
	reasonOverflow: "its home was over its bound",
	"load":         "it went where the fewest requests were",
	"turn":         "it was that replica's turn",
	"failed":       "no replica took it, or its replica went down after the answer had begun",
}

// Share is a reason and how often it decided.
type Share struct {
	Reason, Meaning string
	Colour          template.CSS
	Percent         float64
}

// Reasons lists the shares of a result's reasons, the largest first.
func (r Result) Reasons() []Share {
	all := 0
	for _, n := range r.Detail.Reasons {
		all += n
	}
	names := slices.Sorted(maps.Keys(explained))
	var shares []Share
	for reason, n := range r.Detail.Reasons {
		at := max(0, slices.Index(names, reason))
		shares = append(shares, Share{reason, explained[reason], template.CSS(colour(at)), 100 * float64(n) / float64(max(1, all))})
	}
	slices.SortFunc(shares, func(a, b Share) int {
		if a.Percent != b.Percent {
			return int(math.Copysign(1, b.Percent-a.Percent))
		}
		return strings.Compare(a.Reason, b.Reason)
	})
	return shares
}

// Meanings lists the reasons of all results, each once.
func (r *Report) Meanings() []Share {
	var all []Share
	for _, x := range r.Results {
		for _, s := range x.Reasons() {
			if !slices.ContainsFunc(all, func(o Share) bool { return o.Reason == s.Reason }) {
				all = append(all, s)
			}
		}
	}
	return all
}

// Loads are the shares of a result's replicas, in percent of a fair share.
func (r Result) Loads() []Bar {
	sum := 0.0
	for _, c := range r.Detail.Computed {
		sum += c
	}
	var bars []Bar
	for i, c := range r.Detail.Computed {
		p := 100 * c * float64(len(r.Detail.Computed)) / max(1, sum)
		bars = append(bars, Bar{fmt.Sprintf("replica %d: %.0f %% of a fair share, %.2f million tokens", i, p, c/1e6), min(p/2, 100)})
	}
	return bars
}

// Bar is one bar, its height in percent of the plot's.
type Bar struct {
	Title  string
	Height float64
}
