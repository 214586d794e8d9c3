// Draws api/state, once a second. All that comes from there is set as text: names of models are other people's.
"use strict";

const INTERVAL_MS = 1000;
const HISTORY = 120;
const COLOURS = ["--blue", "--green", "--violet", "--amber", "--cyan", "--red"];
const REASONS = {
  cold: "--quiet", evicted: "--amber", expired: "--amber", in_flight: "--blue", recovering: "--blue",
  parent_missing: "--violet", wrong_namespace: "--violet", node_down: "--red", verify_failed: "--red",
};

const history = [];
let before = null;

const at = (id) => document.getElementById(id);
const colour = (name) => `var(${name})`;

function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  if (options.class) made.className = options.class;
  if (options.title) made.title = options.title;
  for (const [name, value] of Object.entries(options.style || {})) made.style[name] = value;
  made.append(...children.filter((child) => child !== null));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "fill" || name === "stroke") made.style[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function size(bytes) {
  for (const [unit, one] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (bytes >= one) return `${Number((bytes / one).toPrecision(3))} ${unit}`;
  return `${Math.round(bytes)} B`;
}

function rate(bytesPerS) {
  for (const [unit, one] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]])
    if (bytesPerS >= one) return `${(bytesPerS / one).toPrecision(3)} ${unit}`;
  return `${Math.round(bytesPerS)} B/s`;
}

const count = (number) => Math.round(number).toLocaleString("en-US");
const few = (number) => (number >= 10 ? count(number) : number.toFixed(1));
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)}%`);
const share = (part, whole) => (whole > 0 ? part / whole : null);
const grown = (old, now) => (now >= (old || 0) ? now - (old || 0) : now);

function duration(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${s % 60}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h ${Math.floor((s % 3600) / 60)}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

function perSecond(old, now, seconds) {
  const rates = {};
  for (const [name, value] of Object.entries(now)) rates[name] = grown(old ? old[name] : 0, value) / seconds;
  return rates;
}

// What happened since the record before; since the start when there is none, or the service is another one.
function ratesOf(old, now) {
  if (old && (old.incarnation !== now.incarnation || old.uptime_s >= now.uptime_s)) old = null;
  const seconds = Math.max(now.uptime_s - (old ? old.uptime_s : 0), 1e-3);
  const counters = perSecond(old && old.counters, now.counters, seconds);
  const traffic = perSecond(old && old.traffic, now.traffic, seconds);
  const oldNodes = new Map((old ? old.nodes : []).map((node) => [node.node_id, node]));
  const nodes = new Map(now.nodes.map((node) => {
    const known = oldNodes.get(node.node_id);
    return [node.node_id, perSecond(known && known.moved_bytes, node.moved_bytes, seconds)];
  }));
  return {
    hit: share(counters.blocks_matched, counters.blocks_asked), lookups: counters.lookups,
    evictions: counters.evicted_blocks, read: traffic.read_bytes, stored: traffic.stored_bytes,
    misses: perSecond(old && old.misses, now.misses, seconds), nodes,
  };
}

// Points of a line through values (null: a gap is drawn as the value before it), newest at the right edge.
function points(values, top, width, height) {
  const step = width / (HISTORY - 1);
  let last = 0;
  return values.map((value, i) => {
    last = value === null ? last : value;
    const x = width - (values.length - 1 - i) * step;
    return [x, height - (top > 0 ? Math.min(last / top, 1) : 0) * height];
  });
}

function area(values, top, width, height, name, opacity) {
  const line = points(values, top, width, height).map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
  const first = line[0].split(",")[0];
  return [
    svg("polygon", { points: `${first},${height} ${line.join(" ")} ${width},${height}`, fill: colour(name), "fill-opacity": opacity }),
    svg("polyline", { points: line.join(" "), fill: "none", stroke: colour(name), "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }),
  ];
}

function figure(name, value, note, values, top, paint) {
  const highest = top || Math.max(...values.map((v) => v || 0));
  const line = svg("svg", { viewBox: "0 -2 240 40", preserveAspectRatio: "none", "aria-hidden": "true" }, ...area(values, highest, 240, 38, paint, 0.14));
  const shown = el("div", { class: "value", style: { color: colour(paint) } }, value);
  return el("div", { class: "figure" }, el("div", { class: "name" }, name), shown, el("div", { class: "note" }, note), line);
}

function drawFigures(state, rates) {
  const past = (name) => history.map((old) => old[name]);
  const early = Object.values(rates.misses).reduce((sum, one) => sum + one, 0);
  at("figures").replaceChildren(
    figure("Hit rate", percent(rates.hit), "of the blocks asked for", past("hit"), 1, "--green"),
    figure("Read", rate(rates.read), "that readers were told of", past("read"), 0, "--blue"),
    figure("Stored", rate(rates.stored), "that writers committed", past("stored"), 0, "--violet"),
    figure("Look-ups", `${few(rates.lookups)}/s`, `${few(early)}/s end early`, past("lookups"), 0, "--cyan"),
    figure("Evictions", `${few(rates.evictions)}/s`, `${count(state.counters.leases)} leases held`, past("evictions"), 0, "--amber"),
  );
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}

function drawChart() {
  const [width, height, left] = [1160, 150, 74];
  const top = nice(Math.max(...history.map((one) => Math.max(one.read, one.stored)), 1));
  const inner = svg("g", { transform: `translate(${left},10)` });
  for (const part of [0, 0.5, 1]) {
    const y = height * (1 - part);
    inner.append(svg("line", { x1: 0, x2: width - left, y1: y, y2: y }));
    inner.append(svg("text", { x: -10, y: y + 4, "text-anchor": "end" }, rate(top * part)));
  }
  inner.append(...area(history.map((one) => one.read), top, width - left, height, "--blue", 0.13));
  inner.append(...area(history.map((one) => one.stored), top, width - left, height, "--violet", 0.13));
  at("chart").replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height + 20}`, role: "img", "aria-label": "Bytes a second" }, inner));
}

function bar(part, paint) {
  const fill = el("i", { style: { width: `${(100 * Math.min(part || 0, 1)).toFixed(1)}%`, background: colour(paint) } });
  return el("div", { class: "bar" }, fill);
}

function drawNode(node, moved) {
  const state = { ready: "good", lost: "bad" }[node.state] || "poor";
  const tiers = node.tiers.flatMap((tier) => {
    const full = share(tier.used_bytes, tier.capacity_bytes) || 0;
    const text = tier.off ? `off: ${tier.off}` : `${size(tier.used_bytes)} of ${size(tier.capacity_bytes)}`;
    const label = el("span", {}, tier.medium, el("span", { class: "quiet" }, `  ${count(tier.blocks)} blocks`));
    const title = el("div", { class: "tier" }, label, el("span", { class: tier.off ? "bad" : "" }, text));
    return [title, bar(full, tier.medium === "disk" ? "--violet" : full > 0.95 ? "--amber" : "--green")];
  });
  const flows = Object.entries(moved).filter(([, bytes]) => bytes > 0).sort();
  const flow = flows.map(([way, bytes]) => el("span", {}, `${way.startsWith("out") ? "↑" : "↓"} ${way.split(" ")[1]} ${rate(bytes)}`));
  const nothing = el("span", {}, "no traffic through its sockets");
  const title = el("div", { class: "title" }, el("span", {}, node.node_id), el("span", { class: `pill ${state}` }, node.state));
  return el("div", { class: "node" }, title, ...tiers, el("div", { class: "flow" }, ...(flow.length ? flow : [nothing])));
}

function table(columns, rows, empty) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const cell = (tag, name, content) => el(tag, { class: name.startsWith("#") ? "number" : "" }, content);
  const head = el("tr", {}, ...columns.map((name) => cell("th", name, name.replace("#", ""))));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((content, i) => cell("td", columns[i], content))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

const mono = (text) => el("span", { class: "mono" }, text);

function spread(head, paints) {
  const shares = Object.entries(head.nodes);
  const whole = shares.reduce((sum, [, part]) => sum + part, 0) || 1;
  const parts = shares.map(([node, part]) => el("i", { title: node, style: { width: `${(100 * part) / whole}%`, background: colour(paints.get(node) || "--quiet") } }));
  const names = shares.map(([node, part]) => el("span", { style: { color: colour(paints.get(node) || "--quiet") } }, `${node} ${Math.round(100 * part)}%`));
  return el("div", { class: "where" }, el("div", { class: "bar" }, ...parts), el("div", { class: "spread" }, ...names));
}

function drawHeads(state) {
  const paints = new Map(state.nodes.map((node, i) => [node.node_id, COLOURS[i % COLOURS.length]]));
  const hottest = Math.max(...state.heads.map((head) => head.reads_per_s), 1);
  const rows = state.heads.map((head) => [
    mono(head.first), head.model, `${count(head.blocks)} blocks, ${count(head.tokens)} tokens`, size(head.size_bytes),
    head.branches >= 100 ? "100+" : String(head.branches), few(head.reads_per_s),
    el("div", { class: "heat" }, bar(head.reads_per_s / hottest, "--red")), spread(head, paints),
  ]);
  const columns = ["begins with", "model", "length", "#size", "#branches", "#reads/s", "heat", "where"];
  at("heads").replaceChildren(table(columns, rows, "nothing is read often enough now to be called hot"));
}

function drawNamespaces(state) {
  const usage = (one) => [count(one.blocks), size(one.size_bytes), percent(share(one.matched_blocks, one.asked_blocks)), size(one.read_bytes)];
  const named = state.namespaces.map((one) => [mono(one.namespace.slice(0, 8)), one.model, one.tenant, ...usage(one)]);
  const columns = ["namespace", "model", "tenant", "#blocks", "#size", "#hit rate", "#read"];
  at("namespaces").replaceChildren(table(columns, named, "no namespace is open"));
  const rest = state.namespaces_total - state.namespaces.length;
  at("namespaces-note").textContent = rest > 0 ? `the largest; ${count(rest)} more: kvpool namespaces` : "";
  const tenants = state.tenants.map((one) => [one.tenant, count(one.namespaces), ...usage(one)]);
  at("tenants").replaceChildren(table(["tenant", "#namespaces", "#blocks", "#size", "#hit rate", "#read"], tenants, "none"));
}

function reason(name) {
  return el("span", { class: "mono", style: { color: colour(REASONS[name] || "--ink") } }, name);
}

function drawMisses(state, rates) {
  const happening = Object.entries(rates.misses).filter(([, often]) => often > 0).sort((a, b) => b[1] - a[1]);
  at("reasons").replaceChildren(...happening.map(([name, often]) => el("span", { class: "chip" }, reason(name), " ", el("b", {}, `${few(often)}/s`))));
  const rows = state.latest_misses.slice(0, 12).map((miss) => [
    `${miss.ago_s.toFixed(1)} s ago`, reason(miss.reason), mono(miss.missing), miss.model,
    `${count(miss.matched)} of ${count(miss.asked)}`, bar(share(miss.matched, miss.asked), "--green"),
  ]);
  const columns = ["when", "why", "missing block", "model", "#found", "of what was asked for"];
  at("misses").replaceChildren(table(columns, rows, "every look-up found all that it asked for"));
}

function drawHeader(state) {
  const ready = state.nodes.filter((node) => node.state === "ready").length;
  const lost = state.nodes.filter((node) => node.state === "lost").length;
  const verdict = at("verdict");
  const [text, mood] = state.recovery.active
    ? [`recovering: ${state.recovery.reported_nodes} nodes have reported`, "poor"]
    : lost ? [`${lost} of ${state.nodes.length} nodes lost`, "bad"] : ready ? [`${ready} of ${state.nodes.length} nodes ready`, "good"] : ["no node is ready", "bad"];
  verdict.textContent = text;
  verdict.className = `pill ${mood}`;
  const security = at("security");
  security.hidden = false;
  security.textContent = { tls: "TLS", loopback: "loopback alone" }[state.security] || "INSECURE: plaintext";
  security.className = `pill ${state.security === "insecure" ? "bad" : ""}`;
  at("about").textContent = `version ${state.version}, up ${duration(state.uptime_s)}, ${count(state.counters.blocks)} blocks`;
}

function draw(state) {
  const rates = ratesOf(before, state);
  if (before && before.incarnation !== state.incarnation) history.length = 0;
  history.push(rates);
  if (history.length > HISTORY) history.shift();
  drawHeader(state);
  drawFigures(state, rates);
  drawChart();
  at("nodes-note").textContent = `${size(state.counters.used_bytes)} of ${size(state.counters.capacity_bytes)} of memory in use`;
  at("nodes").replaceChildren(...state.nodes.map((node) => drawNode(node, rates.nodes.get(node.node_id) || {})));
  drawHeads(state);
  drawNamespaces(state);
  drawMisses(state, rates);
  before = state;
}

async function tick() {
  const trouble = at("trouble");
  try {
    if (document.hidden) return;
    const answer = await fetch("api/state", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const state = await answer.json();
    if (!before || state.uptime_s !== before.uptime_s) draw(state);
    trouble.hidden = true;
  } catch (error) {
    trouble.textContent = `The metadata service does not answer (${error.message}); what is below is from before.`;
    trouble.hidden = false;
  } finally {
    setTimeout(tick, INTERVAL_MS);
  }
}

at("legend").replaceChildren(
  el("i", { style: { color: colour("--blue") } }), "read", el("i", { style: { color: colour("--violet") } }), "stored",
);
tick();
