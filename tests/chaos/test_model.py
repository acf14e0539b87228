"""The model of the campaign: a correct history has no violations, and each broken invariant is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from .diary import Record
from .model import History, find_violations
from .round_model import explain
from .setup import UNIT, Setup

BLOCKS = ("a.block0", "a.block1")
BOTH = (0, 1)
CONTINUES = Setup(seed=0, on_trainer_loss="continue")
SKIPS = Setup(seed=0, nonfinite="skip_round")


def values_after(*sets: tuple[int, ...]) -> list[float]:
    """Return the values of a block after rounds with contributions of these ranks."""
    counts, rounds = [0.0, 0.0], [0.0, 0.0]
    for round_, ranks in enumerate(sets, 1):
        for rank in ranks:
            counts[rank] += UNIT / len(ranks)
            rounds[rank] += UNIT / len(ranks) * round_
    return counts + rounds


class Story:
    """A history: records in the order of time, the first of which is at 1."""

    def __init__(self, *sets: tuple[int, ...]) -> None:
        """Begin with synchronous rounds, which all ranks begin and these ranks end."""
        self.records: list[Record] = []
        for round_, ranks in enumerate(sets, 1):
            self.add("begin", 0, round_).add("begin", 1, round_)
            for rank in ranks:
                self.add("end", rank, round_, values_after(*sets[:round_]))

    def add(self, what: str, rank: int, round_: int, values: list[float] | None = None, **facts: Any) -> Story:
        record = {"what": what, "at": float(len(self.records) + 1), "rank": rank, "life": 1, "attempt": 0}
        record |= {"round": round_, "nan": False}
        if values is not None:
            record["blocks"] = {name: [round_, *values] for name in BLOCKS}
        self.records.append({**record, **facts})
        return self

    def begin(self, round_: int, **facts: Any) -> Story:
        return self.add("begin", 0, round_, **facts).add("begin", 1, round_)

    def roll_back(self, to: int) -> Story:
        """Go back to a round, and repeat the next one."""
        values = values_after(*[BOTH] * to)
        self.add("back", 0, to, values, attempt=1).add("back", 1, to, values, attempt=1)
        self.add("begin", 0, to + 1, attempt=1).add("begin", 1, to + 1, attempt=1)
        return self.add("end", 0, to + 1, values_after(*[BOTH] * (to + 1)), attempt=1)


def split_blocks(story: Story, values: list[float]) -> Story:
    """Change the second block of the last record."""
    story.records[-1]["blocks"][BLOCKS[1]][1:] = values
    return story


def end_with(*sets: tuple[int, ...]) -> Story:
    """Return a run of which only the end is seen, too far away to decode the rounds between."""
    story = Story(BOTH).add("final", 0, len(sets), values_after(*sets))
    del story.records[-1]["rank"]
    return story


@dataclass
class Case:
    """A history and its violation, if any."""

    story: Story
    violation: str = ""  # the first words
    setup: Setup = field(default=Setup(seed=0))
    happened: dict[str, Any] = field(default_factory=dict)  # damage and losses


LATE = {"trainer": [10.5], "pserver": [10.6]}  # lost after round 3 of `roll_back` had begun
ROUND_2_WITHOUT_1 = Story(BOTH, (0,)).add("end", 1, 2, values_after(BOTH, (0,)))
CASES = {
    "under wait a round has all trainers": Case(Story(BOTH, (0,)), "round 2 is made of trainers [0], not of all"),
    "under continue it may have fewer": Case(Story(BOTH, (0,)), setup=CONTINUES),
    "a trainer that has ended a round is in it": Case(
        ROUND_2_WITHOUT_1, "round 2 lacks trainers [1], which have ended it", CONTINUES),
    "a trainer that is done is in no later round": Case(
        Story(BOTH).add("done", 1, 1).add("begin", 0, 2).add("end", 0, 2, values_after(BOTH, (0,)))),
    "the end is that of the undisturbed run": Case(end_with(*[BOTH] * 8)),
    "the end has all contributions": Case(end_with(*[BOTH] * 7, (0,)), "the end after round 8 is not that of"),
    "a trainer is evicted after a fault only": Case(
        Story(BOTH, (0,)).add("error", 1, 2, kind="stale_trainer", text="lost"),
        "trainer 1 (life 1) was evicted without a fault", CONTINUES,
        {"lost": {"pserver 0": [2.0], "trainer 0": [2.0]}}),
    "a trainer with a fault may be evicted": Case(
        Story(BOTH, (0,)).add("error", 1, 2, kind="stale_trainer", text="lost"), "", CONTINUES,
        {"lost": {"trainer 1": [2.0]}}),
    "all blocks have the same contributions": Case(
        split_blocks(Story().begin(1).add("end", 0, 1, values_after(BOTH)), values_after((0,))),
        "rounds 1 to 1 of a.block1 are made of others than in another block", CONTINUES),
    "a version has the same bytes for all": Case(
        split_blocks(Story(BOTH), values_after((0,))), "trainer 1 (life 1) saw other bytes of a.block1 in version 1"),
    "a barrier waits for all trainers": Case(
        Story().add("begin", 0, 1).add("end", 0, 1, values_after(BOTH)).add("begin", 1, 1),
        "round 1 was over before trainer 1 had begun it"),
    "versions only grow": Case(
        Story(BOTH, BOTH).add("end", 0, 1, values_after(BOTH)), "trainer 0 (life 1) saw version 1 of a.block0 after 2"),
    "a round with NaN is skipped": Case(
        Story(BOTH).begin(2, nan=True).add("end", 0, 2, values_after(BOTH, ())), "", SKIPS),
    "no other round is skipped": Case(
        Story(BOTH).begin(2).add("end", 0, 2, values_after(BOTH, ())), "round 2 lacks trainers [0]", SKIPS),
    "NaN is not applied": Case(
        Story(BOTH).begin(2, nan=True).add("end", 0, 2, values_after(BOTH, BOTH)), "round 2 was not skipped", SKIPS),
    "a gradient with NaN is pushed again after a rollback": Case(
        Story(BOTH).begin(2, nan=True).add("start", 1, 1, values_after(BOTH), attempt=1, life=2)
        .add("begin", 1, 2, attempt=1, life=2).add("back", 0, 2, values_after(BOTH, ()), attempt=1)
        .add("end", 1, 2, values_after(BOTH, ()), attempt=1, life=2), "", SKIPS, {"disk_damaged": [2.0]}),
    "acknowledged rounds are kept": Case(Story(*[BOTH] * 3).roll_back(1), "the run was rolled back by 2 rounds to 1"),
    "damage may lose rounds": Case(Story(*[BOTH] * 3).roll_back(1), happened={"disk_damaged": [2.0]}),
    "a lost trainer loses one round at most": Case(
        Story(*[BOTH] * 3).roll_back(1), "the run was rolled back by 2 rounds to 1", happened={"lost": LATE}),
    "a lost trainer may lose one round": Case(Story(*[BOTH] * 3).roll_back(2), happened={"lost": LATE}),
    "a lost pserver loses no round": Case(
        Story(*[BOTH] * 3).roll_back(2), "the run was rolled back by 1 rounds", happened={"lost": {"pserver": [10.6]}}),
    "a rollback does not change earlier versions": Case(
        Story(BOTH, BOTH).add("back", 0, 1, values_after((0,)), attempt=1),
        "trainer 0 (life 1) saw other bytes of a.block0 in version 1", happened={"disk_damaged": [2.0]}),
    "a wrong answer is a violation": Case(
        Story().add("wrong answer", 0, 0, text="half a body was taken"), "wrong answer: half a body was taken"),
    **{
        f"a round is made of whole contributions: {change}": Case(
            Story().begin(1).add("end", 0, 1, change), "no whole contributions make up rounds 1 to 1")
        for change in (
            [12.0, 6.0, 12.0, 6.0],  # one contribution twice
            [6.0, 6.0, 6.0, 0.0],  # half of one
            [6.0, 6.0, 12.0, 6.0],  # that of another round
            [float("nan"), 6.0, 6.0, 6.0],
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_history_has_the_violation(name: str) -> None:
    case = CASES[name]
    found = find_violations(History(case.setup, case.story.records, **case.happened))
    assert found[0].startswith(case.violation) if case.violation else not found, found


def test_the_rounds_between_two_seen_versions_are_decoded() -> None:
    change = tuple(values_after(BOTH, (), (1,)))
    assert explain(change, 0, 3) == {(frozenset(BOTH), frozenset(), frozenset({1}))}
