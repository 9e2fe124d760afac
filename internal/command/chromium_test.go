// SPDX-License-Identifier: Apache-2.0

package command

import (
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/browser"
)

var pictures = flag.String("pictures", "", "folder to put pictures of the report into")

// TestReportInChromium looks at the page that replay writes, on a phone and a
// desktop, in the light and in the dark.
func TestReportInChromium(t *testing.T) {
	b := browser.Start(t, "THE REPORT OF REPLAY")
	dir := t.TempDir()
	if out, err := execute(t, "", "replay", "--chats", "30", "--replicas", "3", "--seeds", "2", "--report", filepath.Join(dir, "out.html")); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s := httptest.NewServer(http.FileServer(http.Dir(dir)))
	t.Cleanup(s.Close)
	for _, screen := range []browser.Screen{browser.Desktop, browser.Desktop.InTheDark(), browser.Phone, browser.Phone.InTheDark()} {
		t.Run(screen.Name(), func(t *testing.T) {
			p := b.Open(t, screen, s.URL+"/out.html")
			p.Await("document.readyState === 'complete' && document.querySelector('h1')")
			for what, is := range map[string]string{
				"a row for each policy":    "document.querySelector('table').rows.length > 8",
				"plots with lines":         "document.querySelectorAll('figure svg').length === 3 && [...document.querySelectorAll('figure svg')].every(s => s.querySelectorAll('polyline, path').length > 8)",
				"text of a size to read":   "[...document.querySelectorAll('svg text')].every(e => !e.getClientRects().length || e.getBoundingClientRect().height >= 9)",
				"the background asked for": "matchMedia('(prefers-color-scheme: dark)').matches === (getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 128)",
			} {
				var shown bool
				if p.Eval("Boolean("+is+")", &shown); !shown {
					t.Errorf("the report does not show %s", what)
				}
			}
			if out := append(p.Overflow(), p.Complaints()...); len(out) > 0 {
				t.Errorf("the browser complains: %q", out)
			}
			if *pictures != "" {
				if err := os.WriteFile(filepath.Join(*pictures, "report-"+screen.Name()+".png"), p.Screenshot("png"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
