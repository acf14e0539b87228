"""Replays a history against what must hold, and says what does not.

The values of a block tell which contributions are in it (see `trainer.py`), so nothing needs to be believed: neither
what the services say of themselves, nor what they log.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from .diary import Record, in_order
from .setup import UNIT, Setup

Values = tuple[float, ...]  # of a block: counts of the ranks, sums of rounds of the ranks
Ranks = frozenset[int]

MAX_DOUBTFUL = 8  # steps that were begun and not ended, of which some are in a block and some are not
MAX_UNSEEN = 3  # rounds between two versions that are seen, so that their members can still be told


@dataclass
class History:
    """What happened: the operations of the trainers, and what was done to the cluster."""

    setup: Setup
    records: list[Record]
    disk_damaged: Sequence[float] = ()  # when something was taken from a disk: a rollback may follow
    lost: dict[str, list[float]] = field(default_factory=dict)  # by role: when processes died, or were cut off


def find_violations(history: History) -> list[str]:
    """Everything that must not be, in words; nothing if all is well."""
    records = in_order(history.records)
    found = [f"{r['what']}: {r['text']}" for r in records if r["what"] == "wrong answer"]
    found += _check_order(records) + _check_rollbacks(history, records)
    check = _check_rounds if history.setup.mode == "sync" else _check_clocks
    return found + check(history.setup, records)


def _check_order(records: list[Record]) -> list[str]:
    """The versions that a trainer sees only grow, except when it is told that the run went back."""
    found = []
    newest: dict[int, Record] = {}
    for record in (r for r in records if "blocks" in r and r["what"] != "final"):
        before = newest.get(record["rank"])
        if before is not None and record["what"] != "back" and record["attempt"] == before["attempt"]:
            for name, (version, *_) in record["blocks"].items():
                if version < before["blocks"][name][0]:
                    found.append(f"{_name(record)} saw version {version} of {name} after {before['blocks'][name][0]}")
        newest[record["rank"]] = record
    return found


def _check_rollbacks(history: History, records: list[Record]) -> list[str]:
    """Acknowledged rounds are lost only if a disk was damaged, or a trainer was lost together with a pserver."""
    found, newest, at = [], {0: 0}, 0.0
    begun: dict[tuple[int, int, int], float] = {}
    settled = 0.0  # somebody has ended a step that was begun then: what was lost before has been replaced
    for record in records:
        if record["what"] == "begin":
            begun[record["rank"], record["life"], record["round"]] = record["at"]
        if "blocks" not in record:
            continue
        attempt = record["attempt"]
        if attempt not in newest:
            lost = max(newest[max(newest)] - record["round"], 0)
            is_damaged = any(at < damage < record["at"] for damage in history.disk_damaged)
            are_lost = [
                any(settled < loss < record["at"] for loss in history.lost.get(role, ()))
                for role in ("trainer", "pserver")
            ]
            if not is_damaged and not (all(are_lost) and lost <= 1 + history.setup.max_delay):
                found.append(f"the run went back by {lost} rounds to {record['round']}, and nothing was damaged")
            at = record["at"]
        if record["what"] == "end":
            settled = max(settled, begun.get((record["rank"], record["life"], record["round"]), 0.0))
        newest[attempt] = max(newest.get(attempt, 0), record["round"])
    return found


# ------------------------------------------------------------------ synchronous


def _check_rounds(setup: Setup, records: list[Record]) -> list[str]:
    """In each round every block got the same whole contributions, each of them once."""
    found: list[str] = []
    began, ended, nan, first_seen = _operations(records)
    everybody = frozenset(range(setup.num_trainers))
    versions: dict[str, dict[int, Values]] = {}  # of each block, as they are in the newest attempt
    for attempt in sorted({r["attempt"] for r in records if "blocks" in r}):
        seen = [r for r in records if "blocks" in r and r["attempt"] == attempt]
        resume = min(version for r in seen for version, *_ in r["blocks"].values()) if attempt else 0
        for name in seen[0]["blocks"]:
            zeros = (0.0,) * 2 * setup.num_trainers
            versions[name] = {v: x for v, x in versions.get(name, {0: zeros}).items() if v <= resume}
        for record in seen:
            for name, (version, *values) in record["blocks"].items():
                if versions[name].setdefault(version, tuple(values)) != tuple(values):
                    found.append(f"{_name(record)} saw other bytes of {name} in version {version} than others")
        for first, last, sets in _decode(versions, resume, setup, found):
            for round_, ranks in zip(range(first + 1, last + 1), sets, strict=True):
                found += [
                    f"round {round_} was over before trainer {rank} had begun it"
                    for rank in ranks
                    if not began.get((rank, round_), float("inf")) < first_seen[attempt, last]
                ]
                is_skipped = not ranks and (attempt, round_) in nan
                missing = {rank for rank, life in ended.get((attempt, round_), ())} - ranks
                if missing and not is_skipped:
                    found.append(f"round {round_} lacks trainers {sorted(missing)}, who have ended it")
                if setup.on_trainer_loss == "wait" and ranks != everybody and not is_skipped:
                    found.append(f"round {round_} is made of trainers {sorted(ranks)}, not of everybody")
                if ranks and ended.get((attempt, round_), set()) & nan.get((attempt, round_), set()):
                    found.append(f"round {round_} was not skipped, although a gradient was not finite")
    return found


def _operations(
    records: list[Record],
) -> tuple[
    dict[tuple[int, int], float],
    dict[tuple[int, int], set[tuple[int, int]]],
    dict[tuple[int, int], set[tuple[int, int]]],
    dict[tuple[int, int], float],
]:
    """When each rank began each round first; which lives ended a round of an attempt, or began it with NaN; and when a
    version of an attempt was seen first."""
    began: dict[tuple[int, int], float] = {}
    ended: dict[tuple[int, int], set[tuple[int, int]]] = {}
    nan: dict[tuple[int, int], set[tuple[int, int]]] = {}
    first_seen: dict[tuple[int, int], float] = {}
    under_way: dict[tuple[int, int], set[int]] = {}
    for record in records:
        life = record.get("rank", -1), record.get("life", 0)
        if record["what"] == "begin":
            began.setdefault((record["rank"], record["round"]), record["at"])
            under_way.setdefault(life, set()).add(record["round"])
            if record["nan"]:
                nan.setdefault((record["attempt"], record["round"]), set()).add(life)
        elif record["what"] == "refused":
            nan[record["attempt"], record["round"]].discard(life)
            under_way[life].discard(record["round"])
        elif record["what"] == "back":
            under_way[life] = set()
        elif record["what"] == "end":
            over = {round_ for round_ in under_way[life] if round_ <= record["round"]}
            for round_ in over:
                ended.setdefault((record["attempt"], round_), set()).add(life)
            under_way[life] -= over
        for version, *_ in record.get("blocks", {}).values():
            first_seen.setdefault((record["attempt"], version), record["at"])
    return began, ended, nan, first_seen


def _decode(
    versions: dict[str, dict[int, Values]], resume: int, setup: Setup, found: list[str]
) -> list[tuple[int, int, tuple[Ranks, ...]]]:
    """Who is in the rounds between two versions that were seen: first, last, the set of each round."""
    steps: dict[tuple[int, int], frozenset[tuple[Ranks, ...]]] = {}
    for name, seen in versions.items():
        for first, last in itertools.pairwise(sorted(version for version in seen if version >= resume)):
            if last - first > MAX_UNSEEN:
                continue
            change = tuple(after - before for after, before in zip(seen[last], seen[first], strict=True))
            sets = explain(change, first, last)
            if not sets:
                found.append(f"no whole contributions make up rounds {first + 1} to {last} of {name}: {change}")
            elif (first, last) in steps and not (sets := sets & steps[first, last]):
                found.append(f"rounds {first + 1} to {last} of {name} are made of others than in another block")
            steps[first, last] = sets
    return [(first, last, next(iter(sets))) for (first, last), sets in sorted(steps.items()) if len(sets) == 1]


@lru_cache(maxsize=10_000)
def explain(change: Values, first: int, last: int) -> frozenset[tuple[Ranks, ...]]:
    """Which sets of ranks in the rounds after `first` up to `last` change a block so; an empty set steps nothing.

    >>> [sorted(ranks) for ranks in next(iter(explain((6.0, 0.0, 6.0, 18.0, 0.0, 18.0), 2, 3)))]
    [[0, 2]]
    """
    num_ranks = len(change) // 2
    subsets = [frozenset(ranks) for n in range(num_ranks + 1) for ranks in itertools.combinations(range(num_ranks), n)]

    def is_it(sets: tuple[Ranks, ...]) -> bool:
        shares = [(round_, ranks, UNIT / len(ranks)) for round_, ranks in enumerate(sets, first + 1) if ranks]
        counts = [sum(share for _, ranks, share in shares if rank in ranks) for rank in range(num_ranks)]
        rounds = [sum(share * round_ for round_, ranks, share in shares if rank in ranks) for rank in range(num_ranks)]
        return change == (*counts, *rounds)

    return frozenset(sets for sets in itertools.product(subsets, repeat=last - first) if is_it(sets))


# ------------------------------------------------------------------ asynchronous


@dataclass
class _Steps:
    """What one rank has begun and ended. Under `continue` another life may skip steps, begun or not."""

    may_skip: bool
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    _newest: tuple[int, int] = (0, 0)  # the first step of the newest life, and which that is

    def begin(self, life: int, step: int) -> None:
        self.begun.add(step)
        if life > self._newest[1]:
            self._newest = step, life

    def end(self, life: int, step: int) -> None:
        """What a life pulls at its start was the business of the one before."""
        first, newest = self._newest
        if life == newest and step >= first:
            self.ended.add(step)

    def may_be(self, clock: float, total: float) -> bool:
        """Whether a block may hold so many steps, with this sum of their numbers: the first, and each once."""
        if not self.may_skip or not clock.is_integer():
            return clock.is_integer() and total == clock * (clock + 1) / 2
        doubtful = sorted(self.begun - self.ended)[-MAX_DOUBTFUL:]
        subsets = (skipped for n in range(len(doubtful) + 1) for skipped in itertools.combinations(doubtful, n))
        return any(sum(sorted(self.begun.difference(skipped))[: int(clock)]) == total for skipped in subsets)

    def least(self, step: int) -> int:
        """How many must be in a block that a trainer sees after this step."""
        return sum(1 for ended in self.ended if ended <= step) if self.may_skip else step


def _check_clocks(setup: Setup, records: list[Record]) -> list[str]:
    """In each block are the first so many steps of each trainer, each once; its own are in what it sees."""
    found: list[str] = []
    steps = [_Steps(may_skip=setup.on_trainer_loss == "continue") for _ in range(setup.num_trainers)]
    before: dict[tuple[int, str], tuple[int, Values]] = {}  # what each rank saw last of a block, and in which attempt
    done: dict[int, int] = {}
    for record in records:
        if record["what"] == "begin":
            steps[record["rank"]].begin(record["life"], record["round"])
        elif record["what"] == "end":
            steps[record["rank"]].end(record["life"], record["round"])
        elif record["what"] == "done":
            done[record["rank"]] = record["round"]
        for name, (_, *values) in record.get("blocks", {}).items():
            where = f"{_name(record)} saw in {name}"
            clocks = [value / UNIT for value in values[: setup.num_trainers]]
            for rank, (clock, rounds) in enumerate(zip(clocks, values[setup.num_trainers :], strict=True)):
                if clock > len(steps[rank].begun):
                    found.append(f"{where} {clock:g} steps of trainer {rank}, who had begun {len(steps[rank].begun)}")
                elif not steps[rank].may_be(clock, rounds / UNIT):
                    found.append(f"{where} {clock:g} steps of trainer {rank} that make {rounds / UNIT:g} in all")
            if record["what"] == "final":
                found += [
                    f"{name} ends with {clocks[rank]:g} steps of trainer {rank}, who made {step}"
                    for rank, step in done.items()
                    if clocks[rank] < steps[rank].least(step)
                ]
                continue
            step, rank = record["round"], record["rank"]
            if clocks[rank] < steps[rank].least(step):
                found.append(f"{where} {clocks[rank]:g} of its own {step} steps")
            bound = setup.max_staleness
            if bound is not None and setup.on_trainer_loss == "wait" and min(clocks) < step - bound:
                found.append(f"{where} clocks {clocks} after step {step}: staler than {bound}")
            attempt, older = before.get((rank, name), (record["attempt"], tuple(values)))
            if attempt == record["attempt"] and any(new < old for new, old in zip(values, older, strict=True)):
                found.append(f"{where} {values} after {older}")
            before[rank, name] = record["attempt"], tuple(values)
    return found


def _name(record: Record) -> str:
    return f"trainer {record['rank']} (life {record['life']})" if "rank" in record else "the campaign, in the end,"
