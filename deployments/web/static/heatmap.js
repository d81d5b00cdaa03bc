// A replica's KV blocks as a canvas of cells. A cell of several blocks is filled in proportion to their states.

const STATES = ["shared", "used", "cached"]; // from the bottom of a cell upwards; the rest is free
const WIDE = 2.8; // aimed ratio of columns to rows

/** The colours of the states in the current theme, read from the legend. */
function colours() {
  return Object.fromEntries(
    [...document.querySelectorAll("#legend i")].map((swatch) => [
      swatch.dataset.state, getComputedStyle(swatch).backgroundColor]));
}

/** Unpack ``cells`` of GET /live into one ``{cached, used, shared, size}`` per cell. */
export function unpack(replica) {
  const bytes = Uint8Array.from(atob(replica.cells), (character) => character.charCodeAt(0));
  const cells = [];
  for (let first = 0, left = replica.num_blocks; first < bytes.length; first += 3) {
    const size = Math.min(left, replica.blocks_per_cell);
    cells.push({ cached: bytes[first], used: bytes[first + 1], shared: bytes[first + 2], size });
    left -= size;
  }
  return cells;
}

/** A number of columns near the aimed ratio, if possible one that fills all rows. */
function columnsFor(numCells) {
  const wanted = Math.ceil(Math.sqrt(numCells * WIDE));
  for (let off = 0; off <= wanted / 4; off++) {
    for (const columns of [wanted + off, wanted - off]) if (numCells % columns === 0) return columns;
  }
  return wanted;
}

export class HeatMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.cells = [];
    this.resizes = new ResizeObserver(() => this.draw());
    this.resizes.observe(canvas);
    this.listening = new AbortController();
    document.addEventListener("themechange", () => this.draw(), { signal: this.listening.signal });
  }

  /** Remove the listeners; the page outlives the replica. */
  close() {
    this.resizes.disconnect();
    this.listening.abort();
  }

  show(cells) {
    this.cells = cells;
    this.draw();
  }

  draw() {
    const { canvas, cells } = this;
    const columns = cells.length && columnsFor(cells.length);
    const width = Math.round(canvas.clientWidth * devicePixelRatio);
    if (!columns || !width) return;
    const rows = Math.ceil(cells.length / columns);
    const edge = (index) => Math.round((index * width) / columns); // whole pixels, for sharp edges
    const gap = width / columns > 4 ? Math.max(1, Math.round(devicePixelRatio)) : 0;
    const height = edge(rows);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const paint = canvas.getContext("2d");
    const colour = colours();
    paint.clearRect(0, 0, width, height);
    cells.forEach((cell, index) => {
      const column = index % columns, row = Math.floor(index / columns);
      const left = edge(column), top = edge(row);
      const side = { width: edge(column + 1) - left - gap, height: edge(row + 1) - top - gap };
      paint.fillStyle = colour.free;
      paint.fillRect(left, top, side.width, side.height);
      let blocks = 0;
      for (const state of STATES) {
        if (!cell[state]) continue;
        const bottom = Math.round((side.height * blocks) / cell.size);
        blocks += cell[state];
        const upper = Math.max(bottom + 1, Math.round((side.height * blocks) / cell.size)); // at least one pixel
        paint.fillStyle = colour[state];
        paint.fillRect(left, top + side.height - upper, side.width, upper - bottom);
      }
    });
  }
}
