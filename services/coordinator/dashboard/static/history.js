// The history: runs that have ended, the end of the selected one, and the curves of those that are compared.

import { ask } from "./api.js";
import { byId, keep, keepRows, make, show } from "./dom.js";
import * as format from "./format.js";

export const keptFolder = document.body.dataset.keptRuns; // set if there is no cluster

const KEY = "gradpost.compared";
const DASHES = [...(keptFolder ? [undefined] : []), "dash", "dot", "dashdot", "longdash"]; // the cluster's run is solid
const MAX_COMPARED = 24;

let compared = JSON.parse(localStorage.getItem(KEY)); // null until the user has checked a run
let selected = null;
let runs = [];
const records = new Map(); // of compared and selected runs, by run
let drawn = "[]"; // the compared runs in the charts
let changed = () => {};

// `onChange` is called when other curves are to be shown.
export function setUpHistory(onChange) {
  changed = onChange;
}

// The compared runs with their records, in the order in which they were checked.
export function comparedRuns() {
  const listed = new Set(runs.map(({ run }) => run));
  return (compared ?? []).filter((run) => listed.has(run) && records.has(run)).map((run, i) => {
    const { record } = records.get(run);
    const { name } = runs.find((one) => one.run === run);
    return { run, title: `${name ?? "run"} ${run}`, mode: record.status.mode, curves: record.curves.curves, dash: DASHES[i % DASHES.length] };
  });
}

// `current` is the status of the cluster: its run is listed once it is over.
export async function refreshHistory(current = null) {
  runs = (await ask("v1/history")).filter(({ run, state }) => state !== "training" || run !== current?.run);
  if (keptFolder && compared === null) compared = runs.slice(0, 1).map(({ run }) => run);
  await showRuns();
}

async function showRuns() {
  const wanted = runs.filter(({ run }) => run === selected || compared?.includes(run));
  const isNew = ({ run, ended_at: at }) => records.get(run)?.at !== at; // a resumed run has ended again
  const missing = wanted.filter(isNew);
  await Promise.all(missing.map(async ({ run, ended_at: at }) => {
    const record = await ask(`v1/history/${encodeURIComponent(run)}`).catch(() => null); // deleted meanwhile
    if (record !== null) records.set(run, { at, record });
  }));
  keepRows(byId("history"), runs, ({ run }) => run, [
    ["compare", showCheck],
    ["", showButton],
    ["long", (cell, { name }) => showLong(cell, name)],
    ["", (cell, one) => {
      show(cell, stateOf(one), one.state);
      cell.dataset.state = one.state;
    }],
    ["", (cell, { mode }) => show(cell, mode, mode)],
    ["long", (cell, { optimizer }) => showLong(cell, optimizer)],
    ["long", (cell, { command }) => showLong(cell, command)],
    ["", (cell, one) => show(cell, dateOf(one.started_at), one.started_at)],
    ["number", (cell, one) => show(cell, format.seconds(durationOf(one)))],
    ["number", (cell, { rounds }) => show(cell, format.count(rounds), rounds)],
    ["number", showResult],
  ]);
  showEnd(runs.find(({ run }) => run === selected));
  const now = JSON.stringify(comparedRuns().map(({ run }) => [run, records.get(run).at]));
  if (now === drawn) return;
  drawn = now;
  changed();
}

function stateOf({ state, failure }) {
  if (state === "training") return "interrupted";
  return state === "finished" && failure !== null ? "stopped" : state;
}

function showLong(cell, text) {
  show(cell, text ?? "–", text);
  cell.title = text ?? "";
}

// The loss, or the result that was reported first.
function showResult(cell, { results }) {
  const name = "loss" in results ? "loss" : Object.keys(results)[0];
  show(cell, name === undefined ? "–" : `${name} ${format.digits(results[name], 4)}`, results[name]);
}

const dateOf = (at) => new Date(at * 1000).toLocaleString("sv-SE"); // ISO 8601, in local time

// Without the time between processes of the coordinator.
const durationOf = (one) => one.earlier_seconds + one.ended_at - one.started_at;

function showCheck(cell, { run }) {
  if (!cell.firstChild) {
    const check = make("input", { type: "checkbox", "aria-label": `Compare run ${run}` });
    check.addEventListener("change", () => {
      const others = (compared ?? []).filter((one) => one !== run);
      compared = (check.checked ? [...others, run] : others).slice(-MAX_COMPARED);
      localStorage.setItem(KEY, JSON.stringify(compared));
      update();
    });
    cell.append(check);
  }
  cell.firstChild.checked = Boolean(compared?.includes(run));
}

function showButton(cell, { run }) {
  if (!cell.firstChild) {
    const button = make("button", { type: "button", "aria-controls": "history-end" }, run);
    button.addEventListener("click", () => {
      selected = selected === run ? null : run;
      update();
    });
    cell.append(button);
  }
  cell.firstChild.setAttribute("aria-expanded", String(run === selected));
  cell.dataset.value = JSON.stringify(run);
}

const update = () => showRuns().catch(() => {}); // the next refresh shows the problem

function showEnd(entry) {
  const record = entry && records.get(entry.run)?.record;
  byId("history-end").hidden = !record;
  if (!record) return;
  show(byId("history-run"), `${entry.name ?? "Run"} ${entry.run}`, entry.run);
  show(byId("history-failure"), entry.failure ?? "");
  const create = ([name]) => make("div", {}, make("dt", {}, name), make("dd"));
  keep(byId("history-figures"), figuresOf(entry, record), ([name]) => name, create, (item, [, text]) => {
    show(item.lastChild, text);
  });
}

function figuresOf(entry, { status, summary }) {
  const states = Object.entries(Object.groupBy(status.trainers, ({ state }) => state));
  const trainers = states.map(([state, those]) => `${those.length} ${state}`).join(", ");
  const total = (name) => format.bytes(summary?.shards.reduce((sum, shard) => sum + shard[name], 0));
  return [
    ["State", stateOf(entry)], ["Started", dateOf(entry.started_at)], ["Ended", dateOf(entry.ended_at)],
    ["Duration", format.seconds(durationOf(entry))], ["Rounds", format.count(entry.rounds)],
    ["Trainers", trainers || "–"], ["Pservers", status.num_pservers ? format.count(status.num_pservers) : "none, a ring"],
    ["Model", `${format.count(status.num_parameters)} parameters, ${format.bytes(status.parameter_bytes)}`],
    ["Optimizer", entry.optimizer ?? "–"], ["Script", entry.command ?? "–"], ["Transport", summary?.transport ?? "–"],
    ["Pushed", total("pushed_bytes")], ["Pulled", total("pulled_bytes")],
    ...Object.entries(entry.results).sort().map(([name, value]) => [name, format.digits(value, 4)]),
  ];
}
