// Past counters of GET /live; rates are computed from their differences.

const KEPT_S = 125;
const RATE_OVER_S = 2.5; // the difference of one poll is noisy
const HITS_OVER_S = 30;

export class History {
  constructor() {
    this.samples = new Map(); // by replica: {time, generated, queried, hit}, the latest last
  }

  /** Add an answer of GET /live; return false if it is not newer than the last one. */
  add(state) {
    if (this.time >= state.time) return false;
    this.time = state.time;
    const present = new Set(state.replicas.map((replica) => replica.name));
    for (const name of this.samples.keys()) if (!present.has(name)) this.samples.delete(name);
    for (const replica of state.replicas) {
      const samples = this.samples.get(replica.name) ?? [];
      this.samples.set(replica.name, samples);
      const { generated_tokens: generated, query_tokens: queried, hit_tokens: hit } = replica;
      samples.push({ time: state.time, generated, queried, hit });
      while (samples[0].time < state.time - KEPT_S - HITS_OVER_S) samples.shift();
      samples.at(-1).rate = tokensPerSecond(samples);
      samples.at(-1).hitRate = hitRate(samples);
    }
    return true;
  }

  /** One line per replica, of ``rate`` or ``hitRate``. */
  lines(field) {
    return [...this.samples].map(([name, samples]) => ({
      name,
      points: samples.map((sample) => ({ time: sample.time, value: sample[field] })),
    }));
  }

  /** The latest rate of a replica, or of all. */
  rate(name) {
    const series = name ? [this.samples.get(name)] : [...this.samples.values()];
    return series.reduce((sum, samples) => sum + (samples.at(-1).rate ?? 0), 0);
  }

  /** The hit rate of a replica, or of all, over the last two minutes; null without queries. */
  hits(name) {
    const series = name ? [this.samples.get(name)] : [...this.samples.values()];
    const changes = series.map((samples) => change(samples, KEPT_S));
    const queried = changes.reduce((sum, one) => sum + one.queried, 0);
    return queried ? changes.reduce((sum, one) => sum + one.hit, 0) / queried : null;
  }
}

/** The increase of the counters over the last seconds, at least over the last two samples. */
function change(samples, seconds) {
  const last = samples.at(-1);
  const inside = samples.findIndex((sample) => sample.time >= last.time - seconds);
  const first = samples[Math.max(0, Math.min(inside, samples.length - 2))];
  return {
    seconds: last.time - first.time,
    generated: last.generated - first.generated,
    queried: last.queried - first.queried,
    hit: last.hit - first.hit,
  };
}

function tokensPerSecond(samples) {
  const { seconds, generated } = change(samples, RATE_OVER_S);
  return seconds > 0 ? generated / seconds : null;
}

function hitRate(samples) {
  const { queried, hit } = change(samples, HITS_OVER_S);
  return queried ? hit / queried : null;
}
