"""Fail-over to a standby: the longest time without a completed step after a pserver dies or stands still, and its cost.

    python -m benchmarks.faults.failover [--kills 100] [--restarts 20] [--stops 20] [--repetitions 3] [--report FILE.md]

1 pserver with a shard of 100 MB and Adam state, 2 trainers, an emulated computation. The lease is 1 s.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from signal import SIGCONT, SIGKILL, SIGSTOP
from threading import Timer
from typing import Any

import psutil

from trainer_client.testing import Child

from ..report import PACKAGES, describe_disk, make_head, make_parser, publish, spread_table
from .observed import ObservedCluster

LEASE_SECONDS = 1.0
SETTLE_STEPS = 3  # of each trainer, before the next fault

TEXT = """\
2 trainers, 1 pserver with a shard of {megabytes:g} MB (and two slots of the same size for Adam), {compute_ms:g} ms of
emulated computation a step, a lease of {lease:g} s, everything on loopback. A **stall** is the longest time between two
consecutive completed steps of any trainer, from the fault until 5 steps of each trainer after it. With fewer than 100
values p99 is the largest of them.

- *restart*: durability `log` and no standby. The pserver is killed (`kill -9`) and restarted at once.
- *kill -9*: durability `replicated` and one standby. The supervisor reports the end of the process, as `gradpost up`
  does. Another standby is started afterwards, and the next fault waits until it is in sync.
- *SIGSTOP*: the same, but the pserver stands still, and no process reports it. It continues 5 s later, and becomes
  the next standby.
- *undisturbed*: between faults, for comparison.
- *lag*: the rounds by which the standby is behind its pserver, as the coordinator reports it before each fault.
"""

COST_TEXT = """\
## Cost of durability `replicated`

The same cluster without faults, with `log` and no standby, and with `replicated` and a standby in sync. A figure is the
median of {rounds} rounds; the table has those of {repetitions} repetitions, in which the variants take turns. A ratio
is one to `log`, in the same repetition.
"""


class FailoverCluster(ObservedCluster):
    """An observed cluster of one pserver, whose leader changes."""

    def find_leader(self) -> Child:
        """Return the process that the coordinator lists as the pserver."""
        address = self.cluster.status().pservers[0].address
        children = [*self.cluster.pservers, *self.cluster.standbys]
        return next(child for child in children if child.is_running and self.cluster.find_address(child) == address)

    def wait_for_standby(self) -> None:
        """Wait until a standby is in the in-sync set."""
        until = time.monotonic() + 120
        while not any(standby.role == "in_sync" for standby in self.cluster.status().standbys):
            if time.monotonic() > until:
                raise TimeoutError("no standby is in sync in time")
            time.sleep(0.05)

    def measure_stall(self, at: float) -> float:
        """Return the longest time between two completed steps since a fault, once each trainer has completed 5."""
        self.wait_for_steps(range(2), number=5, after=at)
        times = [max(step.at for step in self.steps if step.at <= at), *(s.at for s in self.steps if s.at > at)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


def measure_restarts(repetitions: int, arguments: Sequence[str], chance: random.Random) -> dict[str, list[float]]:
    """Return the stalls without standbys."""
    rows: dict[str, list[float]] = defaultdict(list)
    with FailoverCluster(arguments, pservers=1, trainers=2, lease_seconds=LEASE_SECONDS, durability="log") as observed:
        for number in range(repetitions):
            settle(observed, chance)
            at = observed.end(observed.cluster.pservers[0], SIGKILL)
            observed.cluster.start_pserver(0)
            rows["stall, restart"].append(observed.measure_stall(at))
            print(f"restart {number + 1}/{repetitions}: {rows['stall, restart'][-1]:.2f} s", flush=True)
    return rows


def settle(observed: FailoverCluster, chance: random.Random) -> None:
    """Wait until the trainers go on, and then for a random time."""
    observed.wait_for_steps(range(2), number=SETTLE_STEPS, after=time.time())
    time.sleep(chance.uniform(0, 1))


def measure_failovers(
    kills: int, stops: int, arguments: Sequence[str], chance: random.Random
) -> dict[str, list[float]]:
    """Return the stalls with a standby."""
    rows: dict[str, list[float]] = defaultdict(list)
    settings: dict[str, Any] = {"lease_seconds": LEASE_SECONDS, "durability": "replicated"}
    with FailoverCluster(arguments, pservers=1, trainers=2, **settings) as observed:
        observed.cluster.start_standby(0)
        for number in range(kills + stops):
            observed.wait_for_standby()
            settle(observed, chance)
            begun = time.time()
            psutil.cpu_percent()
            observed.wait_for_steps(range(2), number=5, after=begun)
            rows["busy processors, undisturbed, percent"].append(psutil.cpu_percent())
            step_seconds = observed.measure_stall(begun)
            rows["longest time between two steps, undisturbed"].append(step_seconds)
            rows["lag, rounds"].append(observed.cluster.status().standbys[0].lag_rounds)
            leader = observed.find_leader()
            time.sleep(chance.uniform(0, max(step_seconds, 0.1)))  # the last step has just ended
            if number < kills:
                at = observed.end(leader, SIGKILL)
                observed.cluster.report_end(0, leader)
                stall = observed.measure_stall(at)
                observed.cluster.start_standby(0)
                rows["**stall, kill -9**"].append(stall)
            else:
                at = time.time()
                leader.signal(SIGSTOP)
                continued = Timer(5, leader.signal, [SIGCONT])
                continued.start()
                stall = observed.measure_stall(at)
                continued.join()
                rows["**stall, SIGSTOP**"].append(stall)
            print(f"fail-over {number + 1}/{kills + stops}: {stall:.2f} s", flush=True)
    return rows


def measure_cost(megabytes: float, repetitions: int, rounds: int) -> str:
    """Return a table of the seconds of a round with and without a standby."""
    lines = ["| computed | variant | ms a round | ratio, median | range |", "|---|---|--:|--:|--:|"]
    variants = {"log": 0, "replicated": 1}  # standbys by durability
    for compute_seconds in (0.0, 0.1):
        figures: dict[str, list[float]] = defaultdict(list)
        for _ in range(repetitions):
            for name, standbys in variants.items():
                figures[name].append(measure_round(megabytes, compute_seconds, name, standbys, rounds))
                print(f"{compute_seconds:g} s computed, {name}: {1000 * figures[name][-1]:.0f} ms a round", flush=True)
        for name, seconds in figures.items():
            ratios = [one / plain for one, plain in zip(seconds, figures["log"], strict=True)]
            lines.append(
                f"| {1000 * compute_seconds:g} ms | {name} | {1000 * statistics.median(seconds):.0f} "
                f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} – {max(ratios):.2f} |"
            )
    return "\n".join(lines) + "\n"


def measure_round(megabytes: float, compute_seconds: float, durability: str, standbys: int, rounds: int) -> float:
    """Return the median seconds of a round, once the standbys are in sync."""
    arguments = ["--elements", str(int(megabytes * 250_000)), "--compute-seconds", str(compute_seconds)]
    settings: dict[str, Any] = {"lease_seconds": 30, "durability": durability}
    with FailoverCluster(arguments, pservers=1, trainers=2, **settings) as observed:
        for _ in range(standbys):
            observed.cluster.start_standby(0)
        if standbys:
            observed.wait_for_standby()
        observed.wait_for_steps(range(2), number=10, after=time.time())  # the files of the logs are created
        begun = time.time()
        observed.wait_for_steps(range(2), number=rounds + 1, after=begun)
        times = [step.at for step in observed.steps if step.rank == 0 and step.at > begun]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=20, help="without standbys, for comparison")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the pserver's shard")
    parser.add_argument("--compute-seconds", type=float, default=0.3, help="of emulated computation a step")
    parser.add_argument("--repetitions", type=int, default=3, help="of the measurements of cost; 0: none")
    parser.add_argument("--rounds", type=int, default=30, help="of one measurement of cost")
    parser.add_argument("--seed", type=int, default=1, help="of the times of faults")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    arguments = ["--elements", str(int(options.megabytes * 250_000)), "--compute-seconds", str(options.compute_seconds)]
    text = TEXT.format(megabytes=options.megabytes, compute_ms=1000 * options.compute_seconds, lease=LEASE_SECONDS)
    rows = measure_restarts(options.restarts, arguments, chance) if options.restarts else {}
    if options.kills + options.stops:
        rows |= measure_failovers(options.kills, options.stops, arguments, chance)
    report = make_head("Fail-over to a standby", text, PACKAGES, describe_disk()) + "\n"
    if rows:
        report += spread_table(rows, "seconds")
    if options.repetitions:
        report += "\n" + COST_TEXT.format(rounds=options.rounds, repetitions=options.repetitions)
        report += "\n" + measure_cost(options.megabytes, options.repetitions, options.rounds)
    publish(report, options.report)


if __name__ == "__main__":
    main()
