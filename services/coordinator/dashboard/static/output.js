// The newest output of one trainer, in a panel below the table of trainers.

import { ask } from "./api.js";
import { byId, flag, show } from "./dom.js";

const COLOURS = /\x1b\[[0-9;?]*[ -/]*[@-~]/g; // ANSI escape sequences

let chosen = null;

export function setUpOutput() {
  byId("trainers").addEventListener("click", (event) => {
    const button = event.target.closest("tbody button");
    if (button) choose(button.dataset.rank === chosen ? null : button.dataset.rank);
  });
  byId("output-close").addEventListener("click", () => {
    const button = byId("trainers").querySelector(`[data-rank="${chosen}"]`);
    choose(null);
    button?.focus();
  });
}

function choose(rank) {
  chosen = rank;
  byId("output").hidden = rank === null;
  showButtons();
  if (rank === null) return;
  show(byId("output-title"), `Output of trainer ${rank}`);
  show(byId("output-lines"), "");
  show(byId("output-traceback"), "");
  refreshOutput().catch(() => {}); // the next poll meets the error again
}

// The table creates the buttons; this marks the pressed one.
export function showButtons() {
  for (const button of byId("trainers").querySelectorAll("tbody button")) {
    button.setAttribute("aria-expanded", String(button.dataset.rank === chosen));
  }
}

export async function refreshOutput() {
  const rank = chosen;
  if (rank === null) return;
  try {
    const answer = await ask(`v1/trainers/${rank}/output`);
    if (rank === chosen) showOutput(answer);
  } catch (error) {
    if (error.wantsToken || error.status === undefined) throw error;
    show(byId("output-note"), error.message);
  }
}

function showOutput({ lines, traceback }) {
  const clean = (text) => text.replace(COLOURS, "");
  const failure = clean(traceback ?? "");
  const text = clean(lines.join("\n") + "\n").replace(failure, "").trimEnd(); // Python has written it to stderr, too
  const scroll = byId("output-scroll");
  const isAtEnd = scroll.scrollTop + scroll.clientHeight >= scroll.scrollHeight - 4;
  show(byId("output-lines"), text);
  show(byId("output-traceback"), failure.trimEnd());
  show(byId("output-note"), lines.length || failure ? "newest lines of stdout and stderr" : "no output since connect()");
  flag(scroll, "data-failed", failure);
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
}
