// Polls the agent, and draws its status. All text is set as text, never as HTML.
"use strict";

const EVERY_MS = 1000, WITHIN_MS = 5000, RECENT = 60;
const WAITS = ["awaiting", "resolving", "queued", "acquiring", "waiting", "open", "sealed", "awaited", "wanted", "sending", "pending"];
const CHECKS = ["committing", "comparing", "asking", "known"];
let before = null, paused = false, opened = "", endpoint = "", keyOptions = "", shown = 0;

const at = (id) => document.getElementById(id);

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

const ms = (seconds) => seconds < 1 ? `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
const size = (bytes) => {
  const [unit, name] = bytes >= 1e9 ? [1e9, "GB"] : bytes >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return `${Number((bytes / unit).toPrecision(3))} ${name}`;
};
const rate = (value) => value >= 100 ? value.toFixed(0) : value.toFixed(1);

/** The sum of the samples of a metric over all labels. */
function sum(metrics, name) {
  return Object.entries(metrics).reduce((total, [key, value]) => key === name || key.startsWith(`${name}{`) ? total + value : total, 0);
}

/** The growth of a histogram, by upper bound; all of it without an earlier poll. */
function gained(now, then, name) {
  const bounds = [];
  for (const [key, value] of Object.entries(now)) {
    const found = key.startsWith(`${name}_bucket{`) && key.match(/le="([^"]+)"/);
    if (found) bounds.push([found[1] === "+Inf" ? Infinity : Number(found[1]), value - (then[key] || 0)]);
  }
  return bounds.sort((one, other) => one[0] - other[0]);
}

/** As Prometheus' histogram_quantile; null when nothing was observed. */
function quantile(bounds, part) {
  const total = bounds.length ? bounds[bounds.length - 1][1] : 0;
  if (!total) return null;
  let low = 0, below = 0;
  for (const [high, count] of bounds) {
    if (count >= part * total) return high === Infinity ? low : low + (high - low) * (part * total - below) / (count - below);
    [low, below] = [high, count];
  }
  return low;
}

function figure(name, value) {
  const group = document.createElement("div");
  group.append(make("dt", name), make("dd", value));
  return group;
}

function drawFigures(live) {
  const now = live.metrics, then = before ? before.metrics : {};
  const seconds = before ? live.now_s - before.now_s : 0;
  const each = (name, write = rate) => seconds > 0 ? write((sum(now, name) - sum(then, name)) / seconds) : "–";
  const isDecode = live.status.role === "decode";
  const spread = (name) => ["0.5", "0.99"].map((part) => quantile(gained(now, seconds > 0 ? then : {}, name), Number(part)));
  const both = ([p50, p99]) => p50 === null ? "–" : `${ms(p50)} / ${ms(p99)}`;
  const list = isDecode
    ? [["handoffs a second", each("kvbus_handoffs_total")], ["read a second", each("kvbus_read_bytes_total", size)],
       ["handoff p50 / p99", both(spread("kvbus_handoff_seconds"))]]
    : [["offers a second", each("kvbus_offers_total")], ["leases a second", each("kvbus_leases_total")],
       ["offer's life p50 / p99", both(spread("kvbus_offer_life_seconds"))]];
  list.push(["event loop lag p99", both(spread("kvbus_event_loop_lag_seconds")).split(" / ").pop()]);
  for (const [name, count] of Object.entries(live.status.counts)) list.push([name.replaceAll("_", " "), String(count)]);
  const engines = Object.entries(live.status.engines);
  list.push(...engines.map(([name, ready]) => [ready ? "engine" : "engine, not ready", name]));
  if (!engines.length) list.push(["engines", "none"]);
  for (const pool of Object.values(live.status.pools)) {
    const lost = pool.is_attached ? "" : ", engine gone";
    list.push([`pool of ${pool.engine_id}`, `${pool.num_offers} offers, ${size(pool.used_bytes)} of ${size(pool.size_bytes)}${lost}`]);
  }
  for (const one of live.status.processes) {
    const use = one.pid ? `pid ${one.pid}, ${one.cpu_s.toFixed(1)} s CPU, ${size(one.memory_bytes)}` : "does not run";
    const restarts = one.num_restarts ? `, restarted ${one.num_restarts} times: ${one.last_end}` : "";
    list.push([`${one.name} process`, use + restarts]);
    for (const [gpu, bytes] of Object.entries(one.gpu_bytes)) list.push([`${one.name} process on ${gpu}`, size(bytes)]);
  }
  at("figures").replaceChildren(...list.map(([name, value]) => figure(name, value)));
}

function drawFaults(faults) {
  const items = faults.map((fault) => {
    const item = make("li", fault.what, "bad");
    item.append(make("div", fault.do, "do"));
    return item;
  });
  at("faults").replaceChildren(...(items.length ? items : [make("li", "none", "good")]));
}

const end = (span, now) => span.end_s === null ? now : span.end_s;

function drawFlows(recent, now) {
  const flows = new Map();
  for (const [root, ...others] of recent) {
    const about = root.attributes;
    const key = [about.prefill_agent, about.engine_id, about.path || "–"];
    const flow = flows.get(key.join(" ")) || { key, number: 0, bytes: 0, seconds: 0, failed: 0 };
    const reading = others.filter((span) => span.name === "reading" && span.depth === 1);
    flow.number += 1;
    flow.bytes += about.num_bytes;
    flow.seconds += reading.reduce((total, span) => total + end(span, now) - span.start_s, 0);
    flow.failed += root.error ? 1 : 0;
    flows.set(key.join(" "), flow);
  }
  const rows = [...flows.values()].map((flow) => {
    const row = document.createElement("tr");
    row.append(...flow.key.map((text) => make("td", text)));
    const numbers = [flow.number, flow.bytes ? size(flow.bytes) : "–", flow.bytes && flow.seconds ? `${size(flow.bytes / flow.seconds)}/s` : "–", flow.failed];
    row.append(...numbers.map((value) => make("td", String(value), "number")));
    return row;
  });
  at("flows").replaceChildren(...rows);
}

/** One bar: each span where it lies between first and last. */
function bar(spans, first, last, now) {
  const whole = make("div", "", "bar");
  for (const span of spans) {
    const piece = make("i", "", span.error ? "bad" : WAITS.includes(span.name) ? "wait" : CHECKS.includes(span.name) ? "check" : "");
    piece.style.left = `${100 * (span.start_s - first) / (last - first)}%`;
    piece.style.width = `${Math.max(0, 100 * (end(span, now) - span.start_s) / (last - first))}%`;
    piece.title = `${span.name} ${span.about}: ${ms(end(span, now) - span.start_s)}`;
    whole.append(piece);
  }
  return whole;
}

/** What the bar of a span shows: an offer or a fetch is what its stages are. */
function partsOf(spans, index) {
  const span = spans[index], below = spans.slice(index + 1), end = below.findIndex((one) => one.depth === 0);
  const stages = (end < 0 ? below : below.slice(0, end)).filter((one) => one.depth === 1);
  return span.depth === 0 && stages.length ? stages : [span];
}

const rootOf = (spans) => spans.find((span) => span.attributes.request_id !== undefined) || spans[0];

function drawHandoffs(recent, now) {
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.id : "";
  const first = Math.min(...recent.map((spans) => spans[0].start_s));
  const items = recent.map((spans) => {
    const root = rootOf(spans), about = root.attributes, item = document.createElement("li"), button = document.createElement("button");
    const stages = spans.filter((span) => span.depth === 1);
    button.type = "button";
    button.dataset.id = about.fetch_id || about.offer_id || "";
    button.append(make("span", String(about.request_id), "id"), make("span", String(about.state), root.error ? "bad" : ""),
      make("span", ms(end(root, now) - root.start_s), "number"), bar(stages.length ? stages : [root], first, now, now));
    button.title = root.error;
    button.addEventListener("click", () => open(button.dataset.id));
    item.append(button);
    return item;
  });
  at("handoffs").replaceChildren(...(items.length ? items : [make("li", "none yet", "hint")]));
  if (focused) [...at("handoffs").querySelectorAll("button")].find((button) => button.dataset.id === focused)?.focus();
}

async function open(id) {
  opened = id;
  at("request").hidden = false;
  await drawRequest();
  at("waterfall").focus();
}

async function drawRequest() {
  const traced = await fetchJson(`/trace?id=${encodeURIComponent(opened)}`);
  const spans = traced.spans;
  at("request-title").textContent = spans.length ? `${spans[0].name} of ${rootOf(spans).attributes.request_id}` : "not remembered any more";
  const readers = traced.role === "decode" ? "" : ` --peer the decode agent's${keyOptions && " --server-key=its key"}`;
  at("request-hint").textContent = `This agent's part. Over all agents: kvbus trace ${quote(opened)} --peer ${quote(endpoint)}${keyOptions}${readers}`;
  if (!spans.length) return at("waterfall").replaceChildren();
  const first = Math.min(...spans.map((span) => span.start_s)), last = Math.max(...spans.map((span) => end(span, traced.now_s)));
  at("waterfall").replaceChildren(...spans.map((span, index) => {
    const row = make("div", "", "row"), name = make("span", `${span.name} ${span.about}`);
    name.style.paddingLeft = `${span.depth}rem`;
    row.append(name, make("span", ms(end(span, traced.now_s) - span.start_s), "number"), bar(partsOf(spans, index), first, Math.max(last, first + 1e-6), traced.now_s));
    if (span.error) row.append(make("span", span.error, "error"));
    return row;
  }));
}

function quote(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}

async function fetchJson(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(WITHIN_MS) });
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).trim()}`);
  return answer.json();
}

async function poll() {
  try {
    const live = await fetchJson(`/live?recent=${RECENT}`), status = live.status;
    if (before && before.boot !== live.boot) before = null;
    const isDecode = status.role === "decode", recent = live.recent.filter((spans) => spans.length);
    document.title = `kvbus ${status.agent_id}`;
    at("agent").textContent = status.agent_id;
    at("state").textContent = `${status.role} agent, ${status.draining ? "draining" : "serving"}; ${status.peer_endpoint}`;
    at("state").className = "";
    endpoint = status.peer_endpoint;
    keyOptions = live.key_options;
    at("flows-part").hidden = !isDecode;
    drawFaults(live.status.faults);
    drawFigures(live);
    if (isDecode) drawFlows(recent, live.now_s);
    drawHandoffs(recent, live.now_s);
    if (opened) await drawRequest();
    before = live;
    document.body.dataset.polls = String(shown += 1);
  } catch (error) {
    at("state").textContent = `the agent does not answer: ${error.message}`;
    at("state").className = "bad";
    before = null;
  }
}

async function again() {
  if (!paused && !document.hidden) await poll();
  setTimeout(again, EVERY_MS);
}

at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").textContent = paused ? "Resume" : "Pause";
  at("pause").setAttribute("aria-pressed", String(paused));
});
at("close").addEventListener("click", () => {
  const id = opened;
  opened = "";
  at("request").hidden = true;
  [...at("handoffs").querySelectorAll("button")].find((button) => button.dataset.id === id)?.focus();
});
at("handoffs").addEventListener("keydown", (event) => {
  const buttons = [...at("handoffs").querySelectorAll("button")], index = buttons.indexOf(document.activeElement);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (index < 0 || !step) return;
  event.preventDefault();
  buttons[Math.min(buttons.length - 1, Math.max(0, index + step))].focus();
});
at("request").addEventListener("keydown", (event) => { if (event.key === "Escape") at("close").click(); });
again();
