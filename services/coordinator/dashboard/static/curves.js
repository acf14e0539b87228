// Reported results: a chart for each name, with one curve for each trainer, or their mean.

import { SERIES, draw, series, watchChart } from "./charts.js";
import { byId, flag, keep, make, show } from "./dom.js";
import * as format from "./format.js";
import { comparedRuns, keptFolder } from "./history.js";
import { explain } from "./terms.js";

const MAX_NAMED = 6; // with more trainers than colours, all are pale
const KEY = "gradpost.curves";

const choice = { x: "round", smoothing: 0, log: false, mean: false, hidden: [], ...JSON.parse(localStorage.getItem(KEY)) };
let newest = { curves: {} };
let unit = "round"; // of the axis

export function setUpCurves() {
  const controls = { x: byId("curve-x"), smoothing: byId("curve-smoothing"), log: byId("curve-log"), mean: byId("curve-mean") };
  for (const [name, control] of Object.entries(controls)) {
    const property = control.type === "checkbox" ? "checked" : control.type === "range" ? "valueAsNumber" : "value";
    control[property] = choice[name];
    control.addEventListener("input", () => choose({ [name]: control[property] }));
  }
}

function choose(changed) {
  Object.assign(choice, changed);
  localStorage.setItem(KEY, JSON.stringify(choice));
  redrawCurves();
}

export const redrawCurves = () => showCurves(newest, unit, true);

export function showCurves(answer, unitOfRounds, now = false) {
  newest = answer;
  unit = unitOfRounds;
  const others = comparedRuns();
  if (keptFolder) unit = others.every(({ mode }) => mode === "sync") ? "round" : "step of a trainer";
  const all = new Set([answer, ...others].flatMap(({ curves }) => Object.keys(curves)));
  const names = [...all].sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
  flag(byId("curves"), "data-empty", names.length === 0);
  show(byId("curve-smoothing-value"), choice.smoothing.toFixed(2));
  const ranks = [...new Set(Object.values(answer.curves).flatMap(Object.keys))].sort((a, b) => a - b);
  const isFew = ranks.length <= MAX_NAMED;
  const legend = isFew && !choice.mean ? ranks.map((rank) => ({ name: `trainer ${rank}` })) : [];
  if (others.length && ranks.length && !legend.length) legend.push({ name: "this run" });
  const first = legend.length; // of the colours that the compared runs have
  legend.push(...others.map(({ title, dash }) => ({ name: title, dash })));
  keep(byId("curve-legend"), legend, ({ name }) => name, () => make("li"), (item, { name, dash }) => {
    show(item, name);
    item.dataset.series = (legend.findIndex((one) => one.name === name) % SERIES.length) + 1;
    if (dash) item.dataset.dash = dash;
  });
  keep(byId("curve-names"), names, (name) => name, makeTab, (tab, name) => {
    show(tab, titleOf(name));
    tab.setAttribute("aria-pressed", String(!choice.hidden.includes(name)));
  });
  keep(byId("curve-charts"), names, (name) => name, makeFigure, (figure, name) => {
    figure.hidden = choice.hidden.includes(name);
    const colourOf = (rank) => series(isFew ? ranks.indexOf(rank) : 0);
    const compared = others.map((one, i) => ({ ...one, colour: () => series(first + i) })).filter(({ curves }) => name in curves);
    if (!figure.hidden) drawCurves(figure, name, colourOf, compared, isFew, now);
  });
}

// The newest value of each curve whose name begins so, of the lowest rank.
export function newestOf(name) {
  const found = Object.entries(newest.curves).filter(([one]) => one.startsWith(name));
  return [...new Set(found.map(([, curves]) => Object.values(curves)[0].value.at(-1)))];
}

// The curves that trainers measure themselves are shown in words.
const titleOf = (name) => (name.startsWith("gradpost/") ? name.slice("gradpost/".length).replaceAll("_", " ") : name);

function makeTab(name) {
  const tab = make("button", { type: "button" });
  tab.addEventListener("click", () => {
    const { hidden } = choice;
    choose({ hidden: hidden.includes(name) ? hidden.filter((one) => one !== name) : [...hidden, name] });
  });
  return tab;
}

function makeFigure(name) {
  const chart = make("div", { class: "chart", id: `curve-${name}`, role: "img" });
  watchChart(chart);
  const title = make("b");
  if (name.startsWith("gradpost/")) {
    title.dataset.term = name.split("/")[1];
    explain(title);
  }
  return make("figure", {}, make("figcaption", {}, title, make("span")), chart);
}

function drawCurves(figure, name, colourOf, compared, isFew, now) {
  const [caption, chart] = figure.children;
  const ofTrainers = Object.entries(newest.curves[name] ?? {});
  const isMean = choice.mean && ofTrainers.length > 0;
  const mean = meanOf(ofTrainers.map(([, curve]) => curve));
  const start = startOf(newest.curves);
  const curves = isMean
    ? [{ key: "mean", name: `mean of ${ofTrainers.length} trainers`, curve: mean, colour: () => series(0), start }]
    : ofTrainers.map(([rank, curve]) => ({ key: rank, name: `trainer ${rank}`, curve, colour: () => colourOf(rank), isPale: !isFew, start }));
  curves.push(...compared.map((one) => ({ ...one, key: one.run, name: one.title, curve: meanOf(Object.values(one.curves[name])), start: startOf(one.curves) })));
  const ends = Object.fromEntries(curves.map(({ key, curve }) => [key, curve.value.at(-1)]));
  const last = curves.map(({ key, name: text }) => `${text} ${format.digits(ends[key], 4)}`);
  chart.dataset.value = JSON.stringify(ends);
  show(caption.firstChild, titleOf(name));
  const newestValue = format.digits((ofTrainers.length ? mean : curves[0].curve).value.at(-1), 4);
  show(caption.lastChild, `newest${ofTrainers.length > 1 ? " mean" : ""} ${newestValue}`);
  const isSmooth = choice.smoothing > 0;
  const isRelative = choice.x === "time" && comparedRuns().length > 0;
  const positions = ({ curve, start: zero }) => (choice.x === "round" ? curve.round : curve.at.map((at) => (isRelative ? at - zero : new Date(at * 1000))));
  const line = (one, values, more) => ({
    x: positions(one), y: values, name: one.name,
    mode: values.length > 1 ? "lines" : "markers", opacity: one.isPale ? 0.4 : 1,
    line: { color: one.colour(), width: one.isPale ? 1 : 1.8, dash: one.dash ?? "solid" }, hovertemplate: "%{y:.4~g}", ...more,
  });
  const timeAxis = isRelative ? { title: "seconds since the first value", hoverformat: ".1f" } : { tickformat: "%H:%M:%S", nticks: 4 };
  draw(chart.id, {
    label: `${titleOf(name)}, newest: ${last.slice(0, MAX_NAMED).join(", ")}`,
    traces: () => [
      ...(isSmooth ? curves.map((one) => line(one, gaps(one.curve.value), { opacity: 0.2, hoverinfo: "skip", hovertemplate: undefined })) : []),
      ...curves.map((one) => line(one, gaps(smooth(one.curve.value, choice.smoothing)))),
    ],
    layout: {
      hovermode: isFew || choice.mean ? "x unified" : "closest", uirevision: `${choice.x} ${choice.log} ${isRelative}`,
      xaxis: choice.x === "round" ? { title: unit, hoverformat: ",d" } : { type: isRelative ? "linear" : "date", ...timeAxis },
      yaxis: { rangemode: "normal", type: choice.log ? "log" : "linear", range: choice.log ? undefined : aroundConstant(curves) },
    },
  }, { now });
}

// The time of the first point of a run, from which the times of compared runs count.
const startOf = (curves) => Math.min(...Object.values(curves).flatMap(Object.values).map(({ at }) => at[0]));

// The library would show a constant 0.0003 on an axis from −1 to 1.
function aroundConstant(curves) {
  const values = curves.flatMap(({ curve }) => curve.value.filter(format.isNumber));
  const [first] = values;
  if (!first || values.some((value) => value !== first)) return undefined;
  return [first - Math.abs(first) / 2, first + Math.abs(first) / 2];
}

const gaps = (values) => values.map((one) => (format.isNumber(one) ? one : null)); // NaN is a gap

// The exponential moving average, without the bias towards 0 at the beginning. As in TensorBoard.
function smooth(values, weight) {
  let sum = 0;
  let scale = 0;
  return values.map((value) => {
    if (!format.isNumber(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

// The mean of all values of N trainers, over each N neighbouring points.
function meanOf(curves) {
  const points = curves.flatMap(({ round, at, value, count }) => value.map((one, i) => ({ round: round[i], at: at[i], value: one, count: count[i] })));
  points.sort((a, b) => a.round - b.round || a.at - b.at);
  const mean = { round: [], at: [], value: [], count: [] };
  for (let i = 0; i < points.length; i += curves.length) {
    const group = points.slice(i, i + curves.length);
    const number = group.reduce((sum, { count }) => sum + count, 0);
    const isWhole = group.every(({ value }) => format.isNumber(value));
    mean.round.push(group.at(-1).round);
    mean.at.push(group.at(-1).at);
    mean.count.push(number);
    mean.value.push(isWhole ? group.reduce((sum, { value, count }) => sum + value * (count / number), 0) : null);
  }
  return mean;
}
