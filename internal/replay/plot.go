// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
)

// palette is made for people who see colours differently (after Okabe and Ito),
// and lengthened: a colour on white, and on black.
var palette = [][2]string{
	{"#0072b2", "#4ea8e0"}, {"#d55e00", "#ff8a4c"}, {"#009e73", "#3fc79a"}, {"#cc79a7", "#e09fc4"},
	{"#e69f00", "#f0b93f"}, {"#56b4e9", "#8fd0f5"}, {"#8c564b", "#c58f84"}, {"#7f7f7f", "#a5a5a5"},
	{"#bcbd22", "#d3d450"}, {"#9467bd", "#b797db"}, {"#17becf", "#5cd6e3"}, {"#444444", "#cfcfcf"},
}

// colours defines the palette's variables for readers of one preference: 0 for
// light, 1 for dark.
func colours(preference int) string {
	var b strings.Builder
	for i, c := range palette {
		fmt.Fprintf(&b, "--c%d:%s;", i, c[preference])
	}
	return b.String()
}

// colour is the variable of a place in the palette.
func colour(i int) string { return fmt.Sprintf("var(--c%d)", i%len(palette)) }

// plot is a chart of lines, drawn as SVG.
type plot struct {
	xTitle, yTitle string
	xLog           bool
	lines          []line
	yMax           float64 // 0: what the lines need
	percent        bool    // y is a share
}

type line struct {
	name, colour string
	thick        bool
	points       []xy
}

type xy struct{ x, y float64 }

const (
	plotWidth, plotHeight           = 860, 340
	marginLeft, marginRight         = 78, 16
	marginTop, marginBottom         = 14, 48
	innerWidth, innerHeight float64 = plotWidth - marginLeft - marginRight, plotHeight - marginTop - marginBottom
)

func (p *plot) svg() template.HTML {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %d %d" role="img" aria-label="%s by %s">`, plotWidth, plotHeight,
		template.HTMLEscapeString(p.yTitle), template.HTMLEscapeString(p.xTitle))
	p.draw(&b)
	b.WriteString("</svg>")
	return template.HTML(b.String())
}

// draw writes what is in the plot's svg element.
func (p *plot) draw(b *strings.Builder) {
	xMin, xMax, yMax := p.ranges()
	x := func(v float64) float64 { return marginLeft + innerWidth*p.along(v, xMin, xMax) }
	y := func(v float64) float64 { return marginTop + innerHeight*(1-min(1, v/yMax)) }
	for _, v := range ticks(0, yMax) {
		label := short(v)
		if p.percent {
			label = fmt.Sprintf("%.0f %%", 100*v)
		}
		fmt.Fprintf(b, `<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/><text x="%d" y="%.1f" dy=".35em" text-anchor="end">%s</text>`,
			marginLeft, plotWidth-marginRight, y(v), y(v), marginLeft-8, y(v), label)
	}
	for _, v := range p.xTicks(xMin, xMax) {
		fmt.Fprintf(b, `<line class="grid" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/><text x="%.1f" y="%d" dy="1.1em" text-anchor="middle">%s</text>`,
			x(v), x(v), marginTop, plotHeight-marginBottom, x(v), plotHeight-marginBottom+3, short(v))
	}
	fmt.Fprintf(b, `<text class="title" x="%d" y="%d" text-anchor="middle">%s</text><text class="title" transform="translate(14 %d) rotate(-90)" text-anchor="middle">%s</text>`,
		marginLeft+int(innerWidth)/2, plotHeight-6, template.HTMLEscapeString(p.xTitle), plotHeight/2, template.HTMLEscapeString(p.yTitle))
	for _, l := range p.lines {
		width := 1.4
		if l.thick {
			width = 3
		}
		fmt.Fprintf(b, `<polyline fill="none" style="stroke:%s" stroke-width="%.1f" stroke-linejoin="round" points="`, l.colour, width)
		for _, at := range l.points {
			fmt.Fprintf(b, "%.1f,%.1f ", x(at.x), y(at.y))
		}
		fmt.Fprintf(b, `"><title>%s</title></polyline>`, template.HTMLEscapeString(l.name))
	}
}

func (p *plot) ranges() (xMin, xMax, yMax float64) {
	xMin, yMax = math.Inf(1), p.yMax
	for _, l := range p.lines {
		for _, at := range l.points {
			xMin, xMax = min(xMin, at.x), max(xMax, at.x)
			if p.yMax == 0 {
				yMax = max(yMax, at.y)
			}
		}
	}
	if !p.xLog || math.IsInf(xMin, 1) {
		xMin = 0
	}
	if yMax == 0 {
		yMax = 1
	}
	return xMin, max(xMax, xMin+1e-9), yMax
}

// along is where between the ends of the x axis a value is, 0 to 1.
func (p *plot) along(v, low, high float64) float64 {
	if p.xLog {
		return (math.Log(v) - math.Log(low)) / (math.Log(high) - math.Log(low))
	}
	return (v - low) / (high - low)
}

func (p *plot) xTicks(low, high float64) []float64 {
	if !p.xLog {
		return ticks(low, high)
	}
	var at []float64
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for _, m := range []float64{1, 2, 5} {
			if v := m * decade; v >= low && v <= high {
				at = append(at, v)
			}
		}
	}
	return at
}

// ticks are about six round values between two.
func ticks(low, high float64) []float64 {
	step := math.Pow(10, math.Floor(math.Log10((high-low)/5)))
	for _, m := range []float64{5, 2} {
		if (high-low)/(m*step) >= 4 {
			step *= m
			break
		}
	}
	var at []float64
	for i := 0; i <= 20; i++ {
		if v := math.Ceil(low/step)*step + float64(i)*step; v <= high*(1+1e-9) {
			at = append(at, v)
		}
	}
	return at
}

// short writes a number without digits that say nothing.
func short(v float64) string { return fmt.Sprintf("%.4g", v) }

// lines makes a line for each result.
func (r *Report) linesOf(points func(d *Detail) []xy) []line {
	var lines []line
	for i := range r.Results {
		x := &r.Results[i]
		lines = append(lines, line{x.Policy, colour(i), x.Ours, points(&x.Detail)})
	}
	slices.Reverse(lines) // the first, which are ours, on top
	return lines
}

// Colour is that of a result in all plots.
func (r *Report) Colour(result int) template.CSS { return template.CSS(colour(result)) }

// Light and Dark define the colours for readers who prefer one or the other.
func (*Report) Light() template.CSS { return template.CSS(colours(0)) }
func (*Report) Dark() template.CSS  { return template.CSS(colours(1)) }

// Distribution plots how many requests had their first token by a time.
func (r *Report) Distribution() template.HTML { return r.distribution().svg() }

func (r *Report) distribution() *plot {
	p := plot{xTitle: "time to first token, seconds", yTitle: "share of requests", xLog: true, yMax: 1, percent: true}
	const least = 0.01 // seconds; a log scale needs one
	p.lines = r.linesOf(func(d *Detail) (at []xy) {
		for i, v := range d.TTFT {
			at = append(at, xy{max(v, least), float64(i) / quantiles})
		}
		return at
	})
	return &p
}

// HitRates plots the hit rate over time.
func (r *Report) HitRates() template.HTML {
	p := plot{xTitle: "arrival, seconds from the start", yTitle: "hit rate", percent: true}
	p.lines = r.linesOf(func(d *Detail) []xy { return d.overTime(d.HitRates) })
	return p.svg()
}

// TTFTs plots the mean time to first token over time.
func (r *Report) TTFTs() template.HTML {
	p := plot{xTitle: "arrival, seconds from the start", yTitle: "mean TTFT, seconds"}
	p.lines = r.linesOf(func(d *Detail) []xy { return d.overTime(d.TTFTs) })
	return p.svg()
}

func (d *Detail) overTime(values []float64) (at []xy) {
	for i, v := range values {
		if d.Counts[i] > 0 {
			at = append(at, xy{(float64(i) + 0.5) * d.Bin, v})
		}
	}
	return at
}

// WritePlot writes the plot of times to first token as a picture of its own
// (SVG), with the names of the policies, for readers in the light and the dark.
func (r *Report) WritePlot(w io.Writer) error {
	if len(r.Results) == 0 {
		return errors.New("no result to plot")
	}
	const columns, column, rowHeight = 4, 200, 20
	height := plotHeight + 8 + rowHeight*((len(r.Results)+columns-1)/columns)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img"><title>Share of requests that had their first token by a time</title>`, plotWidth, height)
	fmt.Fprintf(&b, `<style>svg{%s--soft:#62676e;--rule:#e2e0dc}@media(prefers-color-scheme:dark){svg{%s--soft:#9aa0a8;--rule:#33383e}}`, colours(0), colours(1))
	b.WriteString(`text{font:13px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--rule)}</style>`)
	r.distribution().draw(&b)
	for i := range r.Results {
		x, y := marginLeft+column*(i%columns), plotHeight+8+rowHeight*(i/columns)
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="18" height="4" style="fill:%s"/><text x="%d" y="%d">%s</text>`,
			x, y+4, colour(i), x+24, y+10, template.HTMLEscapeString(r.Results[i].Policy))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}
