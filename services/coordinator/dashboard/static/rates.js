// Rates and staleness.

import { colour, draw, series } from "./charts.js";
import { byId, flag, show } from "./dom.js";
import * as format from "./format.js";
import { isSync } from "./headline.js";

export function showSpeed(status) {
  const { samples } = status;
  const [rounds, steps] = [samples.map((one) => one.rounds), samples.map((one) => one.steps)];
  flag(byId("speed"), "data-empty", rounds.every((value) => value === null));
  const x = samples.map(({ at }) => new Date(at * 1000));
  const name = isSync(status) ? "rounds / s" : "contributions / s";
  const line = (y, title, i, dash) => ({
    x, y, name: title, mode: "lines", line: { color: series(i), width: 2, dash }, hovertemplate: "%{y:.3~g}",
  });
  const newest = (values) => format.rate(values.at(-1));
  draw("speed-chart", {
    label: `${name}: ${newest(rounds)}, steps / s: ${newest(steps)}`,
    traces: () => [
      line(rounds, name, 0, "solid"),
      line(steps, "steps / s", 1, "dash"),
    ],
    layout: { showlegend: true, xaxis: { tickformat: "%H:%M:%S", nticks: 4 } },
  });
}

export function showStaleness(status) {
  const { staleness } = status;
  const bits = Object.keys(staleness); // binary lengths, in order
  flag(byId("staleness"), "data-empty", bits.length === 0);
  const why = isSync(status)
    ? "The synchronous mode has no staleness: a gradient is aggregated in the round that it was computed for."
    : "Shown as soon as updates are applied.";
  show(byId("staleness-empty"), why);
  const counts = Object.values(staleness);
  const total = counts.reduce((sum, number) => sum + number, 0);
  show(byId("staleness-note"), total ? `${format.count(total)} updates of blocks` : "", staleness);
  if (total === 0) return;
  draw("staleness-chart", {
    label: `Staleness of ${format.count(total)} updates`,
    traces: () => [{
      type: "bar", x: bits.map(nameOf), y: counts,
      marker: { color: colour("series-1") }, hovertemplate: "%{y:,} updates<extra></extra>",
    }],
    layout: {
      xaxis: { type: "category", title: "updates since the pull" },
      yaxis: { title: "updates", tickformat: "~s" },
    },
  });
}

const nameOf = (bits) => (bits < 2 ? bits : `${2 ** (bits - 1)}–${2 ** bits - 1}`);
