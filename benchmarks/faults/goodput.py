"""Goodput under faults: the steps of a run in which a process is killed or stopped every 30 s, in wall-clock time.

    python -m benchmarks.faults.goodput [--standbys 1] [--faults pservers] [--minutes 10] [--seed 1] [--report FILE.md]

8 trainers, 2 pservers, policy `continue`. The undisturbed run has two halves, before and after the other one, so that
a change of the machine's speed affects both.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

from gradpost.up.standbys import Standbys
from trainer_client.testing import Child

from ..report import PACKAGES, describe_disk, make_head, make_parser, publish
from .observed import ObservedCluster, Step

PSERVERS = 2
SETTLE_STEPS = 5  # of every trainer, before the clock starts
TICK_SECONDS = 0.05

TEXT = """\
{trainers} trainers, 2 pservers with {standbys} standby(s) each, synchronous mode, policy `continue`, durability
`{durability}`, a lease of {lease:g} s. The model is tiny and its computation is emulated: each trainer
sleeps for {compute_ms:.0f} ms a step, where an accelerator would work.

A **step** is one `step()` of one trainer, whose gradient is in the parameters that it pulls. All steps completed within
{minutes:g} minutes are counted, after each trainer has taken {settle}; steps repeated after a rollback are counted
once. Nothing is subtracted for trainers that are dead, starting (a process imports torch for seconds, on processors
that the others use too), joining or waiting. Each process that ends is restarted at once; a pserver with standbys is
replaced by one, and another standby started then, as by `gradpost up`.

Every {interval:g} s there is a fault, of each kind equally often, in random order (seed {seed}). A **stall** is the
longest time between a fault and the next one in which no trainer completed a round. **Cost** is what the steps from
a fault to the next one lack to the undisturbed rate, in seconds of the whole cluster.
"""


@dataclass(frozen=True)
class Fault:
    """The kind, the victim and the time of a fault."""

    kind: str
    victim: str
    at: float


class Disturbance:
    """A source of faults, which also restarts the processes that end."""

    def __init__(
        self, observed: ObservedCluster, chance: random.Random, lease_seconds: float, kinds: str, num_standbys: int
    ) -> None:
        self.faults: list[Fault] = []
        self._observed = observed
        self._cluster = observed.cluster
        self._chance = chance
        self._lease_seconds = lease_seconds
        self._standbys = Standbys(observed.cluster, num_standbys, print)
        self._standbys.start()
        of_trainers: dict[str, Callable[[], str]] = {
            "kill -9 of a trainer": lambda: self._signal(self._chance.choice(self._cluster.trainers), SIGKILL),
            "SIGSTOP of a trainer past its lease": self._pause_trainer,
        }
        of_pservers: dict[str, Callable[[], str]] = {
            "kill -9 of a pserver": lambda: self._signal(self._chance.choice(self._cluster.pservers), SIGKILL),
            "SIGTERM of a pserver": lambda: self._signal(self._chance.choice(self._cluster.pservers), SIGTERM),
        }
        of_coordinator: dict[str, Callable[[], str]] = {
            "kill -9 of the coordinator": lambda: self._signal(self._cluster.coordinator, SIGKILL)
        }
        everything = of_trainers | of_pservers | of_coordinator
        self._kinds = {"all": everything, "trainers": of_trainers, "pservers": of_pservers}[kinds]

    def run(self, begin: float, seconds: float, interval: float) -> None:
        """Inject a fault at the beginning of each interval, and return at the end of the last one."""
        kinds: list[str] = []
        for number in range(max(1, int(seconds / interval))):
            self.supervise(begin + number * interval)
            if not kinds:
                kinds = [*self._kinds]
                self._chance.shuffle(kinds)
            kind = kinds.pop()
            at = time.time()
            self.faults.append(Fault(kind, self._kinds[kind](), at))
            print(f"{at - begin:6.1f} s  {kind}: {self.faults[-1].victim}", flush=True)
        self.supervise(begin + seconds)

    def settle(self) -> None:
        """Wait until every trainer has taken its first steps."""
        while not all(self._observed.num_steps(rank) >= SETTLE_STEPS for rank in range(self._cluster.num_trainers)):
            self.supervise(time.time() + TICK_SECONDS)

    def supervise(self, until: float) -> None:
        """Restart processes that end, until this time."""
        while time.time() < until:
            for index, service in enumerate(self._cluster.services, start=-1):
                if not service.is_running and not (index >= 0 and self._standbys.replace(index, service)):
                    self._cluster.restart(service)
            self._standbys.check()
            for rank, trainer in enumerate(self._cluster.trainers):
                if not trainer.is_running:
                    self._observed.start_trainer(rank)
            time.sleep(TICK_SECONDS)

    def _signal(self, child: Child, number: Signals) -> str:
        child.signal(number)
        return child.name

    def _pause_trainer(self) -> str:
        child = self._chance.choice(self._cluster.trainers)
        child.signal(SIGSTOP)
        self.supervise(time.time() + 2 * self._lease_seconds)
        child.signal(SIGCONT)
        return child.name


@dataclass(frozen=True)
class Outcome:
    """The steps of one run in its measured time."""

    begin: float
    seconds: float
    steps: Sequence[Step]
    faults: Sequence[Fault]

    @property
    def rate(self) -> float:
        """The steps of all trainers a second."""
        return len(self.steps) / self.seconds

    @property
    def num_rounds(self) -> int:
        return len({step.round for step in self.steps})

    def steps_between(self, begin: float, end: float) -> list[Step]:
        return [step for step in self.steps if begin <= step.at < end]

    def pauses(self, begin: float, end: float) -> list[float]:
        """Return the seconds between consecutive completed rounds, and those to both ends of this time."""
        first: dict[int, float] = {}
        for step in sorted(self.steps_between(begin, end), key=lambda step: step.at):
            first.setdefault(step.round, step.at)
        times = [begin, *first.values(), end]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def choose_durability(options: argparse.Namespace) -> str:
    """Return the default of a synchronous run."""
    return "replicated" if options.standbys else "log"


def run(seconds: float, options: argparse.Namespace, *, is_disturbed: bool) -> Outcome:
    """Train for this time, with or without faults."""
    durability = choose_durability(options)
    settings = {"lease_seconds": options.lease, "on_trainer_loss": "continue", "durability": durability}
    arguments = ["--compute-seconds", str(options.compute_seconds)]
    with ObservedCluster(arguments, pservers=PSERVERS, trainers=options.trainers, **settings) as observed:
        chance = random.Random(options.seed)
        disturbance = Disturbance(observed, chance, options.lease, options.faults, options.standbys)
        disturbance.settle()
        begin = time.time()
        if is_disturbed:
            disturbance.run(begin, seconds, options.interval)
        else:
            disturbance.supervise(begin + seconds)
        # A step that is repeated after a rollback counts once.
        newest = {(step.rank, step.round): step for step in observed.steps if begin <= step.at < begin + seconds}
    return Outcome(begin, seconds, [*newest.values()], disturbance.faults)


def make_tables(halves: Sequence[Outcome], disturbed: Outcome) -> str:
    usual_rate = statistics.mean(half.rate for half in halves)
    goodput = disturbed.rate / usual_rate
    lines = [
        f"**Goodput: {goodput:.1%}** of the undisturbed steps.",
        "",
        "| run | faults | steps | steps/s | rounds | steps a round |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, outcome in (("undisturbed, before", halves[0]), ("with faults", disturbed), ("after", halves[1])):
        lines.append(
            f"| {name} | {len(outcome.faults)} | {len(outcome.steps)} | {outcome.rate:.1f} | {outcome.num_rounds} "
            f"| {len(outcome.steps) / max(1, outcome.num_rounds):.2f} |"
        )
    lines += [
        "",
        "| fault | n | stall, median s | stall, longest s | cost, median s | cost, largest s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    ends = [*(fault.at for fault in disturbed.faults[1:]), disturbed.begin + disturbed.seconds]
    for kind in sorted({fault.kind for fault in disturbed.faults}):
        stalls, costs = [], []
        for fault, end in zip(disturbed.faults, ends, strict=True):
            if fault.kind == kind:
                stalls.append(max(disturbed.pauses(fault.at, end)))
                costs.append(end - fault.at - len(disturbed.steps_between(fault.at, end)) / usual_rate)
        lines.append(
            f"| {kind} | {len(stalls)} | {statistics.median(stalls):.2f} | {max(stalls):.2f} "
            f"| {statistics.median(costs):.2f} | {max(costs):.2f} |"
        )
    usual = [pause for half in halves for pause in half.pauses(half.begin, half.begin + half.seconds)]
    lines += [
        "",
        f"Undisturbed there were {statistics.median(usual):.2f} s between two rounds (median), "
        f"{max(usual):.2f} s at most.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of the run with faults, and of the two halves without"
    )
    parser.add_argument("--interval", type=float, default=30.0, help="seconds from one fault to the next")
    parser.add_argument("--faults", choices=["all", "trainers", "pservers"], default="all")
    parser.add_argument("--standbys", type=int, default=0, help="of each pserver")
    parser.add_argument("--trainers", type=int, default=8)
    parser.add_argument("--compute-seconds", type=float, default=0.15, help="of emulated computation a step")
    parser.add_argument("--lease", type=float, default=1.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    before = run(seconds / 2, options, is_disturbed=False)
    print(f"undisturbed: {before.rate:.1f} steps/s", flush=True)
    disturbed = run(seconds, options, is_disturbed=True)
    after = run(seconds / 2, options, is_disturbed=False)
    text = TEXT.format(
        trainers=options.trainers,
        standbys=options.standbys or "no",
        durability=choose_durability(options),
        lease=options.lease,
        compute_ms=1000 * options.compute_seconds,
        minutes=options.minutes,
        settle=SETTLE_STEPS,
        interval=options.interval,
        seed=options.seed,
    )
    head = make_head("Goodput under faults", text, PACKAGES, describe_disk())
    publish(head + "\n" + make_tables([before, after], disturbed), options.report)


if __name__ == "__main__":
    main()
