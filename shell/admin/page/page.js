// The admin page: asks /status.json each second, shows it, and says when it is stale.
//
// Ids and names come from other machines: they go on the page as text (textContent), never as markup.

"use strict";

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 15000;
const LONGEST_BACKOFF_MS = 15000;
const TIMEOUT_MS = 5000;
const RATE_SPAN_S = 3; // live rates count over so long
const GONE_S = 60; // how long a worker that went stays on the page
const MAX_EVENTS = 12;
const HOST_PORT = /^(\[[\da-f:.]+\]|[\w.-]+):\d+$/i;
const SVG = "http://www.w3.org/2000/svg";
const BLOCK_STATES = ["live", "receiving", "reserved", "quarantined", "cached", "free"];
const LATENCIES = {
  time_to_first_token: "Time to first token",
  inter_token: "Between tokens",
  end_to_end: "Whole request",
};

const $ = (id) => document.getElementById(id);

// ---- words and numbers

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

function rate(value) {
  return value === null ? "–" : value >= 100 ? whole.format(value) : tenth.format(value);
}

function latency(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  return `${ms >= 100 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

function age(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function plural(count, noun) {
  return `${whole.format(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // screen readers hear changes only
}

// ---- what was seen before

// The process's own samples of each figure, oldest first, from before this page was opened; null where one lacks it.
let past = { period_s: 10, most: 180, series: {} };

// What a line shows: the samples, and the figure now.
function line(samples, now) {
  return [...(samples ?? []), now];
}

// A counter that only grows, as a rate per second over the last few seconds.
class Meter {
  constructor() {
    this.seen = [];
  }

  rate(atSeconds, total) {
    const last = this.seen[this.seen.length - 1];
    if (last && (atSeconds < last[0] || total < last[1])) this.seen = []; // its process started anew
    this.seen.push([atSeconds, total]);
    while (this.seen.length > 2 && this.seen[1][0] <= atSeconds - RATE_SPAN_S) this.seen.shift();
    const [thenSeconds, thenTotal] = this.seen[0];
    return atSeconds > thenSeconds ? (total - thenTotal) / (atSeconds - thenSeconds) : null;
  }
}

class Memory {
  constructor() {
    this.meters = new Map();
    this.workers = new Map(); // worker id → {entry, lastSeen, gone}
    this.ready = null;
  }

  meter(name) {
    if (!this.meters.has(name)) this.meters.set(name, new Meter());
    return this.meters.get(name);
  }
}

const memory = new Memory();

// ---- drawing

// Lines over each other on one scale; the first is filled.
function draw(svg, ...lines) {
  const width = 100;
  const height = 30;
  const top = Math.max(...lines.flatMap((values) => values.map((value) => value ?? 0)), 1e-9);
  const x = (index, count) => width * (1 - (count - 1 - index) / past.most);
  const y = (value) => height - (height - 2) * (value / top);
  const paths = lines.map((values) =>
    values
      .map((value, index, all) => (value === null ? "" : `${index && all[index - 1] !== null ? "L" : "M"}${x(index, all.length).toFixed(2)} ${y(value).toFixed(2)}`))
      .join(""),
  );
  const first = lines[0];
  const start = first.lastIndexOf(null) + 1; // what lies before a gap is a line only
  const unbroken = first.slice(start).map((value, index) => `L${x(start + index, first.length).toFixed(2)} ${y(value).toFixed(2)}`);
  const area = unbroken.length ? `M${x(start, first.length).toFixed(2)} ${height}${unbroken.join("")}L${width} ${height}Z` : "";
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const wanted = [["area", area], ...paths.map((path, index) => [index ? "second" : "first", path])];
  while (svg.childElementCount < wanted.length) svg.append(document.createElementNS(SVG, "path"));
  wanted.forEach(([name, path], index) => {
    svg.children[index].setAttribute("class", name);
    svg.children[index].setAttribute("d", path);
  });
}

function pill(node, text, state) {
  setText(node, text);
  node.dataset.state = state;
}

function event(text) {
  const item = document.createElement("li");
  const time = document.createElement("time");
  const now = new Date();
  time.dateTime = now.toISOString();
  time.textContent = now.toLocaleTimeString("en-GB");
  item.append(time, text);
  $("event-list").prepend(item);
  while ($("event-list").childElementCount > MAX_EVENTS) $("event-list").lastElementChild.remove();
  $("events").hidden = false;
}

// ---- the header

function showHeader(process, name, model, version, uptimeSeconds, ready, reason) {
  document.body.dataset.process = process;
  document.title = `${ready ? "" : "⚠ "}${name} · Tandem`;
  setText($("title"), process === "router" ? "Tandem" : name);
  setText($("subtitle"), `${process === "router" ? process : `${process} worker`} of model ${model} · version ${version} · up ${age(uptimeSeconds)}`);
  pill($("verdict"), ready ? "ready" : "not ready", ready ? "good" : "bad");
  setText($("reason"), reason);
  if (memory.ready !== null && memory.ready !== ready) event(ready ? "ready again" : `not ready: ${reason}`);
  memory.ready = ready;
}

// ---- requests and latencies

function showFigure(id, value, text) {
  setText($(id), text);
  draw($(`${id}-spark`), line(past.series[id], value));
}

function showRequests(cluster) {
  const { recent, uptime_s: now } = cluster;
  const requests = memory.meter("cluster/requests").rate(now, recent.total_requests);
  const tokens = memory.meter("cluster/tokens").rate(now, recent.total_tokens);
  showFigure("active", cluster.active_requests, whole.format(cluster.active_requests));
  showFigure("queued", cluster.queued_requests, whole.format(cluster.queued_requests));
  showFigure("request-rate", requests, rate(requests));
  showFigure("token-rate", tokens, rate(tokens));
  showFailures(cluster);
  const hits = recent.prompt_tokens ? recent.cached_tokens / recent.prompt_tokens : null;
  setText($("hit-rate"), hits === null ? "–" : `${tenth.format(100 * hits)} %`);
  setText($("hit-tokens"), recent.prompt_tokens ? `of ${plural(recent.prompt_tokens, "prompt token")}, last minute` : "");
  setText($("queued-tokens"), cluster.queued_requests ? plural(cluster.queued_tokens, "prompt token") : "");
  $("requests").hidden = false;
}

// Since the start, and when: the line rises where requests failed or were refused.
function showFailures({ failures, refusals }) {
  const total = [...failures, ...refusals].reduce((sum, each) => sum + each.count, 0);
  const reasons = [...failures.map((each) => [each, "failed"]), ...refusals.map((each) => [each, "refused"])];
  setText($("failed"), whole.format(total));
  setText($("failed-reasons"), reasons.map(([each, what]) => `${each.count} ${what}: ${each.reason}`).join(", "));
  draw($("failed-spark"), line(past.series.failed, total));
}

function latencyTile(name) {
  const id = `latency-${name}`;
  if (!$(id)) {
    const tile = $("latency-template").content.firstElementChild.cloneNode(true);
    tile.id = id;
    tile.querySelector("dt").textContent = LATENCIES[name];
    $("latency-tiles").append(tile);
  }
  return $(id);
}

function showLatencies(recent) {
  setText($("window"), `over the last ${whole.format(recent.window_s)} s · line: median, dashed: p99, half an hour`);
  for (const each of recent.latencies) {
    if (!Object.hasOwn(LATENCIES, each.name)) continue; // of a newer router
    const tile = latencyTile(each.name);
    for (const quantile of ["p50", "p90", "p99"]) {
      setText(tile.querySelector(`.${quantile}`), each.count ? latency(each[`${quantile}_s`]) : "–");
    }
    setText(tile.querySelector(".count"), `of ${whole.format(each.count)}`);
    const lines = ["p50", "p99"].map((quantile) =>
      line(past.series[`${each.name}/${quantile}`], each.count ? each[`${quantile}_s`] : null),
    );
    draw(tile.querySelector(".spark"), ...lines);
  }
  $("latencies").hidden = false;
}

// ---- workers

function stateOf(worker) {
  if (!worker.connected) return ["not connected", "bad"];
  if (worker.load.draining) return ["draining", "warn"];
  if (worker.set_apart) return [`set apart: ${worker.set_apart}`, "bad"];
  if (worker.set_aside) return [worker.set_aside, "bad"];
  return worker.heartbeat_age_s > 2 ? ["silent", "warn"] : ["serving", "good"];
}

function workerCard(id) {
  let known = memory.workers.get(id);
  if (!known) {
    const card = $("worker-template").content.firstElementChild.cloneNode(true);
    card.dataset.worker = id;
    known = { card, incarnation: null, seen: 0, gone: false };
    memory.workers.set(id, known);
  }
  return known;
}

function showWorker(worker) {
  const { info, load } = worker;
  const known = workerCard(info.worker_id);
  if (known.incarnation !== info.incarnation) {
    if (memory.settled) event(`${info.worker_id} ${known.incarnation === null ? "joined" : "started anew"}`);
  } else if (known.gone) {
    event(`${info.worker_id} is back`);
  }
  Object.assign(known, { incarnation: info.incarnation, seen: performance.now(), gone: false, role: info.role });
  const { card } = known;
  card.dataset.gone = "no";
  const name = card.querySelector(".name");
  setText(name, info.worker_id);
  if (HOST_PORT.test(info.admin_address) && document.body.dataset.process === "router") {
    name.href = `${location.protocol}//${info.admin_address}/`;
    name.title = "this worker's own page";
  }
  setText(card.querySelector(".role"), info.role);
  pill(card.querySelector(".state"), ...stateOf(worker));
  const heartbeat = worker.heartbeat_age_s === null ? "" : ` · heard ${worker.heartbeat_age_s.toFixed(1)} s ago`;
  const memoryText = load.device_total_bytes ? ` · ${bytes(load.device_used_bytes)} of ${bytes(load.device_total_bytes)} taken` : "";
  setText(card.querySelector(".about"), `${info.device}${memoryText} · pid ${info.pid}${heartbeat}`);
  showPool(card, load.pool);
  showLoad(card, info.worker_id, load);
}

function showPool(card, pool) {
  const bar = card.querySelector(".pool");
  for (const state of BLOCK_STATES) {
    const part = bar.querySelector(`[data-block="${state}"]`);
    part.style.flexGrow = String(pool[state]);
    part.classList.toggle("some", pool[state] > 0);
    part.title = `${state}: ${plural(pool[state], "block")}`;
  }
  const used = pool.total - pool.free - pool.cached;
  const share = pool.total ? (100 * used) / pool.total : 0;
  const rest = BLOCK_STATES.filter((state) => state !== "free" && pool[state]).map((state) => `${whole.format(pool[state])} ${state}`);
  setText(
    card.querySelector(".pool-text"),
    `${tenth.format(share)} % of ${plural(pool.total, "block")} of ${pool.block_size} tokens${rest.length ? `: ${rest.join(", ")}` : " in use"}`,
  );
  bar.setAttribute("aria-label", BLOCK_STATES.map((state) => `${pool[state]} ${state}`).join(", "));
}

function showLoad(card, id, load) {
  const figures = {
    running: load.running_seqs,
    waiting: load.waiting_seqs,
    "prompt-tokens": load.queued_prompt_tokens,
    transfers: load.live_transfers,
    preemptions: load.preemptions,
  };
  for (const [name, value] of Object.entries(figures)) setText(card.querySelector(`.${name}`), whole.format(value));
  setText(card.querySelector(".steps"), rate(load.steps_per_s));
  const used = load.pool.total - load.pool.free - load.pool.cached;
  draw(card.querySelector(".spark"), line(past.series[`used/${id}`] ?? past.series.used, used));
}

// Workers that are no longer told of stay for a while, marked.
function showGone(present) {
  const now = performance.now();
  for (const [id, known] of memory.workers) {
    if (present.has(id)) continue;
    if (!known.gone) event(`${id} is gone`);
    known.gone = true;
    known.card.dataset.gone = "yes";
    pill(known.card.querySelector(".state"), "gone", "bad");
    if (now - known.seen < 1000 * GONE_S) continue;
    known.card.remove();
    memory.workers.delete(id);
  }
}

function showWorkers(workers) {
  workers.forEach(showWorker);
  showGone(new Set(workers.map((worker) => worker.info.worker_id)));
  const order = [...memory.workers.entries()].sort(
    ([a, one], [b, other]) => other.role.localeCompare(one.role) || a.localeCompare(b, "en", { numeric: true }),
  );
  order.forEach(([, { card }], index) => {
    if ($("workers").children[index] !== card) $("workers").insertBefore(card, $("workers").children[index] ?? null);
  });
  const counts = ["prefill", "decode", "elastic"]
    .map((role) => [workers.filter((worker) => worker.info.role === role).length, role])
    .filter(([count]) => count > 0)
    .map((each) => each.join(" "));
  const transfers = workers.reduce((sum, worker) => sum + worker.load.live_transfers, 0);
  setText($("workers-summary"), `${counts.join(", ") || "none"} · ${plural(transfers, "live transfer")}`);
  $("no-workers").hidden = order.length > 0;
  memory.settled = true;
}

// ---- asking

function show(status) {
  if (status.process === "router") {
    const { cluster } = status;
    showHeader("router", "router", cluster.model, cluster.version, cluster.uptime_s, cluster.ready, cluster.not_ready_reason);
    showRequests(cluster);
    showLatencies(cluster.recent);
    showWorkers(cluster.workers);
    showPlacements(cluster.recent.last_placements);
    showHandoffs(cluster.handoffs);
    showSlow(cluster.slow_requests);
    showChoices([["router", cluster.decisions], ...cluster.workers.map(({ info }) => [info.worker_id, info.decisions])]);
    return;
  }
  const { info, load } = status;
  showHeader(status.process, info.worker_id, info.model, status.version, status.uptime_s, status.ready, "");
  showWorkers([{ info, load, connected: true, heartbeat_age_s: null }]);
  showChoices([[info.worker_id, info.decisions]]);
}

async function ask(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

let failures = 0;
let historyAt = -Infinity;
let answeredAt = null;
let timer = null;
let asking = false;

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    if (performance.now() - historyAt >= 1000 * past.period_s) {
      past = await ask("/history.json");
      historyAt = performance.now();
    }
    show(await ask("/status.json"));
    failures = 0;
    answeredAt = performance.now();
  } catch {
    failures += 1;
  }
  showFreshness();
  asking = false;
  timer = setTimeout(poll, pause());
}

function pause() {
  if (document.hidden) return HIDDEN_POLL_MS;
  return Math.min(POLL_MS * 2 ** Math.min(failures, 10), LONGEST_BACKOFF_MS);
}

function showFreshness() {
  document.body.dataset.fresh = failures ? "no" : "yes";
  if (!failures) setText($("pulse"), "live");
  else if (answeredAt === null) setText($("pulse"), "no answer yet");
  else setText($("pulse"), `stale for ${age((performance.now() - answeredAt) / 1000)}`);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
setInterval(() => {
  if (failures) showFreshness();
}, POLL_MS);
poll();
