// Numbers and names for display.

const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

export const count = (value) => whole.format(Math.round(value));

/** A rate: one decimal below ten, none above. */
export const rate = (value) => (value < 10 ? value.toFixed(1) : count(value));

export const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)}%`);

/** A share, with a decimal below 10%. */
export const finePercent = (share) => (share > 0 && share < 0.1 ? `${(share * 100).toFixed(1)}%` : percent(share));

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** Bytes in the largest unit of which there is one. */
export function bytes(value) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${rate(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const timeOfDay = (unixSeconds) => clock.format(new Date(unixSeconds * 1000));

/** The last characters of a replica's name, which differ between replicas. */
export const shortName = (name) => name.slice(-6);
