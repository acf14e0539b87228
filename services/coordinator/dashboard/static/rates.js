// Rates and staleness.

import { colour, draw, series } from "./charts.js";
import { byId, flag, show } from "./dom.js";
import * as format from "./format.js";
import { isSync } from "./headline.js";

export function showSpeed(status, { rates }) {
  flag(byId("speed"), "data-empty", rates.rounds_per_second.every((value) => value === null));
  const x = rates.at.map((second) => new Date(second * 1000));
  const name = isSync(status) ? "rounds / s" : "contributions / s";
  const line = (y, title, i, dash) => ({
    x, y, name: title, mode: "lines", line: { color: series(i), width: 2, dash }, hovertemplate: "%{y:.3~g}",
  });
  const newest = (values) => format.rate(values.at(-1));
  draw("speed-chart", {
    label: `${name}: ${newest(rates.rounds_per_second)}, steps / s: ${newest(rates.steps_per_second)}`,
    traces: () => [
      line(rates.rounds_per_second, name, 0, "solid"),
      line(rates.steps_per_second, "steps / s", 1, "dash"),
    ],
    layout: { showlegend: true, xaxis: { tickformat: "%H:%M:%S", nticks: 4 } },
  });
}

export function showStaleness(status, { staleness }) {
  flag(byId("staleness"), "data-empty", staleness.length === 0);
  const why = isSync(status)
    ? "The synchronous mode has no staleness: a gradient is aggregated in the round that it was computed for."
    : "Shown as soon as updates are applied.";
  show(byId("staleness-empty"), why);
  const bounds = staleness.map(([bound]) => bound);
  const counts = staleness.map(([, number]) => number);
  const total = counts.reduce((sum, number) => sum + number, 0);
  show(byId("staleness-note"), total ? `${format.count(total)} updates of blocks` : "", staleness);
  if (total === 0) return;
  const end = counts.findLastIndex((number) => number > 0) + 1;
  draw("staleness-chart", {
    label: `Staleness of ${format.count(total)} updates`,
    traces: () => [{
      type: "bar", x: bounds.map(nameOf).slice(0, end), y: counts.slice(0, end),
      marker: { color: colour("series-1") }, hovertemplate: "%{y:,} updates<extra></extra>",
    }],
    layout: {
      xaxis: { type: "category", title: "updates since the pull" },
      yaxis: { title: "updates", tickformat: "~s" },
    },
  });
}

// The label of a bin, from its upper bound and the one before.
function nameOf(bound, i, bounds) {
  if (bound === null) return `> ${bounds[i - 1]}`;
  const low = i === 0 ? 0 : bounds[i - 1] + 1;
  return low === bound ? String(bound) : `${low}–${bound}`;
}
