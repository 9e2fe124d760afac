// SPDX-License-Identifier: Apache-2.0

// Command plot draws what the Scale benchmarks print, from its input to its output as SVG:
//
//	go test -run '^$' -bench Scale ./internal/residency ./selection | go run ./benchmarks/plot > docs/scale.svg
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "plot:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	found, err := read(in)
	if err != nil {
		return err
	}
	decision := found[figure{"replicas", "µs/decision"}]
	panels := []panel{
		{title: "a decision, by replicas", unit: "µs", lines: []line{{points: decision}}},
		{title: "a decision, by the prompt's tokens (64 replicas)", unit: "µs", lines: []line{{points: found[figure{"tokens", "µs/decision"}]}}},
		{title: "share of a core, by requests a second", lines: shares(decision)},
		{title: "memory, by blocks held, counted at each of 64 replicas", unit: "MiB", lines: []line{{points: found[figure{"pairs", "MiB"}]}}},
		{title: "a new block booked, by blocks held", unit: "ns", lines: []line{{points: found[figure{"pairs", "ns/inserted-block"}]}}},
		{title: "longest match of all replicas, by blocks held", unit: "µs", lines: []line{{points: found[figure{"pairs", "µs/match"}]}}},
	}
	for _, p := range panels {
		for _, l := range p.lines {
			if len(l.points) == 0 {
				return fmt.Errorf("the input lacks what %q needs: give it the output of both packages' Scale benchmarks", p.title)
			}
		}
		if len(p.lines) == 0 {
			return errors.New("the input has no replicas=… benchmark")
		}
	}
	return draw(out, panels)
}

// figure names what a benchmark measured: by what it was varied, and the unit.
type figure [2]string

type point struct{ x, y float64 }

var benchmarkLine = regexp.MustCompile(`^BenchmarkScale/(\w+)=(\d+)(?:-\d+)?\s+\d+\s+(.+)`)

func read(in io.Reader) (map[figure][]point, error) {
	found := map[figure][]point{}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		m := benchmarkLine.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		x, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return nil, err
		}
		fields := strings.Fields(m[3])
		for i := 0; i+1 < len(fields); i += 2 {
			y, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return nil, fmt.Errorf("%q is no figure in %q", fields[i], lines.Text())
			}
			key := figure{m[1], fields[i+1]}
			found[key] = append(found[key], point{x, y})
		}
	}
	return found, lines.Err()
}

// shares tells what part of a core decisions take at a rate of requests, by the replicas.
func shares(decision []point) []line {
	var lines []line
	for _, d := range decision {
		if d.x != 8 && d.x != 64 && d.x != 512 && d.x != 1000 {
			continue
		}
		l := line{name: fmt.Sprintf("%.0f replicas", d.x)}
		for _, rate := range []float64{10, 100, 1000, 10_000} {
			l.points = append(l.points, point{rate, rate * d.y / 1e6})
		}
		lines = append(lines, l)
	}
	return lines
}

type line struct {
	name   string
	points []point
}

// panel is a chart with logarithmic axes.
type panel struct {
	title, unit string
	lines       []line
}

const (
	panelWidth, panelHeight = 420, 250
	left, right, top, foot  = 56, 14, 34, 34
	columns                 = 2
)

func draw(w io.Writer, panels []panel) error {
	var b strings.Builder
	rows := (len(panels) + columns - 1) / columns
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">
<style>
text{fill:#333}path{fill:none;stroke-width:2}.grid{stroke:#ddd;stroke-width:1}.title{font-size:12px;font-weight:bold}
.c0{stroke:#0072b2;fill:#0072b2}.c1{stroke:#d55e00;fill:#d55e00}.c2{stroke:#009e73;fill:#009e73}.c3{stroke:#cc79a7;fill:#cc79a7}
path.c0,path.c1,path.c2,path.c3{fill:none}text.c0,text.c1,text.c2,text.c3{stroke:none}
@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}}
</style>
`, columns*panelWidth, rows*panelHeight)
	for i := range panels {
		fmt.Fprintf(&b, "<g transform=\"translate(%d,%d)\">\n", i%columns*panelWidth, i/columns*panelHeight)
		panels[i].draw(&b)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *panel) draw(b *strings.Builder) {
	var all []point
	for _, l := range p.lines {
		all = append(all, l.points...)
	}
	x := scaleOf(all, func(p point) float64 { return p.x }, left, panelWidth-right)
	y := scaleOf(all, func(p point) float64 { return p.y }, panelHeight-foot, top)
	fmt.Fprintf(b, "<text class=\"title\" x=\"%d\" y=\"18\">%s</text>\n", left, p.title)
	for _, v := range x.ticks() {
		fmt.Fprintf(b, `<line class="grid" x1="%.1[1]f" x2="%.1[1]f" y1="%[2]d" y2="%[3]d"/><text x="%.1[1]f" y="%[4]d" text-anchor="middle">%[5]s</text>`+"\n",
			x.at(v), top, panelHeight-foot, panelHeight-foot+16, short(v))
	}
	for _, v := range y.ticks() {
		fmt.Fprintf(b, `<line class="grid" x1="%[1]d" x2="%[2]d" y1="%.1[3]f" y2="%.1[3]f"/><text x="%[4]d" y="%.1[3]f" dy=".35em" text-anchor="end">%[5]s</text>`+"\n",
			left, panelWidth-right, y.at(v), left-5, strings.TrimSpace(short(v)+" "+p.unit))
	}
	for i, l := range p.lines {
		var path strings.Builder
		for j, at := range l.points {
			fmt.Fprintf(&path, "%c%.1f %.1f", "ML"[min(j, 1)], x.at(at.x), y.at(at.y))
			fmt.Fprintf(b, `<circle class="c%d" cx="%.1f" cy="%.1f" r="2.5"/>`, i, x.at(at.x), y.at(at.y))
		}
		fmt.Fprintf(b, "<path class=\"c%d\" d=\"%s\"/>\n", i, path.String())
		if l.name != "" {
			fmt.Fprintf(b, "<text class=\"c%d\" x=\"%d\" y=\"%d\">%s</text>\n", i, left+8, top+14+14*i, l.name)
		}
	}
}

// scale maps powers of ten to places.
type scale struct{ low, high, from, to float64 }

func scaleOf(points []point, of func(point) float64, from, to float64) scale {
	least := of(slices.MinFunc(points, func(a, b point) int { return compare(of(a), of(b)) }))
	most := of(slices.MaxFunc(points, func(a, b point) int { return compare(of(a), of(b)) }))
	return scale{math.Floor(math.Log10(least) + 1e-9), math.Ceil(math.Log10(most) - 1e-9), from, to}
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

func (s scale) at(v float64) float64 {
	return s.from + (s.to-s.from)*(math.Log10(v)-s.low)/max(1, s.high-s.low)
}

func (s scale) ticks() (list []float64) {
	for e := s.low; e <= max(s.high, s.low+1); e++ {
		list = append(list, math.Pow(10, e))
	}
	return list
}

// short writes a number as 10k or 1M.
func short(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%.4gM", v/1e6)
	case v >= 1e4:
		return fmt.Sprintf("%.4gk", v/1e3)
	}
	return fmt.Sprintf("%.4g", v)
}
