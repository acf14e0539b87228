// An answer of /v1/status, with what follows from it and the answers of the seconds before: rates and the barrier.

import { isNumber } from "./format.js";
import { isRing, isSync, LATE_SECONDS } from "./headline.js";

const WINDOW_SECONDS = 5; // of a rate: heartbeats come once a second, each with a whole number
const MAX_SAMPLES = 300; // of the chart, one a second

let attempt = null; // run and attempt of the answers
let answers = [];
let samples = [];

export function observe(answer) {
  const status = flatten(answer);
  if (attempt !== `${status.run} ${status.attempt}`) [answers, samples] = [[], []];
  attempt = `${status.run} ${status.attempt}`;
  answers = [...answers, status];
  while (answers.length > 2 && answers[1].at <= status.at - WINDOW_SECONDS) answers.shift();
  const [first] = answers;
  const current = status.pservers.filter(({ run, attempt: served }) => run === status.run && served === status.attempt);
  addRates(status, first, current);
  if (status.state === "training") {
    samples = [...samples, { at: status.at, rounds: status.rounds_per_second, steps: status.steps_per_second }].slice(-MAX_SAMPLES);
  }
  return {
    ...status, samples,
    round: Math.max(0, ...(isRing(status) ? status.trainers : current).map(({ round }) => round)),
    barrier: status.state !== "training" ? null : isRing(status) ? findRingBarrier(status) : findBarrier(current),
    staleness: current.map(({ staleness }) => staleness).reduce(addCounts, {}),
  };
}

// Members with the values of their heartbeat, and its time.
function flatten(answer) {
  const member = ({ heartbeat, ...rest }) => ({ ...heartbeat, ...rest, sent_at: answer.at - rest.heartbeat_age_seconds });
  const [pservers, trainers] = [answer.pservers.map(member), answer.trainers.map(member)];
  const standbys = answer.standbys.map((one) => ({ ...one, sent_at: answer.at - one.heartbeat_age_seconds }));
  return { ...answer, pservers, trainers, standbys, sent_at: answer.at, steps: trainers.reduce((sum, { round }) => sum + round, 0) };
}

const COUNTERS = ["cpu_seconds", "read_bytes", "written_bytes", "sent_bytes", "received_bytes"];

function addRates(status, first, current) {
  const speed = (key, now, before) => (status.state === "training" ? rate(key, now, before) : null);
  status.rounds_per_second = speed("round", status, first);
  status.steps_per_second = speed("steps", status, first);
  addProcessRates(status, first);
  for (const standby of status.standbys) {
    addProcessRates(standby, first.standbys.find(({ instance }) => instance === standby.instance));
  }
  for (const pserver of status.pservers) {
    const before = first.pservers.find(({ index, incarnation }) => index === pserver.index && incarnation === pserver.incarnation);
    addProcessRates(pserver, before);
    pserver.seconds_an_apply = mean("apply_seconds", "num_applies", pserver, before);
    pserver.seconds_a_wait = mean("wait_seconds", "num_waits", pserver, before);
    for (const way of ["pushed", "pulled"]) pserver[`${way}_bytes_per_second`] = rate(`${way}_bytes`, pserver, before);
  }
  const furthest = current.reduce((one, other) => (other.round > one.round ? other : one), { round: 0, participants: [] });
  for (const trainer of status.trainers) {
    const before = first.trainers.find(({ rank, incarnation }) => rank === trainer.rank && incarnation === trainer.incarnation);
    addProcessRates(trainer, before);
    trainer.steps_per_second = speed("round", trainer, before);
    // A pserver may know a step before the trainer's next heartbeat.
    trainer.steps = Math.max(trainer.round, ...current.map(({ clocks }) => clocks[trainer.rank] ?? 0));
    if (isRing(status)) trainer.has_contributed = isPresent(trainer) && !trainer.is_done && trainer.round > 0;
    else trainer.has_contributed = isSync(status) ? furthest.participants.includes(trainer.rank) : trainer.steps_per_second > 0;
  }
  const fastest = Math.max(...status.trainers.map(({ steps }) => steps));
  for (const trainer of status.trainers) trainer.steps_behind = isSync(status) ? null : fastest - trainer.steps;
  const left = status.trainers.filter((trainer) => trainer.script?.total_rounds && trainer.steps_per_second)
    .map((trainer) => Math.max(0, trainer.script.total_rounds - trainer.steps) / trainer.steps_per_second);
  status.remaining_seconds = left.length ? Math.max(...left) : null;
}

function addProcessRates(member, before) {
  if (!member.process) return;
  const [now, then] = [member, before].map((one) => ({ sent_at: one?.sent_at, ...one?.process }));
  for (const key of COUNTERS) member.process[`${key}_per_second`] = rate(key, now, then);
}

// The growth of a counter in a second; null without an earlier value. A counter that starts again has not grown.
function rate(key, now, before) {
  const seconds = now.sent_at - before?.sent_at;
  return seconds > 0 && isNumber(now[key]) && isNumber(before[key]) ? Math.max(0, now[key] - before[key]) / seconds : null;
}

function mean(sum, number, now, before) {
  const count = now[number] - before?.[number];
  return count > 0 ? (now[sum] - before[sum]) / count : null;
}

export const isPresent = ({ state }) => state === "joined" || state === "declared";

// The incomplete barrier with the longest wait.
function findBarrier(pservers) {
  const waiting = pservers.filter(({ missing }) => missing.length).sort((one, other) => other.waiting_seconds - one.waiting_seconds);
  if (waiting.length === 0) return null;
  const [{ index, round, batch_barriers: arrived, missing, sent_at: sentAt, waiting_seconds: waited }] = waiting;
  return { pserver: index, round: round + 1, arrived, missing, waiting_since: sentAt - waited };
}

// The barrier of a ring, without trainers that are done or silent.
function findRingBarrier({ at, trainers }) {
  const working = trainers.filter((trainer) => isPresent(trainer) && !trainer.is_done);
  const waiting = working.filter(({ waiting_seconds: waited, sent_at: sentAt }) => waited && at - sentAt < LATE_SECONDS);
  const round = 1 + Math.max(...waiting.map((trainer) => trainer.round));
  const missing = working.filter((trainer) => !waiting.includes(trainer) && trainer.round < round).map(({ rank }) => rank);
  if (waiting.length === 0 || missing.length === 0) return null;
  const since = Math.min(...waiting.map(({ sent_at: sentAt, waiting_seconds: waited }) => sentAt - waited));
  return { pserver: null, round, arrived: waiting.map(({ rank }) => rank), missing, waiting_since: since };
}

function addCounts(total, counts) {
  for (const [key, count] of Object.entries(counts)) total[key] = (total[key] ?? 0) + count;
  return total;
}
