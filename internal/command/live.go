// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"io"
	"time"

	"charm.land/bubbles/v2/viewport"
	tea "charm.land/bubbletea/v2"
)

// showLive shows a page on the whole terminal and brings it up to date, until q,
// Ctrl-C or the end of the context. What does not fit can be scrolled.
func showLive(ctx context.Context, out io.Writer, first string, interval time.Duration, next func() string) error {
	l := &live{interval: interval, next: next, view: viewport.New()}
	l.show(first)
	_, err := tea.NewProgram(l, tea.WithContext(ctx), tea.WithOutput(out)).Run()
	if errors.Is(err, tea.ErrProgramKilled) || errors.Is(err, tea.ErrInterrupted) {
		return nil
	}
	return err
}

// live is the state of the terminal.
type live struct {
	interval time.Duration
	next     func() string // may take a while
	view     viewport.Model
	at       time.Time // of what is shown
}

// due says that it is time to look again, and looked what was seen.
type (
	due    struct{}
	looked string
)

func (l *live) show(page string) {
	if l.view.SetContent(page); l.view.PastBottom() {
		l.view.GotoBottom()
	}
	l.at = time.Now()
}

func (l *live) wait() tea.Cmd {
	return tea.Tick(l.interval, func(time.Time) tea.Msg { return due{} })
}

// Init implements tea.Model.
func (l *live) Init() tea.Cmd { return l.wait() }

// Update implements tea.Model.
func (l *live) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.KeyPressMsg:
		switch msg.String() {
		case "q", "esc", "ctrl+c":
			return l, tea.Quit
		}
	case tea.WindowSizeMsg:
		l.view.SetWidth(msg.Width)
		l.view.SetHeight(max(1, msg.Height-1))
		return l, nil
	case due:
		return l, func() tea.Msg { return looked(l.next()) }
	case looked:
		l.show(string(msg))
		return l, l.wait()
	}
	var cmd tea.Cmd
	l.view, cmd = l.view.Update(msg)
	return l, cmd
}

// View implements tea.Model.
func (l *live) View() tea.View {
	keys := "q quits"
	if l.view.TotalLineCount() > l.view.Height() {
		keys += ", ↑ ↓ scroll"
	}
	v := tea.NewView(l.view.View() + "\n" + l.at.Format(time.TimeOnly) + "  " + keys)
	v.AltScreen = true
	return v
}
