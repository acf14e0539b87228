"""Freeze, decide and install in random walks: all pservers apply the same sets under any faults.

The real `Rounds` of every pserver and the real `Run` of the coordinator with its decisions, driven in arbitrary
interleavings (`changing_run.py`). The test carries out the coordinator's changes, which may be cut off anywhere. A
pserver that dies keeps what it has applied (the log) and loses what was staged; a trainer that is asked for a round's
bytes again still has them until it has pulled the round from all pservers. A silent trainer may still send, return, or
have a successor that sends as well. Messages of the coordinator may arrive at any later time, and more than once.

A trainer sends its batch barrier to a pserver once that has all of its contribution, whatever the others have, so that
it may die between two pservers. The barrier comes once to each incarnation, with the verdict on the gradient, and
rarely again. Where gradients are clipped, a trainer asks every pserver for its norm before a get brings the sum to each
of them, one after the other, with anything in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..soaking import examples
from .changing_run import MAX_TRAINERS, ChangingRun
from .simulated_members import LOST

INDICES = st.integers(0, 9)


class Faults(RuleBasedStateMachine):
    """A run under faults. See changing_run.py for the events."""

    @initialize(
        num_trainers=st.integers(1, MAX_TRAINERS), num_pservers=st.integers(1, 3), max_delay=st.integers(0, 1),
        take_over=st.booleans(), min_trainers=st.integers(1, MAX_TRAINERS), clips=st.booleans(),
    )  # fmt: skip
    def begin(self, **rules: int) -> None:
        self.run = ChangingRun(**rules)
        self.checks = Checks(self.run)

    @rule(which=INDICES, to=INDICES)
    def push(self, which: int, to: int) -> None:
        self.run.push(which, to)

    @rule(which=INDICES, to=INDICES)
    def barrier(self, which: int, to: int) -> None:
        self.run.barrier(which, to)

    @rule(slow=st.integers(0, MAX_TRAINERS))
    def take_steps(self, slow: int) -> None:
        self.run.take_steps(slow)

    @rule(which=INDICES)
    def kill_trainer(self, which: int) -> None:
        self.run.kill_trainer(which)

    @rule(which=INDICES)
    def lose_trainer(self, which: int) -> None:
        self.run.lose_trainer(which)

    @rule(which=INDICES)
    def send_heartbeat(self, which: int) -> None:
        self.run.send_heartbeat(which)

    @rule(which=INDICES)
    def fail_silently(self, which: int) -> None:
        self.run.fail_silently(which)

    @rule(rank=st.integers(0, MAX_TRAINERS - 1), declares=st.booleans())
    def start_trainer(self, rank: int, declares: bool) -> None:
        self.run.start_trainer(rank, declares)

    @rule(which=INDICES, loses=st.booleans())
    def restart_pserver(self, which: int, loses: bool) -> None:
        self.run.restart_pserver(which, loses)

    @rule(back=st.integers(0, 3))
    def request_rollback(self, back: int) -> None:
        self.run.request_rollback(back)

    @precondition(lambda self: self.run.run.is_changing or self.run.change is not None)
    @rule(which=INDICES, crash=st.booleans())
    def go_on_with_the_change(self, which: int, crash: bool) -> None:
        self.run.go_on_with_the_change(which, crash)

    @rule()
    def end_the_change(self) -> None:
        self.run.end_the_change()

    @rule(which=st.integers(0, 11))
    def old_message(self, which: int) -> None:
        self.run.old_message(which)

    @rule(which=INDICES, num_told=st.integers(0, 2), loses=st.booleans())
    def late_installation(self, which: int, num_told: int, loses: bool) -> None:
        self.run.late_installation(which, num_told, loses)

    @invariant()
    def all_rules_hold(self) -> None:
        self.checks.check()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.checks.complete_rounds()


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)


class Checks:
    """The checks of a run in each of its states."""

    def __init__(self, run: ChangingRun) -> None:
        self._run = run
        self._before = run.run

    def check(self) -> None:
        self._all_pservers_apply_the_same()
        self._a_trainer_that_completed_a_round_is_in_it()
        self._who_is_awaited_is_in_every_round()
        self._a_run_that_continues_waits_only_below_its_minimum_of_trainers()
        self._the_run_is_consistent()
        self._applied_rounds_are_close()

    def _all_pservers_apply_the_same(self) -> None:
        for one in self._run.pservers:
            for other in self._run.pservers:
                if one.attempt == other.attempt:
                    for round_ in one.history.keys() & other.history.keys():
                        assert one.history[round_] == other.history[round_], f"round {round_}"
                        assert one.totals.get(round_) == other.totals.get(round_), f"round {round_}"

    def _a_trainer_that_completed_a_round_is_in_it(self) -> None:
        for pserver in self._run.pservers:
            for (round_, rank), life in self._run.ended.items() if pserver.attempt != LOST else ():
                assert pserver.history[round_].get(rank) == life, f"trainer {rank} in round {round_}"

    def _who_is_awaited_is_in_every_round(self) -> None:
        for pserver in self._run.pservers if self._run.take_over else []:
            for round_, lives in pserver.history.items():
                assert lives.keys() == set(range(self._run.num_trainers)), f"round {round_}"

    def _a_run_that_continues_waits_only_below_its_minimum_of_trainers(self) -> None:
        if not self._run.take_over:
            awaited = [trainer.rank for trainer in self._run.run.record.awaited if trainer.has_declared]
            assert not awaited or self._run.run.record.num_declared < self._run.settings.min_trainers

    def _the_run_is_consistent(self) -> None:
        run, record, before = self._run.run, self._run.run.record, self._before
        assert record.members == {rank: trainer.incarnation for rank, trainer in self._run.trainers.items()}
        assert record.change_number >= before.record.change_number
        assert all(run.incarnations[rank] >= newest for rank, newest in before.incarnations.items())
        assert run.installed_number <= record.change_number
        applied = [pserver.rounds.applied for pserver in self._run.pservers if pserver.attempt == self._run.attempt]
        assert self._run.has_lost_rounds or run.newest_applied <= max([self._run.resume, *applied])
        if not run.is_changing and run.installed_number:
            assert run.installed_members == record.membership.members == record.targets
        if self._run.take_over:
            assert {t.rank for t in record.awaited} == set(range(self._run.num_trainers)) - record.members.keys()
        for rank, incarnation in record.targets.items():
            trainer = record.trainers[rank]
            assert trainer.incarnation == incarnation or trainer.is_awaited, "the target has left"
        self._before = run

    def _applied_rounds_are_close(self) -> None:
        """Rounds that were decided to be empty are passed over at once, so that they do not count."""
        stepped = [sum(map(bool, p.history.values())) for p in self._run.pservers if p.attempt == self._run.attempt]
        assert not stepped or max(stepped) - min(stepped) <= self._run.max_delay + 1

    def complete_rounds(self) -> None:
        """Complete three rounds after all lost processes have come back without further faults."""
        for rank in range(self._run.num_trainers):
            self._run.start_trainer(rank, declares=True)
        for _ in range(40):
            if not self._run.run.is_changing and self._run.change is None:
                break
            self._run.step_change(1)
        before = min(p.rounds.applied for p in self._run.pservers)
        for _ in range(60):
            for trainer in self._run.trainers.values():
                self._run.take_step(trainer)
        after = min(p.rounds.applied for p in self._run.pservers)
        assert after >= before + 3, (
            self._run.pservers,
            self._run.trainers,
            self._run.run.record.membership,
        )
        self._all_pservers_apply_the_same()


def walk(seed: int) -> None:
    """Many more rounds and changes than hypothesis makes, which leaves rules out and begins small."""
    chance = random.Random(seed)
    max_delay, take_over, min_trainers = chance.choice((0, 0, 1)), chance.random() < 0.5, chance.choice((1, 1, 2, 3))
    num_trainers, num_pservers, clips = chance.randint(2, 3), chance.randint(1, 3), chance.random() < 0.5
    run = ChangingRun(num_trainers, num_pservers, max_delay, take_over, min_trainers, clips)
    checks = Checks(run)

    def which() -> int:
        return chance.randrange(10)

    actions: list[tuple[int, Callable[[], None]]] = [
        (8, lambda: run.push(which(), which())),
        (8, lambda: run.barrier(which(), which())),
        (8, lambda: run.take_steps(chance.randint(0, MAX_TRAINERS))),
        (2, lambda: run.kill_trainer(which())),
        (2, lambda: run.lose_trainer(which())),
        (2, lambda: run.send_heartbeat(which())),
        (1, lambda: run.fail_silently(which())),
        (4, lambda: run.start_trainer(chance.randrange(MAX_TRAINERS), chance.random() < 0.6)),
        (1, lambda: run.restart_pserver(which(), chance.random() < 0.3)),
        (1, lambda: run.request_rollback(chance.randint(0, 3))),
        (6, lambda: run.go_on_with_the_change(which(), chance.random() < 0.5)),
        (4, lambda: run.end_the_change()),
        (2, lambda: run.old_message(which())),
        (2, lambda: run.late_installation(which(), chance.randint(0, 2), chance.random() < 0.7)),
    ]
    for action in chance.choices([action for _, action in actions], [weight for weight, _ in actions], k=80):
        action()
        checks.check()
    checks.complete_rounds()


@pytest.mark.parametrize(
    "seeds",
    [range(500), *(pytest.param(range(n, n + 500), marks=pytest.mark.soak) for n in range(500, 12_000, 500))],
    ids=str,
)
def test_long_histories_of_changes(seeds: range) -> None:
    for seed in seeds:
        try:
            walk(seed)
        except Exception as error:
            error.add_note(f"walk({seed})")
            raise
