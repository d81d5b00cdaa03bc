// The colour of each replica, assigned in the order in which replicas are first seen.

import { make } from "./dom.js";
import { shortName } from "./format.js";

const NUM_COLOURS = 6;
const seen = new Map();

/** The index of a replica's colour: style.css has --replica-0 to --replica-5. */
export function colourOf(name) {
  if (!seen.has(name)) seen.set(name, seen.size % NUM_COLOURS);
  return seen.get(name);
}

/** A replica's name with its colour. */
export function badge(name) {
  const dot = make("i", { className: "dot", "data-colour": colourOf(name), "aria-hidden": "true" });
  return make("span", { className: "replica", title: name }, dot, shortName(name));
}
