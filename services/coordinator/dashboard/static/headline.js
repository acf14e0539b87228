// The headline: the run, its figures and notices.

import { byId, keep, make, show } from "./dom.js";
import * as format from "./format.js";

export const LATE_SECONDS = 2; // heartbeats come once a second, so a longer wait is a notice

export const isSync = (status) => status.mode === "sync";
export const isRing = (status) => status.num_pservers === 0;

export function waitOf({ at, barrier }) {
  return barrier ? at - barrier.waiting_since : 0;
}

export function showHeadline(status) {
  const sync = isSync(status);
  const progress = status.state === "training" ? `${format.count(status.round)} · ` : "";
  const state = status.is_paused ? "paused" : status.state;
  document.title = `${progress}Gradpost ${state}`;
  show(byId("state"), state, state);
  byId("state").dataset.state = state;
  show(byId("mode"), isRing(status) ? `${status.mode}, in a ring` : status.mode, status.mode);
  show(byId("run-name"), status.run, status.run);

  show(byId("round-label"), sync ? "Round" : "Contributions");
  show(byId("round"), format.count(status.round), status.round);
  show(byId("round-more"), status.attempt ? `newest applied, attempt ${status.attempt}` : "newest applied");
  show(byId("rounds-label"), sync ? "Rounds / s" : "Contributions / s");
  show(byId("rounds-per-second"), format.rate(status.rounds_per_second), status.rounds_per_second);
  show(byId("rounds-more"), isRing(status) ? "of all trainers" : "by every pserver");
  show(byId("steps-per-second"), format.rate(status.steps_per_second), status.steps_per_second);

  const taking = status.trainers.filter((trainer) => trainer.has_contributed).length;
  const where = status.round ? `in round ${format.count(status.round)}` : "trainers";
  show(byId("taking-part"), `${taking} of ${status.num_trainers}`, taking);
  show(byId("taking-part-more"), sync ? where : "in five seconds");
  const here = status.pservers.length;
  show(byId("num-pservers"), `${here} of ${status.num_pservers}`, here);
  show(byId("pservers-more"), here === status.num_pservers ? "all registered" : "incomplete");
  const number = status.num_parameters;
  show(byId("model-bytes"), number ? format.bytes(status.parameter_bytes) : "–", status.parameter_bytes);
  show(byId("model-more"), number ? `${format.count(number)} parameters` : "not declared");
}

// What runs: the scripts of the trainers, which are usually alike.
export function showFacts(status, learningRate) {
  const scripts = status.trainers.map(({ script }) => script).filter(Boolean);
  const distinct = (values) => [...new Set(values.filter(Boolean))];
  const fact = (name, values) => {
    const line = byId(`fact-${name}`);
    show(line, values.length ? values.slice(0, 3).join(", ") + (values.length > 3 ? ` and ${values.length - 3} more` : "") : "–");
    line.title = values.join("\n");
  };
  const elapsed = status.elapsed_seconds;
  fact("name", distinct(scripts.map((script) => script.run_name)));
  fact("script", distinct(scripts.map((script) => script.command)));
  fact("optimizer", distinct(scripts.map((script) => script.optimizer)));
  fact("rate", learningRate.map((rate) => format.digits(rate)));
  fact("started", elapsed === null ? [] : [format.moment(status.at - elapsed)]);
  fact("elapsed", elapsed === null ? [] : [format.duration(elapsed)]);
  fact("remaining", format.isNumber(status.remaining_seconds) ? [format.duration(status.remaining_seconds)] : []);
  fact("host", distinct(status.trainers.map(({ process }) => process?.host)));
  fact("torch", distinct(status.trainers.map(({ software }) => software?.torch)));
}

export function showNotices(status) {
  const create = ({ kind }) => make("p", { class: kind }, make("b"), make("span"));
  const key = ({ kind, title }) => `${kind} ${title}`;
  keep(byId("notices"), noticesOf(status), key, create, (line, { title, text }) => {
    show(line.firstChild, title);
    show(line.lastChild, text);
  });
}

function noticesOf(status) {
  const notices = status.prospects.map((text) => ({ kind: "bad", title: "Lost", text }));
  if (status.is_paused) {
    notices.unshift({ kind: "warn", title: "Paused", text: "by an administrator; it continues after: gradpost resume" });
  }
  if (status.failure) {
    const failed = status.state === "failed";
    notices.unshift({ kind: failed ? "bad" : "info", title: failed ? "The run has failed" : "The run was stopped", text: status.failure.detail });
  }
  if (status.state === "gathering" && status.waiting_for.length) {
    notices.push({ kind: "info", title: "Waiting for", text: status.waiting_for.join(", ") });
  }
  if (status.overrides.length) {
    notices.push({ kind: "info", title: "Set by an administrator", text: status.overrides.join(", ") });
  }
  const wait = waitOf(status);
  if (wait > LATE_SECONDS && !status.failure) {
    const title = `Waiting for ${format.names("trainer", status.barrier.missing)}`;
    const since = format.clock(status.barrier.waiting_since);
    notices.push({ kind: "warn", title, text: `since ${since}, for ${format.seconds(wait)}` });
  }
  return notices;
}
