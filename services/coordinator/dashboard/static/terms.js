// The explanations of terms: shown beside a term on hover, on keyboard focus and on tap.

import { byId, make, show } from "./dom.js";

const TERMS = {
  round: "In the synchronous mode, one optimizer step of the whole run: pservers aggregate the gradients of all trainers and apply the result once. In asynchronous modes this counts the contributions that were applied.",
  rounds: "Rounds, or in asynchronous modes contributions, that every pserver has applied per second.",
  step: "One call of optimizer.step() in a trainer's script.",
  "taking-part": "Trainers whose gradient is in the newest round or, in asynchronous modes, that took a step in the newest five seconds.",
  model: "The bytes of all parameters, which are divided among the pservers.",
  pserver: "A parameter server: a process that holds a part of the parameters and applies the optimizer to it.",
  barrier: "The point of a round at which the pservers wait until the gradients of all trainers have arrived.",
  contributed: "Whether the trainer's gradient is in the newest round or, in asynchronous modes, whether the trainer took a step in the newest five seconds.",
  behind: "In the synchronous mode, whether the trainer has arrived at the barrier. In asynchronous modes, the number of steps by which it is behind the fastest trainer.",
  heartbeat: "The time since the process last reported to the coordinator, which happens about once a second.",
  balance: "The size of the pserver's shard relative to the largest shard.",
  standby: "A process that repeats the updates of a pserver, and replaces it when it fails.",
  standby_state: "A standby in sync holds every acknowledged update, so that it may replace its pserver. One that is joining is about to; one that is following repeats the updates behind the pserver.",
  lag: "Rounds of the pserver that the standby has not applied yet, with their estimated bytes, and the time since the first of them.",
  shard: "The part of all parameters that this pserver holds.",
  blocks: "Slices of parameters: a large parameter is cut into blocks, so that several pservers can share it.",
  queue: "Gradients that wait on this pserver until they are applied; only asynchronous modes have queues.",
  apply: "The mean time in which the pserver aggregates the gradients of a round and takes the optimizer step.",
  wait: "The mean time from the arrival of the first trainer at the barrier to the arrival of the last one.",
  received: "Bytes that arrive per second: at a pserver gradients from trainers, at a trainer parameters from pservers.",
  sent: "Bytes that leave per second: from a pserver parameters, from a trainer gradients.",
  staleness: "The number of updates of a block between the pull of its values and the arrival of a gradient that was computed from them.",
  cpu: "CPU time per second; 100 % is one busy core.",
  memory: "The main memory that the process occupies.",
  gpu: "The memory that torch has allocated for tensors on CUDA devices.",
  disk: "Bytes that the process reads from or writes to disks per second.",
  remaining: "The time until the slowest trainer has taken all steps of optimizer.epochs(…) at the present speed; unknown without it.",
  learning_rate: "The learning rate of the first parameter group in the script.",
  gradient_norm: "The norm of the trainer's own gradient, before it is averaged and clipped.",
  waiting_share: "The share of time that the script spends in step(): sending, waiting for others and receiving. The slowest trainer has the smallest.",
  norm: "The Euclidean norm of all values of the parameter.",
  deviation: "The standard deviation of the values of the parameter.",
  num_touched: "The rows of the parameter for which the newest update had a gradient.",
};

let shownFor = null;

// Terms are elements with `data-term`. A script that adds one later calls `explain`.
export function setUpTerms() {
  const tip = byId("term-tip");
  for (const element of document.querySelectorAll("[data-term]")) explain(element);
  document.addEventListener("pointerover", (event) => {
    const term = event.target.closest("[data-term]");
    if (term) open(term);
    else if (shownFor && !event.target.closest("#term-tip") && document.activeElement !== shownFor) close();
  });
  document.addEventListener("focusin", ({ target }) => {
    if (!target.matches("[data-term]")) return close();
    target.scrollIntoView({ block: "nearest", inline: "nearest" }); // a column of a table that scrolls sideways
    return open(target);
  });
  document.addEventListener("click", (event) => {
    const term = event.target.closest("[data-term]");
    if (term) open(term);
    else close();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  document.addEventListener("scroll", place, { capture: true, passive: true });

  function open(term) {
    if (shownFor === term) return;
    close();
    shownFor = term;
    show(tip, TERMS[term.dataset.term]);
    tip.hidden = false;
    place();
  }

  function place() {
    if (shownFor === null) return;
    const { left, top, bottom } = shownFor.getBoundingClientRect();
    const { width, height } = tip.getBoundingClientRect();
    const below = bottom + 6 + height <= innerHeight;
    tip.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
    tip.style.top = `${below ? bottom + 6 : Math.max(8, top - height - 6)}px`;
  }

  function close() {
    if (shownFor === null) return;
    shownFor = null;
    tip.hidden = true;
  }
}

export function explain(element) {
  if (!(element.dataset.term in TERMS)) return;
  const key = element.dataset.term;
  const id = `term-${key}`;
  if (!byId(id)) byId("terms").append(make("span", { id }, TERMS[key]));
  element.tabIndex = 0;
  element.setAttribute("aria-describedby", id);
}
