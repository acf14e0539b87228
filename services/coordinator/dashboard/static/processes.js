// What each process uses of its host: the coordinator, the pservers, their standbys and the trainers.

import { byId, keepRows, show } from "./dom.js";
import * as format from "./format.js";

const FIGURES = [
  ["cpu_seconds_per_second", format.percent],
  ["resident_bytes", format.bytes],
  ["gpu_bytes", format.bytes],
  ["read_bytes_per_second", format.bytes],
  ["written_bytes_per_second", format.bytes],
  ["received_bytes_per_second", format.bytes],
  ["sent_bytes_per_second", format.bytes],
];

export function showProcesses(status) {
  const processes = [
    { name: "coordinator", ...status.process },
    ...status.pservers.map(({ index, process }) => ({ name: `pserver ${index}`, ...process })),
    ...status.standbys.map(({ follows, address, process }) => ({ name: `standby of ${follows}`, address, ...process })),
    ...status.trainers.map(({ rank, process }) => ({ name: `trainer ${rank}`, ...process })),
  ];
  keepRows(byId("processes"), processes, ({ name, address }) => name + (address ?? ""), [
    ["", (cell, { name }) => show(cell, name, name)],
    ["", (cell, { host }) => show(cell, host ?? "–", host)],
    ...FIGURES.map(([key, text]) => ["number", (cell, process) => show(cell, text(process[key]), process[key])]),
  ]);
}
