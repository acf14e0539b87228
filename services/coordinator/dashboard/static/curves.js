// Reported results: one curve for each trainer, of the selected name.

import { draw, series } from "./charts.js";
import { byId, flag, keep, make, show } from "./dom.js";
import * as format from "./format.js";

const MAX_NAMED = 6; // with more trainers than colours, all are pale

let chosen = "loss";
let newest = { curves: {} };
let steps = "round"; // the unit of the axis

export function showCurves(answer, unit) {
  newest = answer;
  steps = unit;
  const names = Object.keys(answer.curves).sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
  flag(byId("curves"), "data-empty", names.length === 0);
  if (names.length === 0) return;
  if (!names.includes(chosen)) [chosen] = names;
  keep(byId("curve-names"), names, (name) => name, makeTab, (tab, name) => {
    show(tab, name);
    tab.setAttribute("aria-pressed", String(name === chosen));
  });
  drawChosen();
}

function makeTab(name) {
  const tab = make("button", { type: "button" });
  tab.addEventListener("click", () => {
    chosen = name;
    showCurves(newest, steps);
    drawChosen(true);
  });
  return tab;
}

function drawChosen(now = false) {
  const curves = Object.entries(newest.curves[chosen]);
  const value = (one) => (format.isNumber(one) ? one : null); // NaN is a gap
  const ends = Object.fromEntries(curves.map(([rank, curve]) => [rank, curve.value.at(-1)]));
  byId("curve-chart").dataset.value = JSON.stringify(ends);
  const last = Object.entries(ends).map(([rank, end]) => `trainer ${rank} ${format.digits(end, 4)}`);
  const isFew = curves.length <= MAX_NAMED;
  const line = ([rank, curve], i) => ({
    x: curve.round, y: curve.value.map(value), name: `trainer ${rank}`, opacity: isFew ? 1 : 0.4,
    mode: curve.value.length > 1 ? "lines" : "markers",
    line: { color: series(isFew ? i : 0), width: isFew ? 1.8 : 1 }, hovertemplate: "%{y:.4~g}",
  });
  draw("curve-chart", {
    label: `${chosen}, newest: ${last.slice(0, MAX_NAMED).join(", ")}`,
    traces: () => curves.map(line),
    layout: {
      showlegend: isFew, hovermode: isFew ? "x unified" : "closest", uirevision: chosen,
      xaxis: { title: steps, hoverformat: ",d" }, yaxis: { rangemode: "normal" },
    },
  }, { now });
}
