// SPDX-License-Identifier: Apache-2.0

package page

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/browser"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

var (
	pictures = flag.String("pictures", "", "folder to put pictures of the page into")
	after    = flag.Duration("after", 0, "how long to let the fleet work before they are taken")
)

// TestChromium looks at the page of a fleet at work, on a phone and a desktop, in
// the light and in the dark.
func TestChromium(t *testing.T) {
	b := browser.Start(t, "THE LIVE PAGE")
	addrs := engines(t, 4, enginesim.ServerConfig{Config: enginesim.Config{Blocks: 4000, PrefillRate: 9000}})
	s := serve(t, proxied("chat", addrs...))
	board := hold()
	t.Cleanup(func() { _ = release() })
	s.play(t, trace.Workload{Chats: 200, SystemPrompts: 9, SystemTokens: 4000, Turns: 5, UserTokens: 300, AnswerTokens: 120, OneOffs: 40, OneOffTokens: 9000}, 48, 1)
	await(t, "a hit rate", func() bool {
		board.sample()
		f := s.data(t, "").Fleets[0]
		return f.Hits != nil && len(f.Latest) == listed && len(f.Prefixes) > 2
	})
	members := admin.Policies()[0].Fleet().Members()
	members[3].Drain(true)
	t.Cleanup(func() { members[3].Drain(false) })
	time.Sleep(*after)

	for _, screen := range []browser.Screen{browser.Desktop, browser.Desktop.InTheDark(), browser.Phone, browser.Phone.InTheDark()} {
		t.Run(screen.Name(), func(t *testing.T) {
			p := b.Open(t, screen, "http://"+s.addr+"/kv")
			p.Await("document.body.className === 'live' && document.querySelectorAll('.decisions li').length === 16 && document.body.innerText.includes('is avoided')")
			text := p.Text()
			for _, part := range append([]string{"chat", "kv_cache_aware", "drained", "is avoided: drained", "match", "Heaviest shared prefixes", "in flight", "held back"}, addrs...) {
				if !strings.Contains(text, part) {
					t.Errorf("the page does not show %q", part)
				}
			}
			var clock string
			p.Eval("document.getElementById('time').textContent", &clock)
			for _, shown := range []string{ // by and by: the page draws a figure when it has some of it
				"document.querySelectorAll('.replicas .body .row').length === 4",
				"document.querySelectorAll('.hits .line[d^=M]').length >= 3 && document.querySelector('.trend .line[d^=M]')",
				"/^\\d+$/.test(document.querySelector('[data-f=hits]').textContent)",
				"document.querySelectorAll('.prefixes .holders[aria-label^=held]').length > 2 && document.querySelector('.holders i.holds')",
				"matchMedia('(prefers-color-scheme: dark)').matches === (getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 128)",
				contrast,
				fmt.Sprintf("document.getElementById('time').textContent !== %q", clock),
			} {
				p.Await(shown)
			}
			if out := p.Overflow(); len(out) > 0 {
				t.Errorf("too wide: %q", out)
			}
			if out := p.Complaints(); len(out) > 0 {
				t.Errorf("the browser complains: %q", out)
			}
			if *pictures != "" {
				save(t, b.Open(t, sharp(screen), "http://"+s.addr+"/kv"), nameOf(screen))
			}
		})
	}
}

// contrast is whether all text stands out from the background by 4.5 to 1, as
// WCAG wants it.
const contrast = `(() => {
	const light = c => { const [r, g, b] = c.match(/[\d.]+/g).slice(0, 3).map(v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 }); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
	const paper = light(getComputedStyle(document.body).backgroundColor);
	return [...document.querySelectorAll('main *, .top *')].filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).every(e => {
		const ink = light(getComputedStyle(e).color);
		return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05) >= 4.5;
	});
})()`

// sharp is a screen of which a picture is worth keeping.
func sharp(s browser.Screen) browser.Screen {
	s.Scale = 1.5
	return s
}

// nameOf is page-light for a desktop, page-phone-dark for a phone in the dark.
func nameOf(s browser.Screen) string {
	name := "page"
	if s.Width == browser.Phone.Width {
		name += "-phone"
	}
	if s.Dark {
		return name + "-dark"
	}
	return name + "-light"
}

// save keeps a picture of the page.
func save(t *testing.T, p *browser.Page, name string) {
	t.Helper()
	p.Await("document.body.className === 'live'")
	if err := os.MkdirAll(*pictures, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(*pictures, name+".webp"), p.Screenshot("webp"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestChromiumHostileNames checks that names are shown as they are, and run as
// nothing.
func TestChromiumHostileNames(t *testing.T) {
	b := browser.Start(t, "THE LIVE PAGE WITH HOSTILE NAMES")
	const hostile = `</script><img src=x onerror=document.title='run'>`
	addrs := engines(t, 1, enginesim.ServerConfig{Speed: 50, Model: hostile})
	s := serve(t, proxied("`"+hostile+strings.Repeat("W", 200)+"`", addrs...))
	p := b.Open(t, browser.Phone, "http://"+s.addr+"/kv")
	p.Await("document.querySelector('.who small')?.textContent.includes('onerror')")
	var title string
	if p.Eval("document.title", &title); title != "KV cache" {
		t.Errorf("a name was run: the title is %q", title)
	}
	var images int
	if p.Eval("document.images.length + document.scripts.length", &images); images != 1 {
		t.Errorf("%d images and scripts", images)
	}
	if text := p.Text(); !strings.Contains(text, hostile) {
		t.Errorf("the name is not shown as it is: %s", text)
	}
	if out := append(p.Overflow(), p.Complaints()...); len(out) > 0 {
		t.Errorf("complaints: %q", out)
	}
	p = b.Open(t, browser.Phone, "http://"+s.addr+"/kv?fleet=nope")
	p.Await(`document.getElementById('news').textContent === 'fleet "nope" is unknown'`)
}

// TestChromiumWithoutCaddy checks that the page says so when no answer comes, and
// goes on when there is one.
func TestChromiumWithoutCaddy(t *testing.T) {
	b := browser.Start(t, "THE LIVE PAGE WITHOUT CADDY")
	addrs := engines(t, 1, enginesim.ServerConfig{Speed: 50})
	s := serve(t, proxied("chat", addrs...))
	p := b.Open(t, browser.Desktop, "http://"+s.addr+"/kv")
	p.Await("document.body.className === 'live'")
	s.load(t, "\trespond 503")
	p.Await("document.body.className === 'lost' && document.getElementById('news').textContent === 'no answer since'")
	s.load(t, proxied("chat", addrs...))
	p.Await("document.body.className === 'live'")
}
