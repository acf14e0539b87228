// The parameter browser: a list with a filter, and the statistics of the selected parameter, polled.

import { ask } from "./api.js";
import { colour, draw } from "./charts.js";
import { byId, flag, keep, make, show } from "./dom.js";
import * as format from "./format.js";
import { explain } from "./terms.js";

const TAIL = 16; // characters at the end of a name that are always shown, since they tell it from its neighbours
const MAX_SHOWN = 500; // rows; the filter finds others

let known = { run: "", digest: "", parameters: [] };
let chosen = null;
let wanted = null; // the parameter of the newest request; other answers are late

export function setUpParameters(refresh) {
  byId("filter").addEventListener("input", showList);
  const list = byId("parameter-list");
  list.addEventListener("click", (event) => choose(event.target.closest("[role=option]")?.dataset.key, refresh));
  list.addEventListener("keydown", (event) => {
    const names = [...list.children].map((row) => row.dataset.key);
    const at = names.indexOf(chosen);
    const to = { ArrowDown: at + 1, ArrowUp: Math.max(at - 1, 0), Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined || names[to] === undefined) return;
    event.preventDefault();
    choose(names[to], refresh);
    list.children[to].scrollIntoView({ block: "nearest" });
  });
}

export const needsParameters = ({ run, plan_digest: digest }) => known.run !== run || known.digest !== digest;

export function showParameters(answer) {
  known = answer;
  if (!answer.parameters.some(({ name }) => name === chosen)) chosen = answer.parameters[0]?.name ?? null;
  showList();
}

export function forgetParameters() {
  if (known.parameters.length) showParameters({ run: "", digest: "", parameters: [] });
  flag(byId("parameters"), "data-empty", true);
}

export async function refreshStatistics() {
  if (chosen === null) return;
  wanted = chosen;
  const answer = await ask(`v1/statistics/${chosen.split("/").map(encodeURIComponent).join("/")}`);
  if (answer.name === wanted) showStatistics(answer);
}

function choose(name, refresh) {
  if (name === undefined || name === chosen) return;
  chosen = name;
  showList();
  show(byId("parameter-more"), "reading…");
  refresh();
}

function showList() {
  const { parameters } = known;
  flag(byId("parameters"), "data-empty", parameters.length === 0);
  const text = byId("filter").value.trim().toLowerCase();
  const found = parameters.filter(({ name }) => name.toLowerCase().includes(text));
  const some = found.length > MAX_SHOWN ? `, the first ${MAX_SHOWN} are shown` : "";
  const note = `${format.count(found.length)} of ${format.count(parameters.length)}${some}`;
  show(byId("parameters-note"), parameters.length ? note : "");
  const list = byId("parameter-list");
  keep(list, found.slice(0, MAX_SHOWN), ({ name }) => name, makeRow, (row, { name }) => {
    row.setAttribute("aria-selected", String(name === chosen));
    if (name === chosen) list.setAttribute("aria-activedescendant", row.id);
  });
  show(byId("parameter-name"), chosen ?? "Select a parameter");
}

function makeRow({ name, shape, bytes, blocks }) {
  const owners = [...new Set(blocks.map(({ pserver }) => pserver))];
  return make("div", { role: "option", id: `option-${encodeURIComponent(name)}`, title: name },
    make("span", { class: "name" }, make("span", {}, name.slice(0, -TAIL)), name.slice(-TAIL)), make("span", { class: "shape" }, shape.join("×") || "scalar"),
    make("span", { class: "size" }, format.bytes(bytes)),
    make("span", { class: "owners" }, format.names("pserver", owners)));
}

const ROWS = [
  ["norm", "Norm", format.digits],
  ["mean", "Mean", format.digits],
  ["deviation", "Deviation", format.digits],
  ["minimum", "Smallest", format.digits],
  ["maximum", "Largest", format.digits],
  ["num_nan", "NaN", format.count],
  ["num_infinite", "Infinite", format.count],
  ["num_zero", "Zero", format.count],
];
const ROWS_OF_SPARSE = [...ROWS, ["num_touched", "Touched rows", format.count]];

function showStatistics(answer) {
  const more = `${format.count(answer.num_elements)} elements, version ${format.count(answer.version)}`;
  show(byId("parameter-more"), more, answer.version);
  const create = ([key]) => {
    const title = make("dt", { "data-term": key });
    explain(title);
    return make("div", {}, title, make("dd"));
  };
  keep(byId("statistics"), answer.num_touched === null ? ROWS : ROWS_OF_SPARSE, ([key]) => key, create, (row, [key, title, text]) => {
    show(row.firstChild, title);
    show(row.lastChild, text(answer[key]), answer[key]);
    flag(row, "data-bad", (key === "num_nan" || key === "num_infinite") && answer[key] > 0);
  });
  showHistogram(answer.name, answer.histogram);
}

// The bins are powers of two of both signs, so the axis has one place for each.
function showHistogram(name, bins) {
  byId("histogram-chart").dataset.value = JSON.stringify(bins);
  const edges = bins.map(([begin, end]) => (begin === end ? "0" : `${format.digits(begin)} to ${format.digits(end)}`));
  draw("histogram-chart", {
    label: `Histogram of ${name} in ${bins.length} bins`,
    traces: () => [{
      type: "bar", x: bins.map(([begin]) => format.digits(begin)), y: bins.map(([, , count]) => count), customdata: edges,
      marker: { color: colour("series-1") }, hovertemplate: "%{customdata}: %{y:,}<extra></extra>",
    }],
    layout: {
      bargap: 0.02, hovermode: "closest", uirevision: name,
      xaxis: { type: "category", title: "value" }, yaxis: { title: "elements", tickformat: "~s" },
    },
  });
}
