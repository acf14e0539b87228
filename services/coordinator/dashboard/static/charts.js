// Charts by Plotly, which is loaded after the page. Visible charts are drawn every two seconds.

import { byId } from "./dom.js";

const EVERY_MS = 1900;
export const SERIES = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6"];
const narrow = matchMedia("(max-width: 700px)");

let library = null;
const wanted = new Map(); // the newest figure of each chart, until it is drawn
const drawnAt = new Map();
const visible = new Set();

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) visible.add(entry.target.id);
    else visible.delete(entry.target.id);
  }
  drawDue();
});

export const watchChart = (element) => observer.observe(element);

export function loadCharts() {
  document.querySelectorAll(".chart").forEach(watchChart);
  const script = document.createElement("script");
  script.src = new URL("plotly.min.js", import.meta.url);
  script.onload = () => {
    library = window.Plotly ?? null;
    document.body.toggleAttribute("data-no-charts", library === null);
    drawDue();
  };
  script.onerror = () => document.body.toggleAttribute("data-no-charts", true);
  document.head.append(script);
}

// The computed colour of the style sheet, for the light or dark theme.
export function colour(name) {
  const probe = byId("main");
  probe.style.setProperty("outline-color", `var(--${name})`);
  return getComputedStyle(probe).outlineColor;
}

export const series = (i) => colour(SERIES[i % SERIES.length]);

// Show this figure: { traces: () => […], layout, label }. Colours are computed when it is drawn.
export function draw(id, figure, { now = false } = {}) {
  wanted.set(id, figure);
  byId(id).setAttribute("aria-label", figure.label);
  if (now) drawnAt.delete(id);
  drawDue();
}

// Redraw all charts in the colours of another theme.
export function redraw() {
  drawnAt.clear();
  drawDue(true);
}

const drawn = new Map();

function drawDue(again = false) {
  if (library === null) return;
  const time = performance.now();
  for (const id of visible) {
    const figure = wanted.get(id) ?? (again ? drawn.get(id) : undefined);
    if (figure === undefined || byId(id) === null || time - (drawnAt.get(id) ?? -Infinity) < EVERY_MS) continue;
    drawnAt.set(id, time);
    wanted.delete(id);
    drawn.set(id, figure);
    library.react(byId(id), figure.traces(), layoutOf(figure), { displayModeBar: false, responsive: true });
  }
}

function layoutOf({ layout = {} }) {
  const grid = colour("line");
  const tickfont = { color: colour("faint") };
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, tickfont, automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = layout;
  const titled = (one) => ({
    ...axis, fixedrange: narrow.matches, ...one,
    ...(one.title ? { title: { text: one.title, font: { size: 11, color: colour("faint") }, standoff: 8 } } : {}),
  });
  return {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", autosize: true, uirevision: "kept",
    margin: { l: 8, r: 8, t: layout.showlegend ? 30 : 8, b: 8 }, bargap: 0.08, showlegend: false,
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour("ink") },
    legend: {
      orientation: "h", x: 0, xref: "container", y: 1, yref: "container", yanchor: "top",
      font: { color: colour("soft") },
    },
    hoverlabel: { bgcolor: colour("raised"), bordercolor: grid, font: { color: colour("ink") } },
    hovermode: "x unified", dragmode: narrow.matches ? false : "zoom",
    xaxis: titled({ showgrid: false, ...xaxis }), yaxis: titled({ rangemode: "tozero", ...yaxis }), ...rest,
  };
}
