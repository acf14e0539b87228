// The members: trainers, their barrier, and pservers.

import { isPresent } from "./status.js";
import { byId, flag, keep, keepRows, make, show } from "./dom.js";
import * as format from "./format.js";
import { LATE_SECONDS, isSync, waitOf } from "./headline.js";

function showAge(cell, seconds, matters = true) {
  show(cell, format.age(seconds));
  flag(cell, "data-late", matters && seconds > LATE_SECONDS);
}

function whereabouts({ is_paused, barrier }) {
  const arrived = new Set(barrier?.arrived);
  const missing = new Set(barrier?.missing);
  return (rank) => (is_paused ? "paused" : missing.has(rank) ? "missing" : arrived.has(rank) ? "arrived" : "computing");
}

export function showTrainers(status) {
  const sync = isSync(status);
  const where = whereabouts(status);
  const { trainers } = status;
  show(byId("contributed-label"), sync ? `In round ${format.count(status.round)}` : "Active");
  show(byId("behind-label"), sync ? "Barrier" : "Behind");
  keepRows(byId("trainers"), trainers, (trainer) => trainer.rank, [
    ["", (cell, t) => show(cell, String(t.rank), t.rank)],
    ["", (cell, t) => {
      show(cell, t.state === "declared" ? (t.is_done ? "no batches left" : status.is_paused ? "paused" : "training") : t.state, t.state);
      cell.dataset.state = t.state;
    }],
    ["", (cell, t) => {
      show(cell, t.has_contributed ? "● yes" : "○ no", t.has_contributed);
      flag(cell, "data-on", t.has_contributed);
    }],
    ["number", (cell, t) => show(cell, format.count(t.steps), t.steps)],
    ["number", (cell, t) => show(cell, format.rate(t.steps_per_second), t.steps_per_second)],
    ["number", (cell, t) => {
      if (sync) show(cell, status.barrier ? where(t.rank) : "–", where(t.rank));
      else show(cell, format.count(t.steps_behind), t.steps_behind);
    }],
    ["number", (cell, t) => show(cell, format.digits(t.results.loss, 4), t.results.loss)],
    ["number", (cell, t) => showAge(cell, t.heartbeat_age_seconds, isPresent(t))],
  ]);
  const here = `${trainers.filter(isPresent).length} of ${format.count(status.num_trainers)} present`;
  show(byId("trainers-note"), trainers.length ? here : "");
}

export function showBarrier(status) {
  const { barrier } = status;
  const sync = isSync(status);
  const wait = waitOf(status);
  flag(byId("barrier"), "data-empty", status.state !== "training");
  flag(byId("barrier"), "data-late", wait > LATE_SECONDS);
  show(byId("barrier-title"), sync ? "Barrier" : "Waiting");
  const where = whereabouts(status);
  const at = barrier?.pserver === null ? "" : `, pserver ${barrier?.pserver}`;
  show(byId("barrier-note"), barrier && sync ? `round ${format.count(barrier.round)}${at}` : "");
  const says = sync ? arrivals(barrier) : waiting(barrier);
  show(byId("barrier-says"), status.is_paused ? "The run is paused" : says, barrier);
  show(byId("barrier-since"), sinceWhen(barrier, wait));
  const waits = status.pservers.map((pserver) => pserver.seconds_a_wait).filter(format.isNumber);
  const mean = `Mean wait in the newest five seconds: ${format.seconds(Math.max(...waits))}`;
  show(byId("barrier-wait"), waits.length ? mean : "");

  const ranks = sync ? status.trainers.filter((trainer) => !trainer.is_done).map(({ rank }) => rank) : [];
  const create = () => make("li", {}, make("b"), make("span"));
  keep(byId("barrier-ranks"), ranks, (rank) => rank, create, (item, rank) => {
    show(item.firstChild, String(rank), rank);
    show(item.lastChild, where(rank));
    item.dataset.state = where(rank);
  });
}

function arrivals(barrier) {
  if (!barrier) return "All trainers are computing";
  return `${barrier.arrived.length} of ${barrier.arrived.length + barrier.missing.length} have arrived`;
}

const waiting = (barrier) => (barrier ? "A trainer waits for others" : "No trainer waits");

function sinceWhen(barrier, wait) {
  if (!barrier) return "No trainer waits for another";
  const text = `Waiting for ${format.names("trainer", barrier.missing)} since ${format.clock(barrier.waiting_since)}`;
  return wait > LATE_SECONDS ? `${text}, for ${format.seconds(wait)}` : text;
}

export function showPservers(status) {
  const largest = Math.max(1, ...status.pservers.map((pserver) => pserver.shard_bytes));
  const figure = (name, text) => ["number", (cell, p) => show(cell, text(p[name]), p[name])];
  keepRows(byId("pservers"), status.pservers, (pserver) => pserver.index, [
    ["", (cell, p) => {
      show(cell, String(p.index), p.index);
      cell.title = `${p.address}, incarnation ${p.incarnation}`;
    }],
    ["balance", (cell, p) => showShare(cell, p.shard_bytes / largest)],
    figure("shard_bytes", format.bytes),
    figure("num_blocks", format.count),
    figure("num_queued", format.count),
    figure("seconds_an_apply", format.seconds),
    figure("seconds_a_wait", format.seconds),
    figure("pushed_bytes_per_second", format.bytes),
    figure("pulled_bytes_per_second", format.bytes),
    ["number", (cell, p) => showAge(cell, p.heartbeat_age_seconds)],
  ]);
}

export function showStandbys({ standbys, num_pservers: numPservers }) {
  const ready = new Set(standbys.filter(({ role }) => role === "in_sync").map(({ follows }) => follows));
  show(byId("standbys-note"), `${ready.size} of ${format.count(numPservers)} pservers have a standby in sync`, ready.size);
  const figure = (name, text) => ["number", (cell, s) => show(cell, s.run === null ? "–" : text(s[name]), s[name])];
  keepRows(byId("standbys"), standbys, ({ follows, address }) => `${follows} ${address}`, [
    ["", (cell, s) => show(cell, String(s.follows), s.follows)],
    ["", (cell, s) => {
      show(cell, s.run === null ? "no replica yet" : s.role.replace("_", " "), s.role);
      flag(cell, "data-on", s.role === "in_sync");
    }],
    ["", (cell, s) => show(cell, s.address, s.address)],
    figure("round", format.count),
    figure("lag_rounds", format.count),
    figure("lag_seconds", format.age),
    ["number", (cell, s) => showAge(cell, s.heartbeat_age_seconds)],
  ]);
}

function showShare(cell, share) {
  if (!cell.firstChild) cell.append(make("meter", { min: 0, max: 1 }));
  const meter = cell.firstChild;
  if (meter.value !== share) meter.value = share;
  meter.title = `${Math.round(100 * share)} % of the largest shard`;
  meter.setAttribute("aria-label", meter.title);
}
