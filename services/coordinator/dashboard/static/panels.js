// Each panel of the run: from answers of the API to the page. Nothing is computed here but how it looks.

import { colour, draw, series } from "./charts.js";
import { byId, flag, keep, keepRows, make, show } from "./dom.js";
import * as format from "./format.js";

const LATE_SECONDS = 2; // heartbeats come once a second: what has lasted for longer is worth a look

const isSync = (mode) => mode === "sync";

export function showHeadline(status, activity) {
  const async_ = !isSync(status.mode);
  document.title = `${status.state === "training" ? format.count(status.round) + " · " : ""}Gradpost ${status.state}`;
  show(byId("state"), status.state, status.state);
  byId("state").dataset.state = status.state;
  show(byId("mode"), status.mode, status.mode);
  show(byId("run-name"), status.run, status.run);
  show(byId("round"), format.count(activity.round), activity.round);
  show(byId("round-label"), async_ ? "Contributions" : "Round");
  show(byId("round-more"), ["newest applied", activity.attempt ? `attempt ${activity.attempt}` : ""].filter(Boolean).join(", "));
  show(byId("rounds-label"), async_ ? "Contributions / s" : "Rounds / s");
  show(byId("rounds-more"), "by every pserver");
  show(byId("rounds-per-second"), format.rate(activity.rounds_per_second), activity.rounds_per_second);
  show(byId("steps-per-second"), format.rate(activity.steps_per_second), activity.steps_per_second);
  const taking = activity.trainers.filter((trainer) => trainer.has_contributed).length;
  show(byId("taking-part"), `${taking} of ${status.num_trainers}`, taking);
  show(byId("taking-part-more"), async_ ? "in five seconds" : activity.round ? `in round ${format.count(activity.round)}` : "trainers");
  show(byId("num-pservers"), `${status.pservers.length} of ${status.num_pservers}`, status.pservers.length);
  show(byId("pservers-more"), status.pservers.length === status.num_pservers ? "all here" : "some are missing");
  show(byId("model-bytes"), status.num_parameters ? format.bytes(status.parameter_bytes) : "–", status.parameter_bytes);
  show(byId("model-more"), status.num_parameters ? `${format.count(status.num_parameters)} parameters` : "not declared");
}

export function showNotices(status, activity) {
  const notices = [];
  if (status.failure) notices.push(["bad", "The run has failed", status.failure.detail]);
  for (const prospect of status.prospects) notices.push(["bad", "Lost", prospect]);
  if (status.state === "gathering" && status.waiting_for.length) {
    notices.push(["info", "Waiting for", status.waiting_for.join(", ")]);
  }
  const wait = activity.barrier ? activity.at - activity.barrier.waiting_since : 0;
  if (wait > LATE_SECONDS && !status.failure) {
    const who = format.names("trainer", activity.barrier.missing);
    notices.push(["warn", `Waiting for ${who}`, `since ${format.clock(activity.barrier.waiting_since)}, for ${format.seconds(wait)}`]);
  }
  const create = ([kind]) => make("p", { class: kind }, make("b"), make("span"));
  keep(byId("notices"), notices, ([kind, title]) => `${kind} ${title}`, create, (line, [, title, text]) => {
    show(line.firstChild, title);
    show(line.lastChild, text);
  });
}

export function showTrainers(status, activity) {
  const sync = isSync(status.mode);
  show(byId("contributed-label"), sync ? `In round ${format.count(activity.round)}` : "Active");
  show(byId("behind-label"), sync ? "Barrier" : "Behind");
  const arrived = new Set(activity.barrier?.arrived);
  const missing = new Set(activity.barrier?.missing);
  const more = new Map(activity.trainers.map((trainer) => [trainer.rank, trainer]));
  const items = status.trainers.map((trainer) => ({ ...trainer, ...more.get(trainer.rank) }));
  const where = (trainer) => (arrived.has(trainer.rank) ? "arrived" : missing.has(trainer.rank) ? "awaited" : "–");
  keepRows(byId("trainers"), items, (trainer) => trainer.rank, [
    ["", (cell, t) => show(cell, String(t.rank), t.rank)],
    ["", (cell, t) => { show(cell, t.state === "declared" ? "training" : t.state, t.state); cell.dataset.state = t.state; }],
    ["", (cell, t) => { show(cell, t.has_contributed ? "● yes" : "○ no", t.has_contributed); flag(cell, "data-on", t.has_contributed); }],
    ["number", (cell, t) => show(cell, format.count(t.steps), t.steps)],
    ["number", (cell, t) => show(cell, format.rate(t.steps_per_second), t.steps_per_second)],
    ["number", (cell, t) => (sync ? show(cell, where(t), where(t)) : show(cell, format.count(t.steps_behind), t.steps_behind))],
    ["number", (cell, t) => show(cell, format.digits(t.results.loss, 4), t.results.loss)],
    ["number", (cell, t) => { show(cell, format.age(t.heartbeat_age_seconds)); flag(cell, "data-late", isHere(t) && t.heartbeat_age_seconds > LATE_SECONDS); }],
  ]);
  const here = items.filter(isHere).length;
  show(byId("trainers-note"), items.length ? `${here} here, ${format.count(status.num_trainers)} wanted` : "");
}

const isHere = (trainer) => trainer.state === "joined" || trainer.state === "declared";

export function showBarrier(status, activity) {
  const section = byId("barrier");
  const { barrier } = activity;
  const sync = isSync(status.mode);
  flag(section, "data-empty", status.state !== "training");
  show(byId("barrier-title"), sync ? "Barrier" : "Waiting");
  show(byId("barrier-note"), barrier && sync ? `round ${format.count(barrier.round)}, pserver ${barrier.pserver}` : "");
  const wait = barrier ? activity.at - barrier.waiting_since : 0;
  flag(section, "data-late", wait > LATE_SECONDS);
  const present = barrier ? barrier.arrived.length + barrier.missing.length : 0;
  const says = sync ? (barrier ? `${barrier.arrived.length} of ${present} have arrived` : "All are computing") : barrier ? "A trainer waits for others" : "Everybody goes on";
  show(byId("barrier-says"), says, barrier);
  const since = barrier ? `Waiting for ${format.names("trainer", barrier.missing)} since ${format.clock(barrier.waiting_since)}` : "Nobody waits for a trainer";
  show(byId("barrier-since"), wait > LATE_SECONDS ? `${since}, for ${format.seconds(wait)}` : since);
  const missing = new Set(barrier?.missing);
  const arrived = new Set(barrier?.arrived);
  const ranks = sync ? activity.trainers.filter((t) => missing.has(t.rank) || arrived.has(t.rank) || t.has_contributed) : [];
  const state = (rank) => (missing.has(rank) ? "missing" : arrived.has(rank) ? "arrived" : "computing");
  keep(byId("barrier-ranks"), ranks, (t) => t.rank, () => make("li", {}, make("b"), make("span")), (item, t) => {
    show(item.firstChild, String(t.rank), t.rank);
    show(item.lastChild, state(t.rank));
    item.dataset.state = state(t.rank);
  });
  const waits = activity.pservers.map((pserver) => pserver.wait_seconds).filter(format.isNumber);
  show(byId("barrier-wait"), waits.length ? `Mean wait in the newest five seconds: ${format.seconds(Math.max(...waits))}` : "");
}

export function showPservers(status, activity) {
  const more = new Map(activity.pservers.map((pserver) => [pserver.index, pserver]));
  const largest = Math.max(1, ...activity.pservers.map((pserver) => pserver.shard_bytes));
  const number = (name, text) => ["number", (cell, p) => show(cell, text(p[name]), p[name])];
  keepRows(byId("pservers"), status.pservers.map((p) => ({ ...p, ...more.get(p.index) })), (p) => p.index, [
    ["", (cell, p) => { show(cell, String(p.index), p.index); cell.title = `${p.address}, life ${p.incarnation}`; }],
    ["balance", (cell, p) => {
      if (!cell.firstChild) cell.append(make("meter", { min: 0, max: 1 }));
      const share = (p.shard_bytes ?? 0) / largest;
      if (cell.firstChild.value !== share) cell.firstChild.value = share;
      cell.firstChild.title = `${Math.round(100 * share)} % of the largest shard`;
      cell.firstChild.setAttribute("aria-label", cell.firstChild.title);
    }],
    number("shard_bytes", format.bytes), number("num_blocks", format.count), number("num_queued", format.count),
    number("apply_seconds", format.seconds), number("wait_seconds", format.seconds),
    number("pushed_bytes_per_second", format.bytes), number("pulled_bytes_per_second", format.bytes),
    ["number", (cell, p) => { show(cell, format.age(p.heartbeat_age_seconds)); flag(cell, "data-late", p.heartbeat_age_seconds > LATE_SECONDS); }],
  ]);
}

export function showSpeed(status, { rates }) {
  flag(byId("speed"), "data-empty", rates.rounds_per_second.every((value) => value === null));
  const at = rates.at.map((second) => new Date(second * 1000));
  const rounds = isSync(status.mode) ? "rounds / s" : "contributions / s";
  const line = (y, name, i, dash) => ({ x: at, y, name, mode: "lines", line: { color: series(i), width: 2, dash }, hovertemplate: "%{y:.3~g}" });
  draw("speed-chart", {
    label: `${rounds}: newest ${format.rate(rates.rounds_per_second.at(-1))}; steps a second: ${format.rate(rates.steps_per_second.at(-1))}`,
    traces: () => [line(rates.rounds_per_second, rounds, 0, "solid"), line(rates.steps_per_second, "steps / s", 1, "dash")],
    layout: { showlegend: true, xaxis: { tickformat: "%H:%M:%S", nticks: 4 } },
  });
}

export function showStaleness(status, { staleness }) {
  const section = byId("staleness");
  flag(section, "data-empty", staleness.length === 0);
  const why = isSync(status.mode)
    ? "Nothing is stale in the synchronous mode: every gradient is aggregated in the round that it was computed for."
    : "Shown as soon as updates are applied.";
  show(byId("staleness-empty"), why);
  const counts = staleness.map(([, number]) => number);
  const total = counts.reduce((sum, number) => sum + number, 0);
  show(byId("staleness-note"), total ? `${format.count(total)} updates of blocks` : "", staleness);
  if (total === 0) return;
  const bounds = staleness.map(([bound]) => bound);
  const label = (bound, i) => {
    const low = i === 0 ? 0 : bounds[i - 1] + 1;
    return bound === null ? `> ${bounds[i - 1]}` : low === bound ? String(bound) : `${low}–${bound}`;
  };
  const last = counts.findLastIndex((number) => number > 0) + 1;
  draw("staleness-chart", {
    label: `Staleness of ${total} updates`,
    traces: () => [{ type: "bar", x: bounds.map(label).slice(0, last), y: counts.slice(0, last), marker: { color: colour("series-1") }, hovertemplate: "%{y:,} updates<extra></extra>" }],
    layout: { xaxis: { type: "category", title: "updates since the pull" }, yaxis: { title: "updates", tickformat: "~s" } },
  });
}
