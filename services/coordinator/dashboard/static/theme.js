// The theme: the system's, unless the user selects one. The selection is kept in localStorage.

import { redraw } from "./charts.js";
import { byId, show } from "./dom.js";

const KEY = "gradpost.theme";
const CHOICES = ["auto", "light", "dark"];

export function setUpTheme() {
  apply(localStorage.getItem(KEY) ?? "auto");
  byId("theme").addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(document.documentElement.dataset.theme) + 1) % CHOICES.length];
    localStorage.setItem(KEY, next);
    apply(next);
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

function apply(choice) {
  document.documentElement.dataset.theme = CHOICES.includes(choice) ? choice : "auto";
  show(byId("theme"), `Theme: ${document.documentElement.dataset.theme}`);
}
