// SPDX-License-Identifier: Apache-2.0

// Package browser opens pages in a headless Chromium, for tests of what people
// see. It speaks Chromium's DevTools protocol over a pipe.
package browser

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"
)

// programs are the names under which a Chromium may be installed.
var programs = []string{"chromium", "chromium-browser", "google-chrome-stable", "google-chrome"}

// Browser is a running Chromium, without anything that one before left behind.
type Browser struct {
	in  *os.File
	mu  sync.Mutex // guards what follows
	err error      // why no more messages come
	got *sync.Cond // a message came
	id  int
	// answers are those not yet taken, events those of each session.
	answers map[int]message
	events  map[string][]message
}

type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

type request struct {
	ID      int    `json:"id"`
	Session string `json:"sessionId,omitempty"`
	Method  string `json:"method"`
	Params  any    `json:"params,omitempty"`
}

// Start starts a Chromium that ends with the test. The test is skipped, and says
// what is not checked then, if there is none.
func Start(t testing.TB, unchecked string) *Browser {
	t.Helper()
	path := ""
	for _, name := range programs {
		if found, err := exec.LookPath(name); err == nil && path == "" {
			path = found
		}
	}
	if path == "" || runtime.GOOS == "windows" { // which hands no pipes down
		t.Skipf("SKIPPED: %s IS NOT LOOKED AT IN CHROMIUM: apt-get install -y chromium", unchecked)
	}
	b, err := start(t, path)
	if err != nil {
		t.Fatalf("starting %s: %v", path, err)
	}
	return b
}

func start(t testing.TB, path string) (*Browser, error) {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	home := t.TempDir()
	cmd := exec.CommandContext(ctx, path, "--headless", "--remote-debugging-pipe", "--user-data-dir="+home,
		"--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+home)
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // its 3 and 4
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Start()
	theirIn.Close()
	theirOut.Close()
	if err != nil {
		stop()
		return nil, err
	}
	b := &Browser{in: in, answers: make(map[int]message), events: make(map[string][]message)}
	b.got = sync.NewCond(&b.mu)
	var reading sync.WaitGroup
	reading.Go(func() { b.read(out) })
	t.Cleanup(func() {
		_ = b.call("", "Browser.close", nil, nil) // it may be gone before it answers
		timer := time.AfterFunc(5*time.Second, stop)
		_ = cmd.Wait() // its exit status says nothing
		timer.Stop()
		stop()
		in.Close()
		out.Close()
		reading.Wait()
	})
	return b, nil
}

// read takes in messages, which end with a zero byte.
func (b *Browser) read(from *os.File) {
	r := bufio.NewReader(from)
	for {
		text, err := r.ReadBytes(0)
		var m message
		if err == nil {
			err = json.Unmarshal(bytes.TrimRight(text, "\x00"), &m)
		}
		b.mu.Lock()
		switch {
		case err != nil:
			b.err = fmt.Errorf("chromium has ended: %w", err)
		case m.ID != 0:
			b.answers[m.ID] = m
		default:
			b.events[m.Session] = append(b.events[m.Session], m)
		}
		b.got.Broadcast()
		b.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// patience is how long a call may take on a busy machine.
const patience = 60 * time.Second

// call calls a method and takes its result into out, which may be nil.
func (b *Browser) call(session, method string, params, out any) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.id++
	id := b.id
	text, err := json.Marshal(request{id, session, method, params})
	if err != nil {
		return err
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		return err
	}
	late := time.AfterFunc(patience, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.err == nil {
			b.err = errors.New("chromium does not answer")
		}
		b.got.Broadcast()
	})
	defer late.Stop()
	for {
		if m, ok := b.answers[id]; ok {
			delete(b.answers, id)
			if m.Error != nil {
				return fmt.Errorf("%s: %s", method, m.Error.Message)
			}
			if out == nil {
				return nil
			}
			return json.Unmarshal(m.Result, out)
		}
		if b.err != nil {
			return b.err
		}
		b.got.Wait()
	}
}

// Screen is what a page is shown on.
type Screen struct {
	// Width and Height are in CSS pixels, each of which is Scale real ones wide
	// (default 1).
	Width, Height int
	Scale         float64
	// Dark is what the reader prefers.
	Dark bool
}

// Phone and Desktop are the screens that pages are made for.
var (
	Phone   = Screen{Width: 360, Height: 740}
	Desktop = Screen{Width: 1280, Height: 900}
)

// InTheDark is the same screen for someone who prefers it dark.
func (s Screen) InTheDark() Screen {
	s.Dark = true
	return s
}

// Name tells screens apart in file and test names.
func (s Screen) Name() string {
	if s.Dark {
		return fmt.Sprintf("%d-dark", s.Width)
	}
	return fmt.Sprintf("%d-light", s.Width)
}

// Page is a page that was opened.
type Page struct {
	t       testing.TB
	browser *Browser
	session string
}

// Open opens an address on a screen.
func (b *Browser) Open(t testing.TB, s Screen, url string) *Page {
	t.Helper()
	var target struct {
		TargetID string `json:"targetId"`
	}
	var attached struct {
		SessionID string `json:"sessionId"`
	}
	p := &Page{t: t, browser: b}
	p.must(b.call("", "Target.createTarget", object{"url": "about:blank"}, &target))
	p.must(b.call("", "Target.attachToTarget", object{"targetId": target.TargetID, "flatten": true}, &attached))
	p.session = attached.SessionID
	scheme := "light"
	if s.Dark {
		scheme = "dark"
	}
	for _, c := range []struct {
		method string
		params any
	}{
		{"Page.enable", nil}, {"Runtime.enable", nil}, {"Log.enable", nil}, {"Network.enable", nil},
		{"Emulation.setDeviceMetricsOverride", object{"width": s.Width, "height": s.Height, "deviceScaleFactor": max(1, s.Scale), "mobile": s.Width < 600}},
		{"Emulation.setEmulatedMedia", object{"features": []object{
			{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}}}},
		{"Page.navigate", object{"url": url}},
	} {
		p.must(b.call(p.session, c.method, c.params, nil))
	}
	t.Cleanup(func() { _ = b.call("", "Target.closeTarget", object{"targetId": target.TargetID}, nil) }) // or with the browser
	return p
}

type object = map[string]any

func (p *Page) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// Eval takes the value of a JavaScript expression into out.
func (p *Page) Eval(expression string, out any) {
	p.t.Helper()
	p.must(p.eval(expression, out))
}

func (p *Page) eval(expression string, out any) error {
	var got struct {
		Result struct {
			Value json.RawMessage `json:"value"`
		} `json:"result"`
		Exception *struct {
			Text      string `json:"text"`
			Exception struct {
				Description string `json:"description"`
			} `json:"exception"`
		} `json:"exceptionDetails"`
	}
	err := p.browser.call(p.session, "Runtime.evaluate", object{"expression": expression, "returnByValue": true, "awaitPromise": true}, &got)
	switch {
	case err != nil:
		return err
	case got.Exception != nil:
		return fmt.Errorf("%s: %s %s", expression, got.Exception.Text, got.Exception.Exception.Description)
	case got.Result.Value == nil:
		return fmt.Errorf("%s has no value", expression)
	}
	return json.Unmarshal(got.Result.Value, out)
}

// Await waits until an expression is true.
func (p *Page) Await(expression string) {
	p.t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		is := false
		// While the page is being replaced there is nothing to ask.
		if err = p.eval("Boolean("+expression+")", &is); err == nil && is {
			return
		}
	}
	p.t.Fatalf("waited in vain for %s: %v; the page says %q; complaints: %q", expression, err, p.Text(), p.Complaints())
}

// Text is what a reader reads.
func (p *Page) Text() string {
	text := ""
	if err := p.eval("document.body.innerText", &text); err != nil {
		return err.Error()
	}
	return text
}

// Overflow lists elements that stick out of the screen to the right, and that of
// the page, as a reader would have to scroll for them.
func (p *Page) Overflow() []string {
	p.t.Helper()
	var out []string
	p.Eval(`(() => {
		const width = document.documentElement.clientWidth, out = [];
		if (document.documentElement.scrollWidth > width) out.push('the page is ' + document.documentElement.scrollWidth + ' wide');
		for (const e of document.querySelectorAll('body *')) {
			if (e.closest('svg') && e.tagName !== 'svg') continue;
			let scrolls = false;
			for (let a = e.parentElement; a; a = a.parentElement) if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(a).overflowX)) scrolls = true;
			const box = e.getBoundingClientRect();
			if (!scrolls && box.width > 0 && box.right > width + 0.5) out.push(e.tagName + '.' + e.className + ' ends at ' + box.right);
		}
		return out;
	})()`, &out)
	return out
}

// Complaints lists what the browser had to complain of: errors and warnings of
// the console, exceptions, what the security policy stopped, failed requests.
func (p *Page) Complaints() []string {
	p.browser.mu.Lock()
	defer p.browser.mu.Unlock()
	var out []string
	for _, m := range p.browser.events[p.session] {
		var e struct {
			Type  string `json:"type"`
			Entry struct {
				Level, Text, URL string
			} `json:"entry"`
		}
		_ = json.Unmarshal(m.Params, &e) // of the events below it has this form
		switch m.Method {
		case "Runtime.exceptionThrown", "Network.loadingFailed":
			out = append(out, m.Method+" "+string(m.Params))
		case "Runtime.consoleAPICalled":
			if e.Type == "error" || e.Type == "warning" || e.Type == "assert" {
				out = append(out, m.Method+" "+string(m.Params))
			}
		case "Log.entryAdded":
			if e.Entry.Level == "error" || e.Entry.Level == "warning" {
				out = append(out, e.Entry.Text+" "+e.Entry.URL)
			}
		}
	}
	return out
}

// Screenshot is a picture of the whole page as a file of a format, png or webp.
func (p *Page) Screenshot(format string) []byte {
	p.t.Helper()
	params := object{"format": format, "captureBeyondViewport": true}
	if format != "png" {
		params["quality"] = 85
	}
	var height float64
	p.Eval("document.documentElement.scrollHeight", &height)
	var width float64
	p.Eval("document.documentElement.clientWidth", &width)
	params["clip"] = object{"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
	var got struct {
		Data string `json:"data"`
	}
	p.must(p.browser.call(p.session, "Page.captureScreenshot", params, &got))
	picture, err := base64.StdEncoding.DecodeString(got.Data)
	p.must(err)
	return picture
}
