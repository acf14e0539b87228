"""The model of the campaign: a correct history has no violations, and each broken invariant is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from .diary import Record, draw, seed_draws
from .model import History, find_violations
from .round_model import explain
from .setup import UNIT, Setup

SYNC = Setup(seed=0)
BLOCKS = ("a.block0", "a.block1")
BOTH = (0, 1)


def values_after(sets: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the values of a block after rounds with contributions of these ranks."""
    counts, rounds = [0.0, 0.0], [0.0, 0.0]
    for round_, ranks in enumerate(sets, 1):
        for rank in ranks:
            counts[rank] += UNIT / len(ranks)
            rounds[rank] += UNIT / len(ranks) * round_
    return counts + rounds


class Story:
    """A history: records in the order of time."""

    def __init__(self, sets: Sequence[tuple[int, ...]] = ()) -> None:
        self.records: list[Record] = []
        self.train(sets)

    def add(self, what: str, rank: int, round_: int, values: list[float] | None = None, **facts: Any) -> None:
        record = {"what": what, "at": float(len(self.records) + 1), "rank": rank, "life": 1, "attempt": 0}
        record["round"] = round_
        if what == "begin":
            record["nan"] = False
        if values is not None:
            record["blocks"] = {name: [round_, *values] for name in BLOCKS}
        self.records.append({**record, **facts})

    def train(self, sets: Sequence[tuple[int, ...]]) -> None:
        """Add synchronous rounds, which all ranks begin and these ranks end."""
        for round_, ranks in enumerate(sets, 1):
            for rank in BOTH:
                self.add("begin", rank, round_)
            for rank in ranks:
                self.add("end", rank, round_, values_after(sets[:round_]))

    def violations(self, setup: Setup = SYNC, **happened: Any) -> list[str]:
        return find_violations(History(setup, self.records, **happened))


def test_a_round_without_a_lost_trainer_is_a_violation_under_wait_only() -> None:
    story = Story()
    sets = [BOTH, (0,), BOTH]
    story.train(sets[:2])
    story.add("begin", 0, 3)
    story.add("begin", 1, 3, life=2)
    story.add("end", 1, 3, values_after(sets), life=2)
    assert story.violations(Setup(seed=0, on_trainer_loss="continue")) == []
    assert story.violations() == ["round 2 is made of trainers [0], not of all trainers"]


def test_a_trainer_that_has_ended_a_round_is_in_it() -> None:
    story = Story([BOTH, (0,)])
    story.add("end", 1, 2, values_after([BOTH, (0,)]))
    found = story.violations(Setup(seed=0, on_trainer_loss="continue"))
    assert found == ["round 2 lacks trainers [1], which have ended it"]


def test_a_trainer_that_is_done_is_in_no_later_round() -> None:
    story = Story([BOTH, BOTH])
    story.add("done", 1, 2)
    story.add("begin", 0, 3)
    story.add("end", 0, 3, values_after([BOTH, BOTH, (0,)]))
    assert story.violations() == []


def test_under_wait_a_round_is_not_made_again_without_a_trainer_that_is_done() -> None:
    story = Story([BOTH, BOTH])
    story.add("done", 1, 2)
    story.add("back", 0, 1, values_after([BOTH]), attempt=1)
    story.add("begin", 0, 2, attempt=1)
    story.add("end", 0, 2, values_after([BOTH, (0,)]), attempt=1)
    assert story.violations(Setup(seed=0, on_trainer_loss="continue"), disk_damaged=[5.0]) == []
    found = story.violations(disk_damaged=[5.0])
    assert found == ["round 2 is made of trainers [0], not of all trainers"]


def test_the_end_is_that_of_the_undisturbed_run() -> None:
    story = Story()
    for rank in BOTH:
        story.add("start", rank, 0, values_after([]))
    story.train([BOTH, BOTH])
    sets = [BOTH] * 8
    end: Record = {"what": "final", "at": 100.0, "round": 8, "attempt": 0}  # too far away to decode the rounds between
    assert story.violations() == []
    story.records.append({**end, "blocks": {name: [8, *values_after(sets)] for name in BLOCKS}})
    assert story.violations() == []
    sets[4] = (0,)
    story.records[-1]["blocks"] = {name: [8, *values_after(sets)] for name in BLOCKS}
    assert "is not that of the undisturbed run" in story.violations()[0]


def test_a_trainer_is_evicted_only_after_a_fault() -> None:
    story = Story([BOTH, (0,)])
    story.add("error", 1, 2, kind="stale_trainer", text="lost")
    policy = Setup(seed=0, on_trainer_loss="continue")
    text = "trainer 1 (life 1) was evicted without a fault: lost"
    assert story.violations(policy) == [text]
    assert story.violations(policy, lost={"pserver 0": [2.0], "trainer 0": [2.0]}) == [text]
    assert story.violations(policy, lost={"trainer 1": [2.0]}) == []
    assert story.violations(policy, lost={"trainer": [2.0]}) == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param([12.0, 6.0, 12.0, 6.0], id="one contribution twice"),
        pytest.param([6.0, 6.0, 6.0, 0.0], id="half of one"),
        pytest.param([6.0, 6.0, 12.0, 6.0], id="that of another round"),
        pytest.param([12.0, 12.0, 12.0, 12.0], id="a sum instead of a mean"),
        pytest.param([float("nan"), 6.0, 6.0, 6.0], id="NaN"),
    ],
)
def test_only_whole_contributions_make_up_a_round(change: list[float]) -> None:
    story = Story()
    for rank in BOTH:
        story.add("begin", rank, 1)
    story.add("end", 0, 1, change)
    assert "no whole contributions make up rounds 1 to 1" in story.violations()[0]


def test_all_blocks_are_made_of_the_same_contributions() -> None:
    story = Story()
    for rank in BOTH:
        story.add("begin", rank, 1)
    story.add("end", 0, 1, values_after([BOTH]))
    story.records[-1]["blocks"]["a.block1"] = [1, *values_after([(0,)])]
    found = story.violations(Setup(seed=0, on_trainer_loss="continue"))
    assert found == ["rounds 1 to 1 of a.block1 are made of others than in another block"]


def test_a_version_has_the_same_bytes_for_all_trainers() -> None:
    story = Story([BOTH])
    story.records[-1]["blocks"]["a.block0"][1] += 1
    assert story.violations() == ["trainer 1 (life 1) saw other bytes of a.block0 in version 1 than others"]


def test_a_barrier_waits_for_all_trainers() -> None:
    story = Story()
    story.add("begin", 0, 1)
    story.add("end", 0, 1, values_after([BOTH]))
    story.add("begin", 1, 1)
    assert story.violations() == ["round 1 was over before trainer 1 had begun it"]


def test_the_versions_that_a_trainer_sees_only_grow() -> None:
    story = Story([BOTH, BOTH])
    story.add("end", 0, 1, values_after([BOTH]))
    assert story.violations()[0] == "trainer 0 (life 1) saw version 1 of a.block0 after 2"


def test_a_round_is_skipped_if_and_only_if_a_gradient_was_not_finite() -> None:
    cases: list[tuple[bool, list[tuple[int, ...]], list[str]]] = [
        (True, [BOTH, ()], []),
        (False, [BOTH, ()], ["round 2 lacks trainers [0], which have ended it"]),
        (True, [BOTH, BOTH], ["round 2 was not skipped, although a gradient was not finite"]),
    ]
    for is_nan, sets, expected in cases:
        story = Story([BOTH])
        story.add("begin", 0, 2, nan=is_nan)
        story.add("begin", 1, 2)
        story.add("end", 0, 2, values_after(sets))
        assert story.violations(Setup(seed=0, nonfinite="skip_round"))[: len(expected) or 1] == expected


def test_a_gradient_that_is_not_finite_is_pushed_again_after_a_rollback() -> None:
    story = Story([BOTH])
    story.add("begin", 0, 2, nan=True)
    story.add("begin", 1, 2)
    story.add("start", 1, 1, values_after([BOTH]), attempt=1, life=2)
    story.add("begin", 1, 2, attempt=1, life=2)
    story.add("back", 0, 2, values_after([BOTH, ()]), attempt=1)
    story.add("end", 1, 2, values_after([BOTH, ()]), attempt=1, life=2)
    assert story.violations(Setup(seed=0, nonfinite="skip_round"), disk_damaged=[2.0]) == []


def rolled_back(to: int, of: int) -> Story:
    """Return a run that was rolled back, and repeats the lost rounds."""
    story = Story([BOTH] * of)
    for rank in BOTH:
        story.add("back", rank, to, values_after([BOTH] * to), attempt=1)
    story.add("begin", 0, to + 1, attempt=1)
    story.add("begin", 1, to + 1, attempt=1)
    story.add("end", 0, to + 1, values_after([BOTH] * (to + 1)), attempt=1)
    return story


def test_acknowledged_rounds_are_lost_only_for_a_reason() -> None:
    story = rolled_back(to=1, of=3)
    assert story.violations() == ["the run was rolled back by 2 rounds to 1 without damage"]
    assert story.violations(disk_damaged=[2.0]) == []
    both = {"trainer": [10.5], "pserver": [10.6]}  # after the last round had begun
    assert story.violations(lost=both) == ["the run was rolled back by 2 rounds to 1 without damage"]
    story = rolled_back(to=2, of=3)
    assert story.violations(lost=both) == []
    assert story.violations(lost={"pserver": [10.6]}) != []
    assert story.violations(lost={"trainer": [2.0], "pserver": [10.6]}) != []


def test_a_rollback_does_not_change_earlier_versions() -> None:
    story = rolled_back(to=1, of=3)
    for record in story.records:
        if record["what"] == "back":
            record["blocks"] = {name: [1, *values_after([(0,)])] for name in BLOCKS}
    assert any("saw other bytes of a.block0 in version 1" in text for text in story.violations(disk_damaged=[2.0]))


def test_a_wrong_answer_is_a_violation() -> None:
    story = Story()
    story.add("wrong answer", 0, 0, text="half a body was taken")
    assert story.violations() == ["wrong answer: half a body was taken"]


def test_random_numbers_depend_on_seed_and_step_only() -> None:
    story = Story()
    seed_draws(SYNC.seed, 3)
    story.add("back", 0, 3, drawn_for=3, draws=draw())
    assert story.violations() == []
    story.add("back", 0, 3, drawn_for=3, draws=draw())
    assert "in step 3, not" in story.violations()[0]


def test_the_rounds_between_two_seen_versions_are_decoded() -> None:
    change = tuple(values_after([BOTH, (), (1,)]))
    assert explain(change, 0, 3) == {(frozenset(BOTH), frozenset(), frozenset({1}))}
