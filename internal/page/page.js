
'use strict';

// What is shown comes from engines and configurations and is only ever set as
// text. Elements are kept from one look to the next, so that nothing flickers
// and a selection stays.

const every = 1000; // ms between two looks
const one = (in_, what) => in_.querySelector(what);
const asked = new URLSearchParams(location.search).get('fleet');

// say puts text into the places of an element that are named for it.
function say(in_, texts) {
  for (const [name, text] of Object.entries(texts)) {
    const at = one(in_, `[data-f="${name}"]`);
    if (at.textContent !== text) at.textContent = text;
  }
}

// copy is a new element as one of the page's templates has it.
const copy = template => document.getElementById(template).content.firstElementChild.cloneNode(true);

// list keeps one element for each item, in order: those of items that stay,
// known by their key, are filled anew.
function list(in_, items, template, key, fill) {
  const before = new Map([...in_.children].map(e => [e.key, e]));
  items.forEach((item, i) => {
    const k = key(item, i);
    let e = before.get(k);
    before.delete(k);
    if (!e) {
      e = template instanceof Function ? template(item) : copy(template);
      e.key = k;
    }
    fill(e, item, i);
    if (in_.children[i] !== e) in_.insertBefore(e, in_.children[i] || null);
  });
  for (const e of before.values()) e.remove();
}

const known = v => v !== undefined && v !== null;
const clamp = v => Math.max(0, Math.min(1, v || 0));
const share = (bar, v) => one(bar, 'i').style.setProperty('--share', clamp(v));

// short is a count in a few characters.
function short(v) {
  if (!known(v)) return '–';
  for (const unit of ['', 'k', 'M']) {
    if (v < 9.95 && unit) return v.toFixed(1) + unit;
    if (v < 999.5) return v.toFixed(0) + unit;
    v /= 1000;
  }
  return v.toFixed(0) + 'G';
}

const percent = v => known(v) ? Math.round(100 * v) + '\u202f%' : '–';
const many = (n, what) => n + ' ' + what + (n === 1 ? '' : 's');

function ago(s) {
  if (!known(s)) return '–';
  if (s < 99.5) return s.toFixed(0) + '\u202fs';
  if (s < 5970) return (s / 60).toFixed(0) + '\u202fmin';
  return (s / 3600).toFixed(0) + '\u202fh';
}

const clock = at => new Date(at).toLocaleTimeString('en-GB');
const hue = hex => parseInt(hex.slice(0, 6), 16) % 360;

// draw draws a curve of per cents over the whole width; where nothing is known
// it has a gap, and a point alone is a dot.
function draw(svg, curve, width) {
  const step = width / (curve.length - 1 || 1);
  let line = '', area = '';
  for (let i = 0; i < curve.length; i++) {
    if (curve[i] < 0) continue;
    const from = i;
    while (i + 1 < curve.length && curve[i + 1] >= 0) i++;
    const points = [];
    for (let j = from; j <= i; j++) points.push(`${(j * step).toFixed(1)} ${(100 - 0.96 * curve[j]).toFixed(1)}`);
    if (from === i) points.push(points[0]);
    line += 'M' + points.join('L');
    area += `M${(from * step).toFixed(1)} 100L` + points.join('L') + `L${(i * step).toFixed(1)} 100Z`;
  }
  one(svg, '.line').setAttribute('d', line);
  one(svg, '.area').setAttribute('d', area);
}

// labels are addresses without what all of them begin or end with: a host or a
// port in common says nothing.
function labels(addresses) {
  const cut = new Map(addresses.map(a => [a, a]));
  if (addresses.length < 2) return cut;
  const at = addresses.map(a => a.lastIndexOf(':'));
  const hosts = addresses.map((a, i) => at[i] < 0 ? a : a.slice(0, at[i]));
  const ports = addresses.map((a, i) => at[i] < 0 ? '' : a.slice(at[i]));
  const same = list_ => list_.every(x => x === list_[0]);
  addresses.forEach((a, i) => {
    if (same(ports)) cut.set(a, hosts[i]);
    else if (same(hosts)) cut.set(a, ports[i]);
  });
  if (!same(ports)) return cut;
  const domains = hosts.map(h => /^[^.:]*[a-z][^.:]*(\..*)$/i.exec(h)?.[1]);
  if (domains[0] && same(domains)) addresses.forEach((a, i) => cut.set(a, hosts[i].slice(0, -domains[i].length)));
  return cut;
}

const kinds = { eligible: 'eligible', drained: 'out', asleep: 'out', full: 'out' };

// work is how many seconds a replica's queue takes. A bar is as long as its place
// when it is longBar, or the fleet's longest.
const work = r => r.rate > 0 ? r.queued / r.rate : 0;
const longBar = 4;

function fillReplica(e, r, longest, decided) {
  const warming = r.warming && r.state === 'eligible';
  say(e, {
    address: r.address,
    state: warming ? 'warming up' : r.state,
    engine: [r.engine, ...(r.models || [])].filter(Boolean).join(' · '),
    flight: short(r.in_flight), queued: short(r.queued),
    running: short(r.running), waiting: short(r.waiting),
    kv: percent(r.kv), hits: percent(r.hits),
    chosen: decided ? percent(r.chosen / decided) : '–', age: ago(r.age),
  });
  one(e, '.state').className = 'state ' + (warming ? 'warming' : kinds[r.state] || 'bad');
  share(one(e, '.load .bar'), work(r) / longest);
  one(e, '.load').title = `about ${work(r).toFixed(1)}\u202fs of prefill at ${short(r.rate)} tokens a second`;
  share(one(e, '.kv .bar'), r.kv);
  one(e, '.kv .bar').classList.toggle('tight', r.kv > 0.9);
  one(e, '[data-f="waiting"]').classList.toggle('some', r.waiting > 0);
  one(e, '.age .val').classList.toggle('old', !known(r.age) || r.age > 10);
  draw(one(e, 'svg'), r.curve, 120);
}

function fillKey(e, hash) {
  const key = one(e, '.key');
  key.classList.toggle('none', !hash);
  if (hash) key.style.setProperty('--hue', hue(hash));
  key.title = hash || 'without a prompt';
}

function fillDecision(e, d, label, why) {
  say(e, {
    time: clock(d.at), key: d.key ? d.key.slice(0, 8) : '–', to: label(d.replica),
    reason: d.reason + (d.attempt > 1 ? ' ↻' : ''), tokens: d.prompt_tokens > 0 ? short(d.prompt_tokens) : '–',
    cost: (known(d.cost) ? short(d.cost) + (known(d.next_cost) ? ' < ' + short(d.next_cost) : '') : '')
      + (d.waited_seconds >= 0.05 ? ` +${d.waited_seconds.toFixed(1)}\u202fs` : ''),
  });
  fillKey(e, d.key);
  const cached = d.prompt_tokens > 0 ? d.hit_tokens / d.prompt_tokens : 0;
  share(one(e, '.part .bar'), cached);
  one(e, '.to').title = d.replica;
  one(e, '.why').title = (why.get(d.reason) || '') + (d.attempt > 1 ? `; attempt ${d.attempt}` : '');
  one(e, '.part').title = `${short(d.prompt_tokens)} tokens, ${percent(cached)} of them believed cached there`;
  one(e, '.cost').title = !known(d.cost) ? '' : `costs ${short(d.cost)} tokens of queue here`
    + (known(d.next_cost) ? `, ${short(d.next_cost)} at the next best` : '')
    + (d.waited_seconds > 0 ? `; was held back for ${d.waited_seconds.toFixed(2)} s` : '');
}

function fillPrefix(e, p, f, label, most) {
  say(e, { hash: p.hash.slice(0, 8), tokens: short(p.tokens), prompts: short(p.prompts) });
  fillKey(e, p.hash);
  share(one(e, '.bar'), p.tokens * (p.prompts - 1) / most);
  const holders = one(e, '.holders');
  const who = p.holders || [];
  holders.setAttribute('aria-label', who.length ? 'held by ' + who.map(label).join(', ') : 'held by none any more');
  holders.title = holders.getAttribute('aria-label');
  if (f.replicas.length > 16) {
    holders.textContent = `held by ${who.length} of ${f.replicas.length}`;
    return;
  }
  list(holders, f.replicas, () => document.createElement('i'), r => r.address, (dot, r) => {
    dot.className = who.includes(r.address) ? 'holds' : '';
  });
}

function fillFleet(e, f) {
  const sum = what => f.replicas.reduce((n, r) => n + r[what], 0);
  say(e, {
    name: f.name, policy: f.policy, ago: `${f.minutes} minutes ago`,
    hits: known(f.hits) ? String(Math.round(100 * f.hits)) : '–',
    flight: short(sum('in_flight')), queued: short(sum('queued')), waiting: short(f.waiting),
  });
  one(e, '.big').classList.toggle('known', known(f.hits));
  one(e, '[data-f="waiting"]').classList.toggle('some', f.waiting > 0);
  const trend = one(e, '.trend svg');
  draw(trend, f.curve, 600);
  trend.setAttribute('aria-label', `Hit rate over the last ${f.minutes} minutes, now and on average ${percent(f.hits)}`);

  const odd = one(e, '.odd');
  odd.hidden = !f.oddities.length;
  list(odd, f.oddities, () => {
    const li = document.createElement('li');
    li.append(document.createElement('b'), ' ', document.createElement('span'));
    return li;
  }, (_, i) => i, (li, o) => {
    one(li, 'b').textContent = o.replica;
    one(li, 'span').textContent = o.what;
  });

  const longest = Math.max(longBar, ...f.replicas.map(work));
  const decided = f.reasons.reduce((n, r) => n + r.count, 0);
  list(one(e, '.replicas .body'), f.replicas, 'replica', r => r.address, (row, r) => fillReplica(row, r, longest, decided));

  const short_ = labels(f.replicas.map(r => r.address));
  const label = a => short_.get(a) || a;
  const why = new Map(f.reasons.map(r => [r.reason, r.why]));
  list(one(e, '.reasons'), f.reasons, 'reason', r => r.reason, (span, r) => {
    say(span, { share: percent(r.count / decided), reason: r.reason });
    span.title = `${r.why}: ${r.count} of the last ${decided}`;
  });
  list(one(e, '.decisions'), f.decisions, 'decision', d => d.at + d.replica + d.attempt + d.key, (li, d) => fillDecision(li, d, label, why));
  one(e, '[data-f="idle"]').hidden = f.decisions.length > 0;

  const most = Math.max(1, ...f.prefixes.map(p => p.tokens * (p.prompts - 1)));
  list(one(e, '.prefixes'), f.prefixes, 'prefix', p => p.hash, (li, p) => fillPrefix(li, p, f, label, most));
  one(e, '[data-f="alone"]').hidden = f.prefixes.length > 0;
}

function show(data) {
  const nav = one(document, 'nav');
  nav.hidden = data.names.length < 2;
  list(nav, [null, ...data.names], () => document.createElement('a'), n => n, (a, name) => {
    a.textContent = name === null ? 'all fleets' : name;
    a.href = name === null ? '?' : '?fleet=' + encodeURIComponent(name);
    if (name === asked) a.setAttribute('aria-current', 'page');
  });
  list(one(document, 'main'), data.fleets.length ? data.fleets : [null], f => f ? copy('fleet') : none(), f => f && f.name, (e, f) => {
    if (f) fillFleet(e, f);
  });
}

// none is what stands in the place of fleets where there are none.
function none() {
  const p = document.createElement('p');
  p.className = 'alone';
  p.textContent = 'No policy of the running config is kv_cache_aware or prefix_hash.';
  return p;
}

// tell says whether the page is up to date. Only a change is news to those who
// listen.
function tell(state, news) {
  document.body.className = state;
  const at = document.getElementById('news');
  if (at.textContent !== news) at.textContent = news;
}

async function look() {
  const query = new URLSearchParams({ data: '' });
  if (asked !== null) query.set('fleet', asked);
  const stop = new AbortController();
  const late = setTimeout(() => stop.abort(), 5 * every);
  try {
    const response = await fetch('?' + query, { cache: 'no-store', signal: stop.signal });
    const data = await response.json();
    if (!response.ok) throw new Error(data.error || response.statusText);
    show(data);
    document.getElementById('time').textContent = clock(data.at);
    tell('live', 'live');
  } catch (e) {
    tell('lost', e instanceof TypeError || e.name === 'AbortError' || e instanceof SyntaxError ? 'no answer since' : e.message);
  } finally {
    clearTimeout(late);
  }
}

// Nobody looks at a hidden page, and so it does not ask.
(async () => {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise(wake => setTimeout(wake, every));
  }
})();
document.addEventListener('visibilitychange', () => { if (!document.hidden) look(); });
