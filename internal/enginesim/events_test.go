// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish"
)

var _ EventSink = (*kvpublish.Publisher)(nil)

// viewSink applies events to a view, as a subscriber does.
type viewSink struct {
	t       *testing.T
	view    *kvevents.View
	decoder *kvevents.Decoder
}

func (s *viewSink) Publish(b *kvpublish.Batch) uint64 {
	batch, err := s.decoder.Decode(b.Append(nil))
	if err != nil || batch.Skipped.Sum() > 0 {
		s.t.Errorf("batch %+v, error %v", batch, err)
		return 0
	}
	s.view.Apply(batch)
	return 0
}

func (s *viewSink) Restart() { s.view.Clear() }

// What events say of a prompt is what the engine finds of it, block by block, while a pool that is too small evicts.
func TestEventsTellWhatIsHeld(t *testing.T) {
	const blocks, blockTokens = 60, 16
	sink := &viewSink{t, kvevents.NewView(kvevents.ViewConfig{Blocks: blocks}), kvevents.NewDecoder(kvevents.Limits{})}
	e := New(Config{Blocks: blocks, BlockTokens: blockTokens})
	n := narrate(e, sink)
	e.OnStep = func(Step) { n.publish() }
	cut, now := tokenizer{bytesPerToken: 4}, time.Duration(0)
	ask := func(p *prompt, output int) {
		r := &Request{Blocks: p.blocks, PromptTokens: p.tokens, OutputTokens: output, Output: p.outputBlock, source: p}
		if err := e.Submit(now, r); err != nil {
			t.Fatal(err)
		}
		for end, busy := e.Next(); busy; end, busy = e.Next() {
			now = end
			e.Advance(now)
		}
	}
	spaces := []space{{}, {adapter: "sql"}, {salt: "tenant"}}
	held, random := 0, rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		in := spaces[random.IntN(len(spaces))]
		text := strings.Repeat(fmt.Sprint("conversation ", random.IntN(4), " goes on; "), 20+i%5)
		p := newPrompt(cut, blockTokens, in, cut.append(nil, text))
		hits := 0
		for hits < len(p.blocks) && e.pool.lookup(p.blocks[hits]) != nullBlock {
			hits++
		}
		m := sink.view.Longest(p.ids, in.adapter, []kvevents.Extra{kvevents.SaltExtra(in.salt)})
		if m.Blocks != hits {
			t.Fatalf("prompt %d of %+v: the events say %d blocks are held, the engine has %d of %d", i, in, m.Blocks, hits, len(p.blocks))
		}
		held += hits
		ask(p, i%40)
		if i%50 == 49 {
			e.Reset(now)
			n.publish() // else it comes with the next step
		}
	}
	if st := sink.view.Stats(); held == 0 || st.UnknownRemovals > 0 || st.OrphanEvents > 0 || st.Clears == 0 {
		t.Errorf("%d blocks were found held; %+v", held, st)
	}
}

// A server's answers are told of as well: the next turn of a chat finds them.
func TestServerPublishes(t *testing.T) {
	sink := &viewSink{t, kvevents.NewView(kvevents.ViewConfig{}), kvevents.NewDecoder(kvevents.Limits{})}
	s := startServer(t, ServerConfig{Config: Config{BlockTokens: 16}, Events: sink})
	if resp, answer := post(t, s.URL()+"/v1/completions", object{"prompt": strings.Repeat("on and on ", 40), "max_tokens": 64}); resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %s", resp.StatusCode, answer)
	}
	if st := sink.view.Stats(); st.Held < 8 || st.BlockSize != 16 {
		t.Errorf("%+v of a prompt of 100 tokens and an answer of 64", st)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	if st := sink.view.Stats(); st.Held != 0 {
		t.Errorf("%d blocks are held by a new process", st.Held)
	}
}
