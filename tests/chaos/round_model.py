"""The invariants of rounds: in each round every block has the same whole contributions, each once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from functools import lru_cache

from .diary import Record, Values, name_of
from .setup import UNIT, Setup

Ranks = frozenset[int]
Version = tuple[int, int]  # an attempt, and a round

MAX_UNSEEN = 3  # rounds between two seen versions whose members can be decoded


def check_rounds(setup: Setup, records: list[Record]) -> list[str]:
    """Return a description of each violation."""
    found: list[str] = []
    steps = _Steps(records)
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
                    found.append(f"{name_of(record)} saw other bytes of {name} in version {version} than others")
        for first, last, sets in _decode(versions, resume, setup, found):
            for round_, ranks in zip(range(first + 1, last + 1), sets, strict=True):
                found += [
                    f"round {round_} was over before trainer {rank} had begun it"
                    for rank in ranks
                    if not steps.began.get((rank, round_), float("inf")) < steps.first_seen[attempt, last]
                ]
                ended, nan = steps.ended[attempt, round_], steps.nan[attempt, round_]
                is_skipped = not ranks and nan
                missing = {rank for rank, life in ended} - ranks
                if missing and not is_skipped:
                    found.append(f"round {round_} lacks trainers {sorted(missing)}, which have ended it")
                all_ranks = steps.members(round_, setup.num_trainers)
                if setup.on_trainer_loss == "wait" and ranks != all_ranks and not is_skipped:
                    found.append(f"round {round_} is made of trainers {sorted(ranks)}, not of all trainers")
                if ranks and ended & nan:
                    found.append(f"round {round_} was not skipped, although a gradient was not finite")
    return found + [text for r in records if r["what"] == "final" for text in _check_final(setup, steps, r)]


def _check_final(setup: Setup, steps: _Steps, final: Record) -> list[str]:
    """Check that under `wait` the end has the bits of the undisturbed run."""
    if setup.on_trainer_loss != "wait":
        return []
    doubtful = sorted({round_ for (_, round_), lives in steps.nan.items() if lives})
    skips = itertools.chain.from_iterable(itertools.combinations(doubtful, n) for n in range(len(doubtful) + 1))
    ends = [_values_after(final["round"], steps, setup.num_trainers, skipped) for skipped in skips]
    reached = {name: tuple(values) for name, (_, *values) in final["blocks"].items()}
    if any(all(values == end for values in reached.values()) for end in ends):
        return []
    return [f"the end after round {final['round']} is not that of the undisturbed run, {ends[0]}: {reached}"]


def _values_after(last: int, steps: _Steps, num_trainers: int, skipped: Collection[int]) -> Values:
    counts, rounds = [0.0] * num_trainers, [0.0] * num_trainers
    for round_ in range(1, last + 1):
        members = steps.members(round_, num_trainers)
        for rank in () if round_ in skipped else members:
            counts[rank] += UNIT / len(members)
            rounds[rank] += UNIT / len(members) * round_
    return (*counts, *rounds)


class _Steps:
    """The steps that incarnations have begun and ended. An incarnation is a rank and its number."""

    def __init__(self, records: list[Record]) -> None:
        self.began: dict[tuple[int, int], float] = {}  # by rank and round, of the first incarnation
        self.ended: defaultdict[Version, set[tuple[int, int]]] = defaultdict(set)
        self.nan: defaultdict[Version, set[tuple[int, int]]] = defaultdict(set)  # begun with such a gradient
        self.first_seen: dict[Version, float] = {}
        self._done: dict[int, int] = {}  # the last round of each rank
        self._under_way: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for record in records:
            self._add(record)

    def members(self, round_: int, num_trainers: int) -> Ranks:
        """Return the ranks that are not done before this round."""
        return frozenset(rank for rank in range(num_trainers) if round_ <= self._done.get(rank, round_))

    def _add(self, record: Record) -> None:
        life = record.get("rank", -1), record.get("life", 0)
        if record["what"] == "begin":
            self.began.setdefault((record["rank"], record["round"]), record["at"])
            self._under_way[life].add(record["round"])
            if record["nan"]:
                self.nan[record["attempt"], record["round"]].add(life)
        elif record["what"] == "refused":
            self.nan[record["attempt"], record["round"]].discard(life)
            self._under_way[life].discard(record["round"])
        elif record["what"] == "back":
            pushed_again = {round_ for round_ in self._under_way[life] if round_ <= record["round"]}
            for attempt, round_ in [version for version, lives in self.nan.items() if life in lives]:
                if attempt < record["attempt"] and round_ in pushed_again:
                    self.nan[record["attempt"], round_].add(life)
            self._under_way[life].clear()
        elif record["what"] == "end":
            over = {round_ for round_ in self._under_way[life] if round_ <= record["round"]}
            for round_ in over:
                self.ended[record["attempt"], round_].add(life)
            self._under_way[life] -= over
        elif record["what"] == "done":
            self._done[record["rank"]] = record["round"]
        for version, *_ in record.get("blocks", {}).values():
            self.first_seen.setdefault((record["attempt"], version), record["at"])


def _decode(
    versions: dict[str, dict[int, Values]], resume: int, setup: Setup, found: list[str]
) -> list[tuple[int, int, tuple[Ranks, ...]]]:
    """Return the members of rounds between two seen versions: first, last, the set of each round."""
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
    """Return the possible sets of ranks in the rounds after `first` up to `last` that change a block so."""
    num_ranks = len(change) // 2
    subsets = [frozenset(ranks) for n in range(num_ranks + 1) for ranks in itertools.combinations(range(num_ranks), n)]

    def is_it(sets: tuple[Ranks, ...]) -> bool:
        shares = [(round_, ranks, UNIT / len(ranks)) for round_, ranks in enumerate(sets, first + 1) if ranks]
        counts = [sum(share for _, ranks, share in shares if rank in ranks) for rank in range(num_ranks)]
        rounds = [sum(share * round_ for round_, ranks, share in shares if rank in ranks) for rank in range(num_ranks)]
        return change == (*counts, *rounds)

    return frozenset(sets for sets in itertools.product(subsets, repeat=last - first) if is_it(sets))
