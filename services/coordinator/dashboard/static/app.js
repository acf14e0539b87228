// The page: polls once a second while it is visible, and shows when that fails.

import { observe } from "./status.js";
import { ask, forgetToken, hasToken, keepToken } from "./api.js";
import { loadCharts } from "./charts.js";
import { newestOf, redrawCurves, setUpCurves, showCurves } from "./curves.js";
import { byId, flag, show } from "./dom.js";
import { refreshEvents, setUpEvents } from "./events.js";
import * as format from "./format.js";
import { isRing, isSync, showFacts, showHeadline, showNotices } from "./headline.js";
import { keptFolder, refreshHistory, setUpHistory } from "./history.js";
import { showBarrier, showPservers, showStandbys, showTrainers } from "./members.js";
import * as parameters from "./parameters.js";
import { showProcesses } from "./processes.js";
import { showSpeed, showStaleness } from "./rates.js";
import { setUpTerms } from "./terms.js";
import { setUpTheme } from "./theme.js";

const PERIOD_MS = 1000;
const CURVES_EVERY = 2; // polls
const HISTORY_EVERY = 5;
const MAX_RETRY_MS = 5000;
const POINTS = 3000; // of all curves of one result

let turn = 0;
let silentSince = null;
let timer = null;
let asking = false;

async function refresh() {
  const status = observe(await ask("v1/status"));
  flag(byId("main"), "data-loading", false);
  flag(document.body, "data-ring", isRing(status));
  showHeadline(status);
  showNotices(status);
  showTrainers(status);
  showBarrier(status);
  showPservers(status);
  showStandbys(status);
  showProcesses(status);
  showSpeed(status);
  showStaleness(status);
  await refreshEvents();
  if (turn % CURVES_EVERY === 0) {
    const most = Math.max(50, Math.min(500, Math.floor(POINTS / Math.max(1, status.trainers.length))));
    showCurves(await ask(`v1/curves?max_points=${most}`), isSync(status) ? "round" : "step of the trainer");
  }
  showFacts(status, newestOf("gradpost/learning_rate"));
  if (turn % HISTORY_EVERY === 0) await refreshHistory(status);
  const canRead = status.plan_digest !== null && !isRing(status);
  if (!canRead) parameters.forgetParameters();
  else if (parameters.needsParameters(status)) parameters.showParameters(await ask("v1/parameters"));
  turn += 1;
  if (canRead && isSeen(byId("parameter"))) await refreshStatistics();
}

async function refreshKept() {
  await refreshHistory();
  flag(byId("main"), "data-loading", false);
}

// A missing pserver or value must not hide the others.
async function refreshStatistics() {
  try {
    await parameters.refreshStatistics();
  } catch (error) {
    if (error.wantsToken || error.status === undefined) throw error;
    show(byId("parameter-more"), error.message);
  }
}

function isSeen(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

async function run() {
  if (asking || document.hidden || byId("sign-in").open) return;
  if (document.body.hasAttribute("data-wants-token") && !hasToken()) {
    askForToken();
    return;
  }
  asking = true;
  clearTimeout(timer);
  let wait = keptFolder ? MAX_RETRY_MS : PERIOD_MS;
  try {
    await (keptFolder ? refreshKept() : refresh());
    silentSince = null;
    if (keptFolder) connection("kept", `no cluster: kept runs of ${keptFolder}`);
    else connection("live", "live");
  } catch (error) {
    if (error.wantsToken) askForToken(error);
    else {
      silentSince ??= Date.now() / 1000;
      wait = Math.min(MAX_RETRY_MS, PERIOD_MS * 2);
      const why = error.status ? error.message : `${keptFolder ? "gradpost dashboard" : "the coordinator"} does not answer`;
      connection("gone", `${why}, since ${format.clock(silentSince)}; retrying`);
    }
  } finally {
    asking = false;
  }
  if (!byId("sign-in").open) timer = setTimeout(run, wait);
}

function connection(state, text) {
  byId("connection").dataset.state = state;
  document.body.dataset.connection = state;
  show(byId("connection-text"), text);
  byId("forget").hidden = !hasToken();
}

function askForToken(error) {
  connection("locked", "signed out");
  show(byId("sign-in-problem"), error && hasToken() ? `This token was refused: ${error.message}.` : "");
  forgetToken();
  byId("forget").hidden = true;
  byId("token").value = "";
  byId("sign-in").showModal();
}

byId("sign-in").addEventListener("cancel", (event) => event.preventDefault()); // without a token there is nothing to show
byId("sign-in").addEventListener("close", () => {
  keepToken(byId("token").value.trim());
  byId("token").value = "";
  run();
});
byId("forget").addEventListener("click", () => {
  forgetToken();
  location.reload();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else run();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  if (event.key === "/") {
    event.preventDefault();
    byId("filter").focus();
  } else if (event.key === "t") byId("theme").click();
});
setUpTheme();
setUpTerms();
setUpCurves();
setUpHistory(redrawCurves);
setUpEvents();
parameters.setUpParameters(() => refreshStatistics().catch(() => {}));
for (const section of document.querySelectorAll("section")) flag(section, "data-empty", true);
loadCharts();
run();
