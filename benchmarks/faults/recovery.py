"""Recovery time after `kill -9` of a trainer, and of a pserver with a shard of 100 MB. The lease is 1 s.

python -m benchmarks.faults.recovery [--trainer-kills 30] [--pserver-kills 20] [--megabytes 100] [--report FILE.md]
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from signal import SIGKILL

from ..report import PACKAGES, describe_disk, make_head, make_parser, publish, spread_table
from .observed import ObservedCluster

LEASE_SECONDS = 1.0
SETTLE_STEPS = 3  # of each trainer, before the next kill

TRAINER_TEXT = """\
## A trainer is killed

3 trainers, 2 pservers, policy `continue`, 10 ms of emulated computation a step. *Released*: from SIGKILL until each of
the others has completed a round without the dead one; the target is at most 2 s. *Detected*: until the
coordinator logs the loss. *Members changed*: from there until every pserver has the new members.
"""

PSERVER_TEXT = """\
## A pserver is killed

1 pserver with a shard of {megabytes} MB (and two slots of the same size for Adam), 2 trainers that push without a
pause, durability `log`. It is killed under load and restarted at once. *Serving* is when the coordinator has installed
the run on it; the targets are at most 2 s after its interpreter and imports are ready, and 4 s from the start of its
process. *Updates* is the number of updates replayed from the log.
"""


def kill_trainers(repetitions: int, chance: random.Random) -> dict[str, list[float]]:
    """Return the seconds of each phase, in order."""
    rows: dict[str, list[float]] = defaultdict(list)
    arguments = ["--compute-seconds", "0.01"]
    settings = {"lease_seconds": LEASE_SECONDS, "on_trainer_loss": "continue"}
    with ObservedCluster(arguments, pservers=2, trainers=3, **settings) as observed:
        ranks = range(3)
        for repetition in range(repetitions):
            observed.wait_for_steps(ranks, number=SETTLE_STEPS, after=time.time())
            time.sleep(chance.uniform(0, LEASE_SECONDS / 3))  # anywhere between two heartbeats
            victim = chance.choice(ranks)
            others = [rank for rank in ranks if rank != victim]
            killed_at = observed.end(observed.cluster.trainers[victim], SIGKILL)
            # It may have pushed for the round after the last one that it completed, but for no later one.
            last = max(step.round for step in observed.steps if step.rank == victim)
            released_at = observed.wait_for_round(others, last + 2)
            lost = observed.wait_for_entry("coordinator", f"trainer {victim} was lost", after=killed_at)
            changed = observed.wait_for_entry("coordinator", "members installed", after=lost.at)
            rows["detected"].append(lost.at - killed_at)
            rows["members changed"].append(changed.at - lost.at)
            rows["**released**, from SIGKILL"].append(released_at - killed_at)
            print(f"trainer {repetition + 1}/{repetitions}: released after {released_at - killed_at:.2f} s", flush=True)
            observed.start_trainer(victim)
    return rows


def kill_pservers(repetitions: int, megabytes: float, chance: random.Random) -> dict[str, list[float]]:
    """Return the seconds of each phase, in order, and the numbers of replayed updates."""
    rows: dict[str, list[float]] = defaultdict(list)
    arguments = ["--elements", str(int(megabytes * 250_000))]
    with ObservedCluster(arguments, pservers=1, trainers=2, lease_seconds=LEASE_SECONDS) as observed:
        for repetition in range(repetitions):
            observed.wait_for_steps(range(2), number=SETTLE_STEPS, after=time.time())
            time.sleep(chance.uniform(0, 3))  # anywhere between two checkpoints
            killed_at = observed.end(observed.cluster.pservers[0], SIGKILL)
            begun_at = time.time()
            observed.cluster.start_pserver(0)
            ready, listening, restored, installed = (
                observed.wait_for_entry("pserver 0", event, after=begun_at)
                for event in ("starting", "serving", "restored from disk", "run installed")
            )
            observed.wait_for_steps(range(2), after=installed.at)
            resumed_at = max(
                next(step.at for step in observed.steps if step.rank == rank and step.at > installed.at)
                for rank in range(2)
            )
            load, replay = restored.facts["load_seconds"], restored.facts["replay_seconds"]
            rows["detect: SIGKILL until the restart"].append(begun_at - killed_at)
            rows["start: interpreter and imports"].append(ready.at - begun_at)
            rows["listen: the HTTP server"].append(listening.at - ready.at)
            rows["load: the checkpoint"].append(load)
            rows["replay: the log"].append(replay)
            rows["install: registration, freeze, the rest"].append(installed.at - listening.at - load - replay)
            rows["**serving**, from ready"].append(installed.at - ready.at)
            rows["**serving**, from process start"].append(installed.at - begun_at)
            rows["resume: until each trainer has completed a round"].append(resumed_at - installed.at)
            rows["updates"].append(restored.facts["updates"])
            print(
                f"pserver {repetition + 1}/{repetitions}: serving {installed.at - ready.at:.2f} s after it was ready, "
                f"{installed.at - begun_at:.2f} s after its start",
                flush=True,
            )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trainer-kills", type=int, default=30)
    parser.add_argument("--pserver-kills", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the pserver's shard")
    parser.add_argument("--seed", type=int, default=1, help="of times and victims")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    text = (__doc__ or "").split("\n\n")[0] + " With fewer than 100 values p99 is the largest of them."
    report = make_head("Recovery", text, PACKAGES, describe_disk())
    if options.trainer_kills:
        report += f"\n{TRAINER_TEXT}\n" + spread_table(kill_trainers(options.trainer_kills, chance), "seconds")
    if options.pserver_kills:
        rows = kill_pservers(options.pserver_kills, options.megabytes, chance)
        report += f"\n{PSERVER_TEXT.format(megabytes=f'{options.megabytes:g}')}\n" + spread_table(rows, "seconds")
    publish(report, options.report)


if __name__ == "__main__":
    main()
