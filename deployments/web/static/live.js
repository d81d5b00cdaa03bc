// The live view: polls the server once a second while the page is visible.

import { liveState } from "./api.js";
import { LineChart } from "./chart.js";
import { byId, make, setText } from "./dom.js";
import { count, duration, finePercent, percent, rate, timeOfDay } from "./format.js";
import { HeatMap, unpack } from "./heatmap.js";
import { History } from "./history.js";
import { badge, colourOf } from "./replicas.js";
import { showTransfers } from "./transfers.js";

const PERIOD_MS = 1000;
const AFTER_FAILURE_MS = 3000;

const history = new History();
const tiles = new Map(); // by replica
let charts;
let shownRoutes = "";
let latest = []; // the replicas of the last answer

export function start() {
  charts = {
    rate: new LineChart(byId("rate-chart"), "Output tokens per second", count),
    hits: new LineChart(byId("hit-chart"), "Prefix hit rate", percent, 1),
  };
  poll();
}

async function poll() {
  let wait = PERIOD_MS;
  if (!document.hidden) {
    try {
      show(await liveState());
    } catch (error) {
      wait = AFTER_FAILURE_MS;
      setStatus("lost", error.status === 401 ? "the API key is no longer taken; reload to sign in" : "no answer");
    }
  }
  setTimeout(poll, wait);
}

function setStatus(state, text) {
  byId("status").dataset.state = state;
  setText(byId("status"), text);
}

function show(state) {
  if (!history.add(state)) return; // the answer of another ingress may be older
  const { replicas } = state;
  latest = replicas;
  setStatus(replicas.length ? "live" : "lost", `${replicas.length} ${replicas.length === 1 ? "replica" : "replicas"}`);
  setText(byId("model"), state.model);
  for (const replica of replicas) colourOf(replica.name);
  showFigures();
  charts.rate.show(history.lines("rate"), state.time);
  charts.hits.show(history.lines("hitRate"), state.time);
  showTiles(replicas);
  showTransfers(state.transfers, state.time, (name) => tiles.get(name)?.element);
  showRoutes(state.routed);
}

function totals() {
  const sum = (field) => latest.reduce((total, replica) => total + field(replica), 0);
  const blocks = sum((replica) => replica.num_blocks);
  return {
    running: sum((replica) => replica.running),
    waiting: sum((replica) => replica.waiting + replica.swapped),
    usage: blocks ? sum((replica) => replica.blocks.used) / blocks : null,
  };
}

function showFigures() {
  const { running, waiting, usage } = totals();
  setText(byId("rate"), rate(history.rate()));
  setText(byId("hits"), percent(history.hits()));
  setText(byId("running"), count(running));
  setText(byId("waiting"), count(waiting));
  setText(byId("usage"), finePercent(usage));
}

/** The figures as a tool reports them to the model. */
export function figures() {
  const { running, waiting, usage } = totals();
  return {
    engines: latest.length,
    running,
    waiting,
    kv_used_percent: Math.round(100 * (usage ?? 0)),
    prefix_hit_percent: Math.round(100 * (history.hits() ?? 0)),
  };
}

// --- one tile per replica ------------------------------------------------------------------------------------------------

function showTiles(replicas) {
  const present = new Set(replicas.map((replica) => replica.name));
  for (const [name, tile] of tiles) {
    if (!present.has(name)) {
      tile.map.close();
      tile.element.remove();
      tiles.delete(name);
    }
  }
  for (const replica of replicas) {
    if (!tiles.has(replica.name)) tiles.set(replica.name, new Tile(replica.name));
    tiles.get(replica.name).show(replica);
  }
  byId("no-replica").hidden = replicas.length > 0;
}

class Tile {
  constructor(name) {
    this.figures = {};
    const list = make("dl", { className: "numbers" });
    for (const [key, label] of [
      ["running", "running"], ["waiting", "waiting"], ["rate", "tokens/s"], ["hits", "prefix hits"],
      ["used", "private"], ["shared", "shared"], ["cached", "cached"], ["free", "free"],
    ]) {
      this.figures[key] = make("dd", {}, "–");
      list.append(make("div", {}, make("dt", {}, label), this.figures[key]));
    }
    this.canvas = make("canvas", { role: "img" });
    this.tiers = make("div", { className: "tiers" });
    this.note = make("p", { className: "hint" });
    const title = make("h3", {}, badge(name));
    this.element = make("article", { className: "tile", "data-replica": name },
      make("div", { className: "title" }, title, this.note), this.canvas, this.tiers, list);
    byId("tiles").append(this.element); // a canvas has a size only in the page
    this.map = new HeatMap(this.canvas);
  }

  show(replica) {
    const { blocks, blocks_per_cell: perCell } = replica;
    const alone = blocks.used - blocks.shared;
    const shown = {
      running: count(replica.running),
      waiting: count(replica.waiting + replica.swapped),
      rate: rate(history.rate(replica.name)),
      hits: percent(history.hits(replica.name)),
      used: count(alone),
      shared: count(blocks.shared),
      cached: count(blocks.cached),
      free: count(blocks.free),
    };
    for (const [key, text] of Object.entries(shown)) setText(this.figures[key], text);
    const cell = perCell === 1 ? "a cell is a block" : `a cell is ${perCell} blocks`;
    setText(this.note, `${count(replica.num_blocks)} blocks, ${cell}`);
    this.canvas.setAttribute("aria-label",
      `KV blocks: ${shown.used} private, ${shown.shared} shared, ${shown.cached} cached, ${shown.free} free`);
    this.map.show(unpack(replica));
    this.tiers.replaceChildren(...(replica.tiers ?? []).map(tierRow));
  }
}

// A tier beyond the device: how full it is, and the tokens whose KV came from there and went there.
function tierRow(tier) {
  const moved = `${count(tier.in_tokens)} tokens in, ${count(tier.out_tokens)} out, ${count(tier.hit_tokens)} hit`;
  const text = tier.num_blocks ? `${count(tier.blocks)} of ${count(tier.num_blocks)} blocks; ${moved}` : moved;
  const fill = make("span", { className: "fill" });
  fill.style.width = `${tier.num_blocks ? Math.min(100, (100 * tier.blocks) / tier.num_blocks) : 0}%`;
  const bar = make("span", { className: "bar", role: "img", "aria-label": `${tier.name}: ${text}` }, fill);
  return make("div", { className: "tier", title: text }, make("span", {}, tier.name), bar, make("small", {}, text));
}

// --- where requests went ---------------------------------------------------------------------------------------------

function showRoutes(routed) {
  byId("nothing-routed").hidden = routed.length > 0;
  const newest = JSON.stringify(routed[0] ?? null);
  if (newest === shownRoutes) return; // unchanged rows stay selectable
  shownRoutes = newest;
  byId("routed").replaceChildren(...routed.map(row));
}

function row(route) {
  const meter = make("span", { className: "meter", "aria-hidden": "true" }, make("span"));
  meter.firstChild.style.width = percent(Math.min(1, route.predicted_tokens / Math.max(1, route.prompt_tokens)));
  return make("tr", {},
    make("td", { className: "number" }, timeOfDay(route.time)),
    make("td", {}, badge(route.replica)),
    make("td", {}, make("b", { "data-outcome": route.outcome }, route.outcome)),
    make("td", { className: "number asked" }, count(route.prompt_tokens)),
    make("td", {}, make("div", { className: "share" }, meter,
      make("span", { className: "number" }, count(route.predicted_tokens)),
      make("span", { className: "of", "aria-hidden": "true" }, ` of ${count(route.prompt_tokens)}`))),
    make("td", { className: "number best" }, count(route.best_tokens)),
    make("td", { className: "number best", title: costParts(route) }, duration(1000 * cost(route))));
}

const cost = (route) => 
  route.queue_s + route.prefill_s + route.others_s + route.decode_s + Math.max(0, route.fetch_s - route.queue_s);

function costParts(route) {
  const seconds = (value) => duration(1000 * value);
  const next = route.next_s === null ? "no other replica" : `next best replica ${seconds(route.next_s)}`;
  const fetch = route.source ? `${count(route.fetched_tokens)} tokens from ${route.source} in ` +
    `${seconds(route.fetch_s)} meanwhile, ` : "";
  const predicted = route.predicted_s === null ? "" : `; first token expected after ${seconds(route.predicted_s)}`;
  const came = predicted ? ", came" : "; first token came";
  const measured = route.measured_s === null ? "" : `${came} after ${seconds(route.measured_s)}`;
  return `queue ${seconds(route.queue_s)}, ${fetch}prefill ${seconds(route.prefill_s)}, ` +
    `delay of others ${seconds(route.others_s)}, decoding ${seconds(route.decode_s)}; ${next}${predicted}${measured}`;
}
