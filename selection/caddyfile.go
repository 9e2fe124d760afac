// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"net/http"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/dustin/go-humanize"
)

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy kv_cache_aware {
//		name             <name>
//		match_weight     <factor>
//		request_cost     <tokens>
//		kv_capacity      <tokens>
//		max_body         <size>
//		kv_events        <address>
//		kv_events_replay <address>
//		api_key          <key>
//		pin_header       <field>
//		tenant           <text>
//		queue_off
//		queue_max        <requests>
//		queue_wait       <duration>
//		queue_full       send|refuse
//		queue_priority   <placeholder>|body
//		queue_fair       <placeholder>
//		fallback         <policy>
//		shadow           <policy>
//		share            <percent> <policy>
//		capture          <file> {
//			roll_size <size>
//			roll_keep <count>
//		}
//		metrics_off
//		metrics_uri      <path>
//		metrics_port     <port>
//		metrics_scheme   http|https
//		metrics_interval <duration>
//		metrics_timeout  <duration>
//		metrics_headers {
//			<field> [<values...>]
//		}
//	}
func (p *KVCacheAware) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return eachOption(d, func() error {
		switch d.Val() {
		case "name":
			return parse(d, &p.Name, text)
		case "match_weight":
			return parse(d, &p.MatchWeight, positiveFloat)
		case "request_cost":
			return parse(d, &p.RequestCost, positiveFloat)
		case "kv_capacity":
			return parse(d, &p.KVCapacity, positiveInt)
		case "max_body":
			return parse(d, &p.MaxBody, size)
		case "kv_events":
			return p.events().unmarshal(d, &p.KVEvents.Endpoint)
		case "kv_events_replay":
			return p.events().unmarshal(d, &p.KVEvents.Replay)
		case "api_key":
			return parse(d, &p.APIKey, text)
		case "pin_header":
			return parse(d, &p.PinHeader, text)
		case "tenant":
			return parse(d, &p.Tenant, text)
		case "fallback":
			return unmarshalPolicy(d, &p.FallbackRaw)
		case "shadow":
			return p.unmarshalShadow(d)
		case "share":
			return p.unmarshalShare(d)
		case "capture":
			p.Capture = new(Capture)
			return p.Capture.unmarshal(d)
		case "queue_off", "queue_max", "queue_wait", "queue_full", "queue_priority", "queue_fair":
			if p.Queue == nil {
				p.Queue = new(Queue)
			}
			return p.Queue.unmarshalOption(d)
		default:
			if p.Metrics == nil {
				p.Metrics = new(Polling)
			}
			return p.Metrics.unmarshalOption(d)
		}
	})
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy prefix_hash {
//		name        <name>
//		prefix      <size>
//		header      <field>
//		load_factor <factor>
//		slack       <tokens>
//		seed        <text>
//		tenant      <text>
//		max_body    <size>
//		fallback    <policy>
//		capture     <file> {
//			roll_size <size>
//			roll_keep <count>
//		}
//	}
func (p *PrefixHash) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return eachOption(d, func() error {
		switch d.Val() {
		case "name":
			return parse(d, &p.Name, text)
		case "prefix":
			return parse(d, &p.Prefix, size)
		case "header":
			return parse(d, &p.Header, text)
		case "load_factor":
			return parse(d, &p.LoadFactor, positiveFloat)
		case "slack":
			return parse(d, &p.Slack, positiveInt)
		case "seed":
			return parse(d, &p.Seed, text)
		case "tenant":
			return parse(d, &p.Tenant, text)
		case "max_body":
			return parse(d, &p.MaxBody, size)
		case "fallback":
			return unmarshalPolicy(d, &p.FallbackRaw)
		case "capture":
			p.Capture = new(Capture)
			return p.Capture.unmarshal(d)
		default:
			return d.Errf("unrecognized option '%s'", d.Val())
		}
	})
}

func (p *KVCacheAware) events() *Events {
	if p.KVEvents == nil {
		p.KVEvents = new(Events)
	}
	return p.KVEvents
}

func (*Events) unmarshal(d *caddyfile.Dispenser, address *string) error {
	err := parse(d, address, text)
	*address = unshorten.Replace(*address)
	return err
}

func (q *Queue) unmarshalOption(d *caddyfile.Dispenser) error {
	switch d.Val() {
	case "queue_off":
		if d.NextArg() {
			return d.ArgErr()
		}
		q.Off = true
		return nil
	case "queue_max":
		return parse(d, &q.MaxRequests, positiveInt)
	case "queue_wait":
		return parse(d, &q.MaxWait, duration)
	case "queue_full":
		return parse(d, &q.Full, sendOrRefuse)
	case "queue_priority":
		return parse(d, &q.Priority, text)
	default: // queue_fair
		return parse(d, &q.Fair, text)
	}
}

func (p *Polling) unmarshalOption(d *caddyfile.Dispenser) error {
	switch d.Val() {
	case "metrics_off":
		if d.NextArg() {
			return d.ArgErr()
		}
		p.Off = true
		return nil
	case "metrics_uri":
		return parse(d, &p.URI, text)
	case "metrics_port":
		return parse(d, &p.Port, positiveInt)
	case "metrics_scheme":
		return parse(d, &p.Scheme, text)
	case "metrics_interval":
		return parse(d, &p.Interval, duration)
	case "metrics_timeout":
		return parse(d, &p.Timeout, duration)
	case "metrics_headers":
		if d.NextArg() {
			return d.ArgErr()
		}
		p.Headers = make(http.Header)
		for nesting := d.Nesting(); d.NextBlock(nesting); {
			field, values := d.Val(), d.RemainingArgs()
			if len(values) == 0 {
				values = []string{""}
			}
			p.Headers[http.CanonicalHeaderKey(field)] = append(p.Headers.Values(field), values...)
		}
		return nil
	}
	return d.Errf("unrecognized option '%s'", d.Val())
}

// eachOption calls read for each option of a policy's block, with the
// dispenser at its name.
func eachOption(d *caddyfile.Dispenser, read func() error) error {
	d.Next() // consume policy name
	if d.NextArg() {
		return d.ArgErr()
	}
	seen := make(options)
	for d.NextBlock(0) {
		if err := seen.add(d); err != nil {
			return err
		}
		if err := read(); err != nil {
			return err
		}
	}
	return nil
}

// options notes which options a block has, so that none is given twice.
type options map[string]bool

func (o options) add(d *caddyfile.Dispenser) error {
	if o[d.Val()] {
		return d.Errf("%s already specified", d.Val())
	}
	o[d.Val()] = true
	return nil
}

// parse reads the one argument of an option.
func parse[T any](d *caddyfile.Dispenser, into *T, read func(string) (T, string)) error {
	option := d.Val()
	if !d.NextArg() {
		return d.ArgErr()
	}
	v, wanted := read(d.Val())
	if wanted != "" {
		return d.Errf("%s is '%s', but must be %s", option, d.Val(), wanted)
	}
	if d.NextArg() {
		return d.ArgErr()
	}
	*into = v
	return nil
}

// The readers below return what they read, or else what they wanted.

func text(s string) (string, string) {
	if s == "" {
		return "", "given"
	}
	return s, ""
}

func positiveFloat(s string) (float64, string) {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f > 0 && f < 1e12) {
		return 0, "a positive number"
	}
	return f, ""
}

func positiveInt(s string) (int, string) {
	n, err := strconv.Atoi(s)
	if err != nil || n <= 0 {
		return 0, "a positive whole number"
	}
	return n, ""
}

func size(s string) (int64, string) {
	n, err := humanize.ParseBytes(s)
	if err != nil || n == 0 || n > 1<<40 {
		return 0, "a positive size, such as 4MiB"
	}
	return int64(n), ""
}

func sendOrRefuse(s string) (string, string) {
	if s != sendWhenFull && s != refuseWhenFull {
		return "", sendWhenFull + " or " + refuseWhenFull
	}
	return s, ""
}

func duration(s string) (caddy.Duration, string) {
	d, err := caddy.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, "a positive duration, such as 1s"
	}
	return caddy.Duration(d), ""
}

// Interface guards
var (
	_ caddyfile.Unmarshaler = (*KVCacheAware)(nil)
	_ caddyfile.Unmarshaler = (*PrefixHash)(nil)
)
