// Numbers and names as people read them.

const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

export const count = (value) => whole.format(Math.round(value));

/** A rate: one decimal below ten, none above. */
export const rate = (value) => (value < 10 ? value.toFixed(1) : count(value));

export const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)}%`);

/** A share with a decimal where whole percents would say little. */
export const finePercent = (share) => (share > 0 && share < 0.1 ? `${(share * 100).toFixed(1)}%` : percent(share));

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

export const timeOfDay = (unixSeconds) => clock.format(new Date(unixSeconds * 1000));

/** A replica's name without what all names have in common; the last characters tell them apart. */
export const shortName = (name) => name.slice(-6);
