// The event log: newest first, streamed while the page is visible.

import { readEvents } from "./api.js";
import { byId, flag, make, show } from "./dom.js";
import * as format from "./format.js";

const MAX_EVENTS = 300;
const RETRY_MS = 2000;

let lastId = 0;
let following = null;

export function setUpEvents() {
  byId("event-kind").addEventListener("change", () => {
    for (const line of byId("event-list").children) hideOthers(line);
  });
  flag(byId("events"), "data-empty", true);
}

export async function followEvents() {
  if (following !== null) return;
  const mine = new AbortController();
  following = mine;
  while (!mine.signal.aborted) {
    try {
      show(byId("events-note"), "live");
      for await (const event of readEvents("v1/events/stream", lastId, mine.signal)) add(event);
    } catch (error) {
      if (error.wantsToken) break; // the next status request asks for one
    }
    if (mine.signal.aborted) break;
    show(byId("events-note"), "reconnecting");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  if (following === mine) following = null;
}

export function leaveEvents() {
  following?.abort();
  following = null;
  show(byId("events-note"), "paused");
}

function add(event) {
  lastId = event.id;
  const list = byId("event-list");
  const at = new Date(event.at * 1000);
  const line = make("li", { "data-kind": event.kind, "data-key": event.id },
    make("time", { datetime: at.toISOString(), title: at.toLocaleString("en-GB") }, format.clock(event.at)),
    make("span", { class: "kind" }, event.kind), make("span", { class: "text" }, event.text),
    make("span", { class: "at" }, event.round ? `round ${format.count(event.round)}` : ""));
  hideOthers(line);
  if (event.kind === "checkpoint" && list.firstChild?.dataset.kind === event.kind) list.firstChild.remove();
  list.prepend(line);
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
  flag(byId("events"), "data-empty", false);
}

function hideOthers(line) {
  const kind = byId("event-kind").value;
  line.hidden = kind !== "" && line.dataset.kind !== kind;
}
