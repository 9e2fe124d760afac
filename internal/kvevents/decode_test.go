// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

type goldenFile struct {
	TS        float64
	Tokens    []uint32
	HashInt64 []uint64 `json:"hash_int64"`
	Samples   []struct {
		Generation string
		HashType   string `json:"hash_type"`
		BatchLen   int    `json:"batch_len"`
		PayloadHex string `json:"payload_hex"`
	}
}

func readJSON(t testing.TB, name string, into any) {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func fromHex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func golden(t testing.TB) goldenFile {
	t.Helper()
	var g goldenFile
	readJSON(t, "golden.json", &g)
	if len(g.Samples) < 10 {
		t.Fatalf("golden.json has %d samples, want one per generation", len(g.Samples))
	}
	return g
}

func TestDecodeGolden(t *testing.T) {
	g := golden(t)
	d := NewDecoder(Limits{})
	for _, s := range g.Samples {
		t.Run(s.Generation, func(t *testing.T) {
			b, err := d.Decode(fromHex(t, s.PayloadHex))
			if err != nil {
				t.Fatal(err)
			}
			if b.Skipped != (Skipped{}) {
				t.Errorf("skipped %+v, want nothing", b.Skipped)
			}
			if got := float64(b.Time.UnixMicro()) / 1e6; got < g.TS-1e-5 || got > g.TS+1e-5 {
				t.Errorf("time %f, want %f", got, g.TS)
			}
			if len(b.Events) != 4 {
				t.Fatalf("%d events, want 4", len(b.Events))
			}
			first, second, removed, cleared := b.Events[0], b.Events[1], b.Events[2], b.Events[3]
			if first.Kind != BlockStored || first.HasParent || !slices.Equal(first.Tokens, g.Tokens[:16]) || first.BlockSize != 16 {
				t.Errorf("first event %+v", first)
			}
			wantHash := BlockHash(g.HashInt64[0])
			if first.Hashes[0] != wantHash {
				t.Errorf("first hash %d, want %d", first.Hashes[0], wantHash)
			}
			if second.Kind != BlockStored || !second.HasParent || second.Parent != wantHash || len(second.Hashes) != 2 || !slices.Equal(second.Tokens, g.Tokens) {
				t.Errorf("second event %+v", second)
			}
			if removed.Kind != BlockRemoved || len(removed.Hashes) != 1 {
				t.Errorf("third event %+v", removed)
			}
			if cleared.Kind != AllBlocksCleared {
				t.Errorf("fourth event %+v", cleared)
			}
			checkGeneration(t, s.Generation, first)
		})
	}
}

// checkGeneration checks the fields that came with later generations on the event that has an adapter and extra keys.
func checkGeneration(t *testing.T, generation string, ev Event) {
	t.Helper()
	since := func(prefixes ...string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(generation, p) })
	}
	named := !since("v0.9", "v0.10")
	if want := map[bool]string{true: "sql-lora", false: "lora_id:1"}[named]; ev.LoRA != want {
		t.Errorf("adapter %q, want %q", ev.LoRA, want)
	}
	hasExtra := named && !since("v0.14")
	want := []Extra{SaltExtra("tenant-a-salt")}
	if !hasExtra {
		want = nil
	}
	if !slices.Equal(ev.Extra, want) {
		t.Errorf("extra %v, want %v (the adapter's name left out)", ev.Extra, want)
	}
	if group := map[bool]int{true: 0, false: NoGroup}[hasExtra && !since("v0.17")]; ev.Group != group {
		t.Errorf("group %d, want %d", ev.Group, group)
	}
	if kind := map[bool]Attention{true: FullAttention}[hasExtra && !since("v0.17", "v0.20")]; ev.Attention != kind {
		t.Errorf("attention %d, want %d", ev.Attention, kind)
	}
}

func TestDecodeLive(t *testing.T) {
	var live struct {
		Live []struct {
			What        string
			Frames      []string
			DecodedHead struct {
				Rank   int
				Events []struct {
					Type      string
					Hashes    []uint64 `json:"block_hashes"`
					Parent    *uint64  `json:"parent_block_hash"`
					BlockSize int      `json:"block_size"`
				}
			} `json:"decoded_head"`
		}
	}
	readJSON(t, "live_0.32.json", &live)
	d := NewDecoder(Limits{})
	for _, m := range live.Live {
		t.Run(m.What, func(t *testing.T) {
			b, err := d.Decode(fromHex(t, m.Frames[2]))
			if err != nil {
				t.Fatal(err)
			}
			if b.Skipped != (Skipped{}) || b.Rank != m.DecodedHead.Rank || len(b.Events) < len(m.DecodedHead.Events) {
				t.Fatalf("batch %+v, want %+v", b, m.DecodedHead)
			}
			for i, want := range m.DecodedHead.Events {
				ev := b.Events[i]
				if ev.Kind.String() != want.Type || ev.HasParent != (want.Parent != nil) || ev.BlockSize != want.BlockSize {
					t.Errorf("event %d: %+v, want %+v", i, ev, want)
				}
				if want.Parent != nil && uint64(ev.Parent) != *want.Parent {
					t.Errorf("event %d: parent %d, want %d", i, ev.Parent, *want.Parent)
				}
				for j := range want.Hashes {
					if uint64(ev.Hashes[j]) != want.Hashes[j] {
						t.Errorf("event %d: hash %d is %d, want %d", i, j, ev.Hashes[j], want.Hashes[j])
					}
				}
				if ev.Kind == BlockStored && len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize {
					t.Errorf("event %d: %d tokens for %d blocks of %d", i, len(ev.Tokens), len(ev.Hashes), ev.BlockSize)
				}
			}
		})
	}
	var ranks []struct {
		Port   int
		Frames []string
	}
	readJSON(t, "live_0.32_dp2.json", &ranks)
	for _, m := range ranks {
		b, err := d.Decode(fromHex(t, m.Frames[2]))
		if err != nil || b.Rank != m.Port-5557 || len(b.Events) == 0 {
			t.Errorf("port %d: batch %+v, error %v", m.Port, b, err)
		}
	}
}

// wire builds msgpack by hand.
type wire []byte

func (w wire) array(n uint32) wire { return msgp.AppendArrayHeader(w, n) }
func (w wire) mapping(n uint32) wire {
	return msgp.AppendMapHeader(w, n)
}
func (w wire) str(s string) wire    { return msgp.AppendString(w, s) }
func (w wire) num(i int64) wire     { return msgp.AppendInt64(w, i) }
func (w wire) null() wire           { return msgp.AppendNil(w) }
func (w wire) float(f float64) wire { return msgp.AppendFloat64(w, f) }
func (w wire) bin(b []byte) wire    { return msgp.AppendBytes(w, b) }
func (w wire) raw(b []byte) wire    { return append(w, b...) }
func (w wire) nums(list ...int64) wire {
	w = w.array(uint32(len(list)))
	for _, i := range list {
		w = w.num(i)
	}
	return w
}

// batchOf wraps events into a batch of three elements.
func batchOf(events ...wire) wire {
	w := wire{}.array(3).float(1795966073.5).array(uint32(len(events)))
	for _, e := range events {
		w = w.raw(e)
	}
	return w.num(0)
}

// storedArray is a BlockStored of the first generation.
func storedArray(hash int64, tokens ...int64) wire {
	return wire{}.array(6).str("BlockStored").nums(hash).null().nums(tokens...).num(int64(len(tokens))).null()
}

func TestDecodeOddEvents(t *testing.T) {
	good := storedArray(7, 1, 2, 3, 4)
	manyHashes := make([]int64, 20)
	for _, tc := range []struct {
		name    string
		payload wire
		events  int
		skipped Skipped
	}{
		{"empty batch", batchOf(), 0, Skipped{}},
		{"nil events", wire{}.array(2).float(1).null(), 0, Skipped{}},
		{"unknown tag", batchOf(good, wire{}.array(2).str("BlockMoved").num(1), good), 2, Skipped{Unknown: 1}},
		{"unknown map tag", batchOf(wire{}.mapping(1).str("type").str("BlockMoved"), good), 1, Skipped{Unknown: 1}},
		{"event is a number", batchOf(wire{}.num(3), good), 1, Skipped{Malformed: 1}},
		{"event is an empty array", batchOf(wire{}.array(0), good), 1, Skipped{Malformed: 1}},
		{"tag is a number", batchOf(wire{}.nums(1, 2), good), 1, Skipped{Malformed: 1}},
		{"map without type", batchOf(wire{}.mapping(1).str("block_hashes").nums(1), good), 1, Skipped{Malformed: 1}},
		{"hashes missing", batchOf(wire{}.array(1).str("BlockRemoved"), good), 1, Skipped{Malformed: 1}},
		{"hash is a float", batchOf(wire{}.array(2).str("BlockRemoved").array(1).float(1), good), 1, Skipped{Malformed: 1}},
		{"token is negative", batchOf(storedArray(1, 5, -5), good), 1, Skipped{Malformed: 1}},
		{"token over 32 bits", batchOf(storedArray(1, 5, 1<<32), good), 1, Skipped{Malformed: 1}},
		{"too many blocks", batchOf(wire{}.array(2).str("BlockRemoved").nums(manyHashes...), good), 1, Skipped{TooBig: 1}},
		{"too many tokens", batchOf(storedArray(1, make([]int64, 40)...), good), 1, Skipped{TooBig: 1}},
		{"too many events", batchOf(good, good, good, good, good, good), 4, Skipped{TooBig: 2}},
		{"unknown positions", batchOf(wire{}.array(5).str("BlockRemoved").nums(1).null().null().raw(wire{}.mapping(1).str("a").nums(1, 2))), 1, Skipped{}},
		{"unknown keys", batchOf(wire{}.mapping(3).str("type").str("AllBlocksCleared").num(5).num(6).str("x").nums(1)), 1, Skipped{}},
		{"map batch", wire{}.mapping(4).str("ts").num(1795966073).str("new").null().str("events").array(1).raw(good).str("attn_dp_rank").num(3), 1, Skipped{}},
		{"four batch elements", wire{}.array(4).float(1).array(1).raw(good).num(0).str("later"), 1, Skipped{}},
		{"nil rank and time", wire{}.array(3).null().array(1).raw(good).null(), 1, Skipped{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, err := NewDecoder(Limits{Events: 4, Blocks: 16, Tokens: 32}).Decode(tc.payload)
			if err != nil {
				t.Fatal(err)
			}
			if len(b.Events) != tc.events || b.Skipped != tc.skipped {
				t.Errorf("%d events, skipped %+v; want %d, %+v", len(b.Events), b.Skipped, tc.events, tc.skipped)
			}
		})
	}
}

func TestDecodeHashForms(t *testing.T) {
	digest := fromHex(t, "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f")
	for _, tc := range []struct {
		name string
		hash wire
		want BlockHash
	}{
		{"negative", wire{}.num(-3), ^BlockHash(2)},
		{"least int64", wire{}.num(-1 << 63), 1 << 63},
		{"largest uint64", msgp.AppendUint64(nil, 1<<64-1), 1<<64 - 1},
		{"small", wire{}.num(5), 5},
		{"sha256", wire{}.bin(digest), 0x18191a1b1c1d1e1f},
		{"sha256 as text", wire{}.str(string(digest)), 0x18191a1b1c1d1e1f},
		{"xxh3-128", wire{}.bin(digest[:16]), 0x08090a0b0c0d0e0f},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ev := wire{}.array(2).str("BlockRemoved").array(1).raw(tc.hash)
			b, err := NewDecoder(Limits{}).Decode(batchOf(ev))
			if err != nil || len(b.Events) != 1 || b.Events[0].Hashes[0] != tc.want {
				t.Errorf("batch %+v, error %v; want hash %x", b, err, uint64(tc.want))
			}
		})
	}
	a, _ := NewDecoder(Limits{}).Decode(batchOf(wire{}.array(2).str("BlockRemoved").array(2).str("abc").str("abd")))
	if h := a.Events[0].Hashes; h[0] == h[1] {
		t.Errorf("two texts have one hash %x", uint64(h[0]))
	}
}

func TestDecodeTiers(t *testing.T) {
	for medium, want := range map[string]Tier{
		"GPU": Device, "": Device, "CPU": Host, "CPU_PINNED": Host, "OBJ": Remote, "EXTERNAL": Remote,
		"DISK": Disk, "STORAGE": Disk, "FS": Disk, "drum memory": Disk,
	} {
		ev := wire{}.array(3).str("BlockRemoved").nums(1).str(medium)
		b, err := NewDecoder(Limits{}).Decode(batchOf(ev))
		if err != nil || b.Events[0].Tier != want {
			t.Errorf("medium %q: %+v, error %v; want %v", medium, b, err, want)
		}
	}
	ev := wire{}.mapping(4).str("type").str("BlockRemoved").str("block_hashes").nums(1).str("medium").str("CPU").str("locality").str("REMOTE")
	if b, err := NewDecoder(Limits{}).Decode(batchOf(ev)); err != nil || b.Events[0].Tier != Remote {
		t.Errorf("remote locality: %+v, error %v", b, err)
	}
}

func TestDecodeTruncated(t *testing.T) {
	d := NewDecoder(Limits{})
	for _, s := range golden(t).Samples {
		payload := fromHex(t, s.PayloadHex)
		for n := range payload {
			if _, err := d.Decode(payload[:n]); err == nil && n < len(payload)-1 {
				t.Fatalf("%s: the first %d of %d bytes decode without error", s.Generation, n, len(payload))
			}
		}
	}
	for _, payload := range []string{"", "\xc0", "\x05", "\x91\x01", "\xdd\xff\xff\xff\xff", "\xdf\xff\xff\xff\xff", "\x80", "hello"} {
		if _, err := d.Decode([]byte(payload)); err == nil {
			t.Errorf("%q decodes without error", payload)
		}
	}
	if _, err := NewDecoder(Limits{PayloadBytes: 10}).Decode(make([]byte, 11)); !errors.Is(err, errTooBig) {
		t.Errorf("error %v, want %v", err, errTooBig)
	}
}

// FuzzExtent checks the own skipping against the library's.
func FuzzExtent(f *testing.F) {
	for _, s := range golden(f).Samples {
		f.Add(fromHex(f, s.PayloadHex))
	}
	for lead := range 256 {
		f.Add(append([]byte{byte(lead)}, make([]byte, 40)...))
		f.Add([]byte{byte(lead), 0, 0, 0, 2, 1, 1, 1, 1})
		f.Add([]byte{byte(lead), 0, 2, 1, 1, 1, 1})
		f.Add([]byte{byte(lead), 2, 1, 1, 1, 1})
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return // the library gives up on deep nesting
		}
		n, err := extent(b)
		rest, want := msgp.Skip(b)
		if (err == nil) != (want == nil) {
			t.Fatalf("% x: error %v, want %v", b, err, want)
		}
		if err == nil && n != len(b)-len(rest) {
			t.Fatalf("% x: %d bytes, want %d", b, n, len(b)-len(rest))
		}
	})
}

func FuzzDecode(f *testing.F) {
	for _, s := range golden(f).Samples {
		f.Add(fromHex(f, s.PayloadHex))
	}
	for _, name := range []string{"live_0.32.json", "live_0.32_lora.json", "live_0.32_image.json"} {
		var live struct{ Live []struct{ Frames []string } }
		readJSON(f, name, &live)
		for _, m := range live.Live {
			f.Add(fromHex(f, m.Frames[2]))
		}
	}
	f.Add([]byte(batchOf(wire{}.array(2).str("BlockMoved").num(1))))
	limits := Limits{PayloadBytes: 1 << 16, Events: 64, Blocks: 64, Tokens: 1024}
	d := NewDecoder(limits)
	f.Fuzz(func(t *testing.T, payload []byte) {
		b, err := d.Decode(payload)
		if err != nil {
			return
		}
		if len(b.Events) > limits.Events || b.Rank < 0 {
			t.Fatalf("batch over its limits: %d events, rank %d", len(b.Events), b.Rank)
		}
		v := NewView(ViewConfig{Blocks: 128})
		for _, ev := range b.Events {
			if len(ev.Hashes) > limits.Blocks || len(ev.Tokens) > limits.Tokens || len(ev.Extra) > len(ev.Hashes) || ev.BlockSize < 0 {
				t.Fatalf("event over its limits: %+v", ev)
			}
		}
		v.Apply(b)
		checkView(t, v)
	})
}
