// Numbers for people: three significant digits and a unit.

const whole = new Intl.NumberFormat("en");
const NONE = "–";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? whole.format(value) : NONE);

export function digits(value, most = 3) {
  if (value === "NaN" || value === "Infinity" || value === "-Infinity") return value;
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6)
    ? value.toExponential(most - 1).replace("e+", "e")
    : size >= 1000 ? whole.format(Math.round(value)) : String(Number(value.toPrecision(most)));
  return text.replaceAll("-", "−");
}

// A rate has fixed decimals, so that its width is stable.
export function rate(value) {
  if (!isNumber(value)) return NONE;
  return value >= 100 ? whole.format(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (value >= 999.5 && i < units.length - 1) {
    value /= 1000;
    i += 1;
  }
  return `${i === 0 || value >= 100 ? Math.round(value) : value.toFixed(value >= 10 ? 1 : 2)} ${units[i]}`;
}

export const percent = (value) => (isNumber(value) ? `${whole.format(Math.round(100 * value))} %` : NONE);

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1000).toFixed(2)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// The age of a heartbeat: tenths of a second show that it is late.
export const age = (value) => (value < 60 ? `${value.toFixed(1)} s` : seconds(value));

// A duration in whole seconds.
export const duration = (value) => (value < 60 ? `${Math.round(value)} s` : seconds(value));

// A time with its day, unless that is today.
export function moment(at) {
  const date = new Date(at * 1000);
  return date.toDateString() === new Date().toDateString() ? clock(at) : `${date.toLocaleDateString("en-CA")} ${clock(at)}`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export function names(kind, ranks) {
  if (ranks.length === 0) return `no ${kind}`;
  const shown = ranks.slice(0, 12).join(", ") + (ranks.length > 12 ? ` and ${ranks.length - 12} more` : "");
  return `${kind}${ranks.length > 1 ? "s" : ""} ${shown}`;
}
