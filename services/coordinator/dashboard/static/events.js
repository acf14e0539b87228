// The event log: newest first.

import { ask } from "./api.js";
import { byId, flag, make, show } from "./dom.js";
import * as format from "./format.js";

const MAX_EVENTS = 300;

let lastId = 0;

export function setUpEvents() {
  byId("event-kind").addEventListener("change", () => {
    for (const line of byId("event-list").children) hideOthers(line);
  });
  flag(byId("events"), "data-empty", true);
}

export async function refreshEvents() {
  for (const event of await ask(`v1/events?after=${lastId}&limit=${MAX_EVENTS}`)) add(event);
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
