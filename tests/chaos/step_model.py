"""The invariants of the asynchronous modes: each block has the first steps of each trainer, each once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .diary import Record, Values, name_of
from .setup import UNIT, Setup

MAX_DOUBTFUL = 8  # steps that were begun and not ended, which may be in a block


def check_steps(setup: Setup, records: list[Record]) -> list[str]:
    """Check that each block has the first steps of each trainer, each once, and a trainer sees its own."""
    found: list[str] = []
    steps = [_Steps(may_skip=setup.on_trainer_loss == "continue") for _ in range(setup.num_trainers)]
    before: dict[tuple[int, str], tuple[int, Values]] = {}  # the last values that each rank saw, and their attempt
    done: dict[int, int] = {}
    for record in records:
        if record["what"] == "begin":
            steps[record["rank"]].begin(record["life"], record["round"])
        elif record["what"] == "end":
            steps[record["rank"]].end(record["life"], record["round"])
        elif record["what"] == "done":
            done[record["rank"]] = record["round"]
        for name, (_, *values) in record.get("blocks", {}).items():
            where = f"{name_of(record)} saw in {name}"
            clocks = [value / UNIT for value in values[: setup.num_trainers]]
            for rank, (clock, rounds) in enumerate(zip(clocks, values[setup.num_trainers :], strict=True)):
                if clock > len(steps[rank].begun):
                    found.append(f"{where} {clock:g} steps of trainer {rank}, which had begun {len(steps[rank].begun)}")
                elif not steps[rank].may_be(clock, rounds / UNIT):
                    found.append(f"{where} {clock:g} steps of trainer {rank} that make {rounds / UNIT:g} in all")
            if record["what"] == "final":
                found += [
                    f"{name} ends with {clocks[rank]:g} steps of trainer {rank}, which made {step}"
                    for rank, step in done.items()
                    if clocks[rank] < steps[rank].least(step)
                ]
                continue
            step, rank = record["round"], record["rank"]
            if clocks[rank] < steps[rank].least(step):
                found.append(f"{where} {clocks[rank]:g} of its own {step} steps")
            bound = setup.max_staleness
            taking_part = [clock for other, clock in enumerate(clocks) if other not in done]
            if bound is not None and setup.on_trainer_loss == "wait" and min(taking_part, default=step) < step - bound:
                found.append(f"{where} clocks {clocks} after step {step}: staler than {bound}")
            attempt, older = before.get((rank, name), (record["attempt"], tuple(values)))
            if attempt == record["attempt"] and any(new < old for new, old in zip(values, older, strict=True)):
                found.append(f"{where} {values} after {older}")
            before[rank, name] = record["attempt"], tuple(values)
    return found


@dataclass
class _Steps:
    """The steps that one rank has begun and ended. Under `continue` another incarnation may skip some."""

    may_skip: bool
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    _newest: tuple[int, int] = (0, 0)  # the first step of the newest incarnation, and its number

    def begin(self, life: int, step: int) -> None:
        self.begun.add(step)
        if life > self._newest[1]:
            self._newest = step, life

    def end(self, life: int, step: int) -> None:
        """Add a step, unless an incarnation has pulled that of the one before at its start."""
        first, newest = self._newest
        if life == newest and step >= first:
            self.ended.add(step)

    def may_be(self, clock: float, total: float) -> bool:
        """Return whether a block may hold so many steps with this sum of their numbers."""
        if not self.may_skip or not clock.is_integer():
            return clock.is_integer() and total == clock * (clock + 1) / 2
        doubtful = sorted(self.begun - self.ended)[-MAX_DOUBTFUL:]
        subsets = (skipped for n in range(len(doubtful) + 1) for skipped in itertools.combinations(doubtful, n))
        return any(sum(sorted(self.begun.difference(skipped))[: int(clock)]) == total for skipped in subsets)

    def least(self, step: int) -> int:
        """Return the least number of steps in a block that a trainer sees after this step."""
        return sum(1 for ended in self.ended if ended <= step) if self.may_skip else step
