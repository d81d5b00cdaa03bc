// KV that replicas read from each other: arrows between their tiles while it moves, and a list of the last minute.

import { byId, make, shape } from "./dom.js";
import { bytes, count, duration, timeOfDay } from "./format.js";
import { badge, colourOf } from "./replicas.js";

const SEEN_S = 1.5; // most transfers end between two polls: an arrow stays for one of them

let drawn = null; // the arrows

/**
 * @param transfers those of GET /live
 * @param now when they were collected, in Unix seconds
 * @param tileOf returns the tile of a replica, undefined if there is none
 */
export function showTransfers(transfers, now, tileOf) {
  byId("transfers").hidden = transfers.length === 0;
  byId("transferred").replaceChildren(...transfers.map(row));
  drawn?.remove();
  drawn = null;
  const arrows = transfers.filter((transfer) => moves(transfer, now)).map((transfer) => arrow(transfer, tileOf));
  if (!arrows.some((shown) => shown)) return;
  const { scrollWidth: width, scrollHeight: height } = byId("tiles");
  drawn = shape("svg", { class: "arrows", width, height, "aria-hidden": "true" });
  drawn.append(...arrows.filter((shown) => shown));
  byId("tiles").append(drawn);
}

const moves = (transfer, now) => transfer.is_running || transfer.time + transfer.seconds > now - SEEN_S;

function arrow(transfer, tileOf) {
  const [from, to] = [transfer.source, transfer.target].map((name) => tileOf(name));
  if (!from || !to) return null; // the source has gone
  const [start, end] = [centre(from), centre(to)];
  const [x, y] = [end.x - start.x, end.y - start.y];
  const length = Math.hypot(x, y) || 1;
  const [along, across] = [{ x: x / length, y: y / length }, { x: -y / length, y: x / length }];
  const at = (forwards, sideways) =>
    `${end.x + forwards * along.x + sideways * across.x},${end.y + forwards * along.y + sideways * across.y}`;
  return shape("path", {
    class: "arrow",
    "data-colour": colourOf(transfer.source),
    "data-transfer": `${transfer.source} ${transfer.target}`,
    d: `M${start.x},${start.y} L${at(0, 0)} M${at(-12, 7)} L${at(0, 0)} L${at(-12, -7)}`,
  });
}

/** The middle of a tile's map, within the tiles. */
function centre(tile) {
  const map = tile.querySelector("canvas");
  return {
    x: tile.offsetLeft + map.offsetLeft + map.offsetWidth / 2,
    y: tile.offsetTop + map.offsetTop + map.offsetHeight / 2,
  };
}

function row(transfer) {
  const took = duration(1000 * transfer.seconds);
  return make("tr", {},
    make("td", { className: "number" }, timeOfDay(transfer.time)),
    make("td", {}, badge(transfer.source)),
    make("td", {}, badge(transfer.target)),
    make("td", { className: "number" }, count(transfer.tokens)),
    make("td", { className: "number" }, bytes(transfer.bytes)),
    make("td", { className: "number" }, transfer.is_running ? `${took} so far` : took));
}
