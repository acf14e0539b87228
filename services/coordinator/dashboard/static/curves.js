// Reported results: a chart for each name, with one curve for each trainer, or their mean.

import { draw, series, watchChart } from "./charts.js";
import { byId, flag, keep, make, show } from "./dom.js";
import * as format from "./format.js";

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
  showCurves(newest, unit, true);
}

export function showCurves(answer, unitOfRounds, now = false) {
  newest = answer;
  unit = unitOfRounds;
  const names = Object.keys(answer.curves).sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
  flag(byId("curves"), "data-empty", names.length === 0);
  show(byId("curve-smoothing-value"), choice.smoothing.toFixed(2));
  const ranks = [...new Set(names.flatMap((name) => Object.keys(answer.curves[name])))].sort((a, b) => a - b);
  const isFew = ranks.length <= MAX_NAMED;
  keep(byId("curve-legend"), isFew && !choice.mean ? ranks : [], (rank) => rank, () => make("li"), (item, rank) => {
    show(item, `trainer ${rank}`);
    item.dataset.series = ranks.indexOf(rank) + 1;
  });
  keep(byId("curve-names"), names, (name) => name, makeTab, (tab, name) => {
    show(tab, titleOf(name));
    tab.setAttribute("aria-pressed", String(!choice.hidden.includes(name)));
  });
  keep(byId("curve-charts"), names, (name) => name, makeFigure, (figure, name) => {
    figure.hidden = choice.hidden.includes(name);
    if (!figure.hidden) drawCurves(figure, name, (rank) => series(isFew ? ranks.indexOf(rank) : 0), isFew, now);
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
  return make("figure", {}, make("figcaption", {}, make("b"), make("span")), chart);
}

function drawCurves(figure, name, colourOf, isFew, now) {
  const [caption, chart] = figure.children;
  const ofTrainers = Object.entries(newest.curves[name]);
  const curves = choice.mean ? [["mean", meanOf(ofTrainers.map(([, curve]) => curve))]] : ofTrainers;
  const ends = Object.fromEntries(curves.map(([rank, curve]) => [rank, curve.value.at(-1)]));
  const nameOf = (rank) => (choice.mean ? `mean of ${ofTrainers.length} trainers` : `trainer ${rank}`);
  const last = Object.entries(ends).map(([rank, end]) => `${nameOf(rank)} ${format.digits(end, 4)}`);
  chart.dataset.value = JSON.stringify(ends);
  show(caption.firstChild, titleOf(name));
  show(caption.lastChild, format.digits(meanOf(ofTrainers.map(([, curve]) => curve)).value.at(-1), 4));
  const isSmooth = choice.smoothing > 0;
  const line = ([rank, curve], values, more) => ({
    x: choice.x === "round" ? curve.round : curve.at.map((at) => new Date(at * 1000)), y: values, name: nameOf(rank),
    mode: values.length > 1 ? "lines" : "markers", opacity: isFew || choice.mean ? 1 : 0.4,
    line: { color: choice.mean ? series(0) : colourOf(rank), width: isFew ? 1.8 : 1 }, hovertemplate: "%{y:.4~g}", ...more,
  });
  draw(chart.id, {
    label: `${titleOf(name)}, newest: ${last.slice(0, MAX_NAMED).join(", ")}`,
    traces: () => [
      ...(isSmooth ? curves.map((one) => line(one, gaps(one[1].value), { opacity: 0.2, hoverinfo: "skip", hovertemplate: undefined })) : []),
      ...curves.map((one) => line(one, gaps(smooth(one[1].value, choice.smoothing)))),
    ],
    layout: {
      hovermode: isFew || choice.mean ? "x unified" : "closest", uirevision: `${choice.x} ${choice.log}`,
      xaxis: choice.x === "round" ? { title: unit, hoverformat: ",d" } : { tickformat: "%H:%M:%S", nticks: 4 },
      yaxis: { rangemode: "normal", type: choice.log ? "log" : "linear" },
    },
  }, { now });
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
