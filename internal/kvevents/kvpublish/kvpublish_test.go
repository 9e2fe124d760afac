// SPDX-License-Identifier: Apache-2.0

package kvpublish

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestBatchDecodes checks that what a batch encodes is what the decoder reads.
func TestBatchDecodes(t *testing.T) {
	parent := uint64(1<<63 + 5)
	b := Batch{Time: time.Unix(1795966073, 5e8), Rank: 3}
	b.Stored(Stored{Hashes: []uint64{1, 1 << 63}, Tokens: []uint32{1, 2, 3, 150_000}, BlockSize: 2, LoRA: "sql", Salt: "tenant"})
	b.Stored(Stored{Hashes: []uint64{9}, Parent: &parent, Tokens: []uint32{1, 2}, BlockSize: 2, Medium: "CPU"})
	b.Removed("", 7, 8)
	b.Cleared()
	got, err := kvevents.NewDecoder(kvevents.Limits{}).Decode(b.Append(nil))
	if err != nil {
		t.Fatal(err)
	}
	if !got.Time.Equal(b.Time) || got.Rank != 3 || len(got.Events) != b.Len() || got.Skipped != (kvevents.Skipped{}) {
		t.Fatalf("batch %+v", got)
	}
	first, second, third, fourth := got.Events[0], got.Events[1], got.Events[2], got.Events[3]
	if first.HasParent || first.Hashes[1] != 1<<63 || first.Tokens[3] != 150_000 || first.LoRA != "sql" || first.Tier != kvevents.Device ||
		first.Extra[0] != kvevents.SaltExtra("tenant") || first.Extra[1] != 0 || first.Attention != kvevents.FullAttention {
		t.Errorf("first %+v", first)
	}
	if uint64(second.Parent) != parent || second.Tier != kvevents.Host || second.Extra != nil {
		t.Errorf("second %+v", second)
	}
	if third.Kind != kvevents.BlockRemoved || len(third.Hashes) != 2 || fourth.Kind != kvevents.AllBlocksCleared {
		t.Errorf("third %+v, fourth %+v", third, fourth)
	}
	if b.Reset(); b.Len() != 0 {
		t.Error("events are left after a reset")
	}
}

func TestBufferSteps(t *testing.T) {
	pub, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	replay, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := New(pub, replay, Config{BufferSteps: 3, Topic: "kv"})
	for i := range 10 {
		if seq := p.PublishPayload([]byte{byte(i)}); seq != uint64(i) {
			t.Fatalf("sequence number %d, want %d", seq, i)
		}
	}
	c, err := zmtp.Dial(context.Background(), nil, p.ReplayEndpoint(), zmtp.Dealer, 1<<10)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.WriteMessage(nil, binary.BigEndian.AppendUint64(nil, 2)); err != nil {
		t.Fatal(err)
	}
	var got []byte
	for {
		frames, err := c.ReadMessage()
		if err != nil || len(frames) != 4 {
			t.Fatalf("%q, %v", frames, err)
		}
		if binary.BigEndian.Uint64(frames[2]) == 1<<64-1 {
			break
		}
		got = append(got, frames[3]...)
	}
	if string(got) != "\x07\x08\x09" {
		t.Errorf("replayed % x, want the last three", got)
	}
	if err := errors.Join(c.Close(), p.Close()); err != nil {
		t.Error(err)
	}
}
