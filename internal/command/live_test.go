// SPDX-License-Identifier: Apache-2.0

package command

import (
	"strings"
	"testing"

	"charm.land/bubbles/v2/viewport"
	tea "charm.land/bubbletea/v2"
)

func TestLive(t *testing.T) {
	looks := 0
	l := &live{view: viewport.New(), interval: shortestLook, next: func() string { looks++; return "second\npage\n" }}
	l.Update(tea.WindowSizeMsg{Width: 40, Height: 4})
	l.show("first line\n2\n3\n4\n5\n")
	if v := l.View().Content; !strings.Contains(v, "first line") || strings.Contains(v, "5") && !strings.Contains(v, "scroll") || strings.Count(v, "\n") != 3 {
		t.Errorf("of five lines four rows show\n%s", v)
	}
	l.Update(tea.KeyPressMsg{Code: tea.KeyDown})
	if v := l.View().Content; strings.Contains(v, "first line") || !strings.Contains(v, "4") {
		t.Errorf("scrolled by a line\n%s", v)
	}
	_, look := l.Update(due{})
	if looks != 0 {
		t.Error("it looks while keys wait")
	}
	_, again := l.Update(look())
	if v := l.View().Content; looks != 1 || again == nil || !strings.Contains(v, "second") || strings.Contains(v, "scroll") {
		t.Errorf("after %d looks\n%s", looks, v)
	}
	for _, key := range []tea.KeyPressMsg{{Code: 'q', Text: "q"}, {Code: 'c', Mod: tea.ModCtrl}, {Code: tea.KeyEscape}} {
		if _, cmd := l.Update(key); cmd == nil || cmd() != tea.Quit() {
			t.Errorf("%v does not quit", key)
		}
	}
}
