// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// A reload in the middle of a stream: the stream goes on, and nothing that was known is lost.
func TestReloadMidStream(t *testing.T) {
	fleet := engines(t, 3, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	homes := make(map[string]string)
	for i := range 12 {
		content := text(fmt.Sprint("prompt ", i), 2000)
		homes[content] = p.say(content).replica()
	}
	const tokens = 500
	s := p.open(text("stream", 2000), tokens)
	engine := at(t, fleet, s.replica())
	engine.Stall()
	counted := p.metric("caddy_kv_cache_decisions_total")
	for range 3 {
		p.reload(aware(fleet.Addrs(), "", ""))
	}
	if n := p.metric("caddy_kv_cache_decisions_total"); n != counted {
		t.Errorf("the reload took the count of decisions from %v to %v", counted, n)
	}
	if n := p.metric("caddy_kv_cache_replica_in_flight_requests"); n != 1 {
		t.Errorf("after the reload %v requests are in flight, want the stream", n)
	}
	engine.StallEnd()
	if err := s.rest(); err != nil || s.tokens != tokens {
		t.Errorf("the stream ended after %d of %d tokens: %v", s.tokens, tokens, err)
	}
	p.client = newClient(t) // the stream's connection ends with its configuration
	for content, home := range homes {
		a := p.say(content)
		if a.replica() != home || a.matched(t) == 0 || a.cached(t) == 0 {
			t.Errorf("%.9s moved from %s to %s (%s): matched %d, cached %d", content, home, a.replica(), a.reason(), a.matched(t), a.cached(t))
		}
	}
	if n := p.metric("caddy_kv_cache_decisions_total"); n != counted+float64(len(homes)) {
		t.Errorf("%v decisions are counted, want %v", n, counted+float64(len(homes)))
	}
	p.awaitIdle()
	p.awaitScrapes(fleet.Addrs()...)
}

// Reloads without end while requests come: none fails but for connections that Caddy cuts at a reload
// whatever the policy, and whose requests it has not seen; clients send those again.
func TestReloadUnderLoad(t *testing.T) {
	fleet := engines(t, 3, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	var done atomic.Bool
	reloads := make(chan int)
	go func() {
		n := 0
		for ; !done.Load(); n++ {
			if status, answer := p.load(p.caddyfile(aware(fleet.Addrs(), "", ""))); status != http.StatusOK {
				t.Errorf("reload %d: %d %s", n, status, answer)
				break
			}
		}
		reloads <- n
	}()
	var cut atomic.Int64
	inParallel(300, 8, func(i int) {
		a := p.post(chatPath, ask(text(fmt.Sprint("prompt ", i%30), 2000)))
		for a.err != nil && cut.Add(1) < 1000 {
			a = p.post(chatPath, ask(text(fmt.Sprint("prompt ", i%30), 2000)))
		}
		if err := a.bad(); err != nil {
			t.Errorf("request %d: %v", i, err)
		}
	})
	done.Store(true)
	t.Logf("%d reloads cut %d connections", <-reloads, cut.Load())
	p.reload(aware(fleet.Addrs(), "", ""))
	p.awaitIdle()
	if n := p.metric("caddy_kv_cache_decisions_total"); n < 300 || n > 300+float64(cut.Load()) {
		t.Errorf("%v decisions are counted for 300 requests and %d cut connections", n, cut.Load())
	}
	for i := range 30 {
		if a := p.say(text(fmt.Sprint("prompt ", i), 2000)); a.matched(t) == 0 || a.cached(t) == 0 {
			t.Errorf("prompt %d is forgotten: matched %d, cached %d", i, a.matched(t), a.cached(t))
		}
	}
}

// A configuration that is refused, at whatever moment, changes nothing.
func TestFailedReload(t *testing.T) {
	fleet := engines(t, 2, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	content := text("kept", 3000)
	home := p.say(content).replica()
	good := p.caddyfile(aware(fleet.Addrs(), "", ""))
	for name, config := range map[string]string{
		"syntax":         p.caddyfile(aware(fleet.Addrs(), "no_such_option", "")),
		"unknown policy": p.caddyfile(reverseProxy(fleet.Addrs(), "no_such_policy", "")),
		"validation":     p.caddyfile(reverseProxy(fleet.Addrs(), "kv_cache_aware {\nmetrics_interval 1ms\n}", "")),
		"another module": p.caddyfile(aware(fleet.Addrs(), "", "") + "reverse_proxy /x localhost:1 {\ntransport http {\ntls_trust_pool file /no/such/file\n}\n}\n"),
		"port taken":     good + fmt.Sprintf("http://%s {\n%s}\n", taken.Addr(), aware(fleet.Addrs(), "", "")),
	} {
		t.Run(name, func(t *testing.T) {
			counted := p.metric("caddy_kv_cache_decisions_total")
			if status, answer := p.load(config); status == http.StatusOK {
				t.Fatalf("the configuration was taken: %s", answer)
			}
			if n := p.metric("caddy_kv_cache_decisions_total"); n != counted || counted == 0 {
				t.Errorf("the count of decisions went from %v to %v", counted, n)
			}
			if a := p.say(content); a.replica() != home || a.matched(t) == 0 || a.cached(t) == 0 {
				t.Errorf("the prompt moved from %s to %s (%s): matched %d, cached %d", home, a.replica(), a.reason(), a.matched(t), a.cached(t))
			}
			p.awaitScrapes(fleet.Addrs()...)
		})
	}
	p.reload(aware(fleet.Addrs(), "", ""))
	if a := p.say(content); a.replica() != home || a.matched(t) == 0 {
		t.Errorf("a good configuration after all: the prompt moved from %s to %s (%s)", home, a.replica(), a.reason())
	}
}

// Replicas that come and go with reloads: what the others hold stays where it is.
func TestUpstreamsChangeByReload(t *testing.T) {
	for _, policy := range []string{"kv_cache_aware {\nmetrics_interval 100ms\n}", "prefix_hash"} {
		t.Run(policy[:6], func(t *testing.T) {
			fleet := engines(t, 4, fast)
			addrs := fleet.Addrs()
			p := start(t, reverseProxy(addrs[:3], policy, ""))
			homes := make(map[string]string)
			for i := range 40 {
				content := text(fmt.Sprint("prompt ", i), 1500)
				homes[content] = p.say(content).replica()
			}

			p.reload(reverseProxy(addrs, policy, ""))
			moved := 0
			for content, home := range homes {
				if now := p.say(content).replica(); now != home {
					moved++
					if now != addrs[3] {
						t.Errorf("a new replica moved a prompt from %s to %s", home, now)
					}
					homes[content] = now
				}
			}
			if moved > 20 {
				t.Errorf("a new fourth replica moved %d of 40 prompts", moved)
			}
			newcomer := 0
			for i := range 80 {
				if p.say(text(fmt.Sprint("new prompt ", i), 1500)).replica() == addrs[3] {
					newcomer++
				}
			}
			if newcomer == 0 {
				t.Error("the new replica got none of 80 new prompts")
			}

			p.reload(reverseProxy(addrs[1:], policy, ""))
			for content, home := range homes {
				switch now := p.say(content).replica(); {
				case now == addrs[0]:
					t.Error("a replica that was taken out has answered")
				case home != addrs[0] && now != home:
					t.Errorf("a prompt moved from %s to %s though its home is there", home, now)
				}
			}
			await(t, "the metrics of the replica that left to go", func() bool {
				return p.metric("caddy_kv_cache_scrapes_total", "replica", addrs[0]) == 0
			})
		})
	}
}

// resolver is a DNS server that knows one name, whose addresses change.
type resolver struct {
	conn  net.PacketConn
	tcp   net.Listener // for answers that are too long for a packet, where it is asked
	addrs atomic.Pointer[[]string]
}

func startResolver(t *testing.T, addrs ...string) *resolver {
	t.Helper()
	tcp, err := net.Listen("tcp", loopback.FreeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.ListenPacket("udp", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d := &resolver{conn: conn, tcp: tcp}
	d.addrs.Store(&addrs)
	var served sync.WaitGroup
	served.Go(d.serve)
	served.Go(d.serveTCP)
	t.Cleanup(func() { _, _ = conn.Close(), tcp.Close(); served.Wait() })
	return d
}

func (d *resolver) serve() {
	buf := make([]byte, 1500)
	for {
		n, from, err := d.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		if reply := d.answer(buf[:n]); reply != nil {
			_, _ = d.conn.WriteTo(reply, from)
		}
	}
}

// serveTCP answers one query a connection.
func (d *resolver) serveTCP() {
	for {
		conn, err := d.tcp.Accept()
		if err != nil {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		var size [2]byte
		if _, err := io.ReadFull(conn, size[:]); err == nil {
			query := make([]byte, int(size[0])<<8|int(size[1]))
			if _, err := io.ReadFull(conn, query); err == nil {
				reply := d.answer(query)
				_, _ = conn.Write(append([]byte{byte(len(reply) >> 8), byte(len(reply))}, reply...))
			}
		}
		_ = conn.Close()
	}
}

// answer is nil for what is no question.
func (d *resolver) answer(question []byte) []byte {
	var query dnsmessage.Message
	if query.Unpack(question) != nil || len(query.Questions) != 1 {
		return nil
	}
	reply := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: query.ID, Response: true, RecursionAvailable: true},
		Questions: query.Questions,
	}
	if q := query.Questions[0]; q.Type == dnsmessage.TypeA {
		for _, a := range *d.addrs.Load() {
			reply.Answers = append(reply.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1},
				Body:   &dnsmessage.AResource{A: [4]byte(net.ParseIP(a).To4())},
			})
		}
	}
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}

// Replicas found by DNS: they are new objects to the policy at each request, in any order, and come and go.
func TestDynamicUpstreams(t *testing.T) {
	_, port, _ := net.SplitHostPort(loopback.FreeAddr(t))
	hosts := []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"}
	fleet := make(enginesim.Fleet, len(hosts))
	for i, host := range hosts {
		config := fast
		config.Addr = net.JoinHostPort(host, port)
		s, err := enginesim.StartServer(config)
		if err != nil {
			t.Skipf("this system has no %s: %v", host, err)
		}
		t.Cleanup(s.Close)
		fleet[i] = s
	}
	dns := startResolver(t, hosts[0], hosts[1])
	source := fmt.Sprintf("dynamic a {\nname llm.test\nport %s\nrefresh 50ms\nversions ipv4\nresolvers %s\n}", port, dns.conn.LocalAddr())
	p := start(t, aware(nil, "", source+"\nlb_retries 2\nlb_try_interval 10ms"))
	homes := make(map[string]string)
	for i := range 20 {
		content := text(fmt.Sprint("prompt ", i), 2000)
		homes[content] = p.say(content).replica()
	}
	same := func() {
		t.Helper()
		for content, home := range homes {
			if a := p.say(content); a.replica() != home || a.matched(t) == 0 || a.cached(t) == 0 {
				t.Errorf("%.9s moved from %s to %s (%s): matched %d, cached %d", content, home, a.replica(), a.reason(), a.matched(t), a.cached(t))
			}
		}
	}
	same()
	dns.addrs.Store(&[]string{hosts[1], hosts[0]})
	time.Sleep(100 * time.Millisecond) // longer than refresh: nothing else tells that the order has changed
	same()
	p.awaitScrapes(fleet.Addrs()[:2]...)

	dns.addrs.Store(&hosts)
	n := 0
	await(t, "the third replica to get a prompt", func() bool {
		n++
		return p.say(text(fmt.Sprint("new prompt ", n), 500)).replica() == fleet[2].Addr()
	})
	same()
	p.awaitScrapes(fleet.Addrs()...)

	dns.addrs.Store(&[]string{hosts[1], hosts[2]})
	await(t, "the first replica to get no more prompts", func() bool {
		used := make([]string, 0, 20)
		for content := range homes {
			used = append(used, p.say(content).replica())
		}
		return !slices.Contains(used, fleet[0].Addr())
	})
}
