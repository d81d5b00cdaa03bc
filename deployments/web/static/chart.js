// A line chart over the last two minutes, drawn as SVG.

import { shape } from "./dom.js";
import { colourOf } from "./replicas.js";
import { shortName } from "./format.js";

const HEIGHT = 132;
const LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 20;
const SECONDS = 120;

/** The smallest of 1, 2, 4, 6, 8, 10, 20, ... that is at least ``value``; its half is round too. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((digit) => digit * power >= value * 0.999);
}

export class LineChart {
  /**
   * @param holder an empty element
   * @param name what is shown, for screen readers
   * @param write turns a value into text
   * @param top the end of the axis; null: from the values
   */
  constructor(holder, name, write, top = null) {
    this.holder = holder;
    this.name = name;
    this.write = write;
    this.top = top;
    this.lines = [];
    this.now = 0;
    new ResizeObserver(() => this.draw()).observe(holder);
  }

  /** Show lines, each ``{name, points: [{time, value}]}``; a value that is null leaves a gap. */
  show(lines, now) {
    this.lines = lines;
    this.now = now;
    this.draw();
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!width) return;
    const most = Math.max(0, ...this.lines.flatMap((line) => line.points.map((point) => point.value ?? 0)));
    const top = this.top ?? roundUp(Math.max(most, 10));
    const x = (time) => width - RIGHT - ((this.now - time) / SECONDS) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    const image = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img" });
    image.setAttribute("aria-label", `${this.name}: ${this.summary()}`);
    for (const share of [0, 0.5, 1]) {
      const height = y(share * top);
      image.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }));
      image.append(shape("text", { class: "tick y", x: LEFT - 6, y: height + 4 }, this.write(share * top)));
    }
    for (const [seconds, text, anchor] of [[120, "−2 min", "start"], [60, "−1 min", "middle"], [0, "now", "end"]]) {
      const position = { class: "tick", x: x(this.now - seconds), y: HEIGHT - 4, "text-anchor": anchor };
      image.append(shape("text", position, text));
    }
    for (const line of this.lines) this.drawLine(image, line, x, y);
    this.holder.replaceChildren(image);
  }

  drawLine(image, line, x, y) {
    const runs = [[]];
    for (const { time, value } of line.points) {
      if (value === null) runs.push([]);
      else if (this.now - time <= SECONDS) runs.at(-1).push(`${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    }
    for (const run of runs.filter((points) => points.length)) {
      if (run.length === 1) run.push(run[0]); // a single point is drawn as a dot
      image.append(shape("polyline", { class: "line", "data-colour": colourOf(line.name), points: run.join(" ") }));
    }
  }

  summary() {
    const last = this.lines.map((line) => {
      const value = line.points.at(-1)?.value ?? null;
      return `replica ${shortName(line.name)} ${value === null ? "nothing" : this.write(value)}`;
    });
    return `now ${last.join(", ") || "nothing"}`;
  }
}
