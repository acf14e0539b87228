"""Steps and clocks of the asynchronous modes, and rounds that are pushed ahead, against models that use sets only."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.consistency import Consistency
from ps_protocol.errors import ContributionConflict, ContributionMissing, FutureRound
from ps_protocol.membership import Membership
from ps_protocol.requests import Completion
from services.pserver.run.clocks import Clocks, Committed
from services.pserver.run.staging import Push

from ...raising import raises_code
from ...soaking import examples

BLOCKS = ("a", "b", "c")
NUMBERS: list[Any] = [{"lr": 0.1}]
RANKS = (0, 1, 2)


def complete(number: int | None) -> Completion | None:
    return None if number is None else Completion(number, NUMBERS)


class ClocksMachine(RuleBasedStateMachine):
    """The model: what each trainer has pushed for its open step, which blocks of which steps are still queued."""

    @initialize(bound=st.sampled_from([None, 0, 1, 3]), wait=st.booleans())
    def begin(self, bound: int | None, wait: bool) -> None:
        self.bound, self.wait = bound, wait
        mode: Any = "async" if bound is None else "ssp"
        rules = Consistency(mode=mode, max_staleness=bound, wait_for_apply=wait)
        self.incarnations = dict.fromkeys(RANKS, 1)
        self.clocks: Clocks[str] = Clocks(self.incarnations, rules)
        self.step = dict.fromkeys(RANKS, 1)  # the open one
        self.pushed: dict[int, set[str]] = {rank: set() for rank in RANKS}
        self.said: dict[int, int | None] = dict.fromkeys(RANKS)
        self.queued: list[tuple[Committed[str], str]] = []
        self.unapplied: dict[int, set[tuple[int, str]]] = {rank: set() for rank in RANKS}

    def clock(self, rank: int) -> int:
        """The newest step such that nothing of it and of those before waits."""
        waiting = {step for step, _ in self.unapplied[rank]}
        return min(waiting, default=self.step[rank]) - 1

    def ranks(self) -> list[int]:
        return sorted(self.incarnations)

    @rule(data=st.data(), blocks=st.sets(st.sampled_from(BLOCKS)), last=st.booleans())
    def push(self, data: st.DataObject, blocks: set[str], last: bool) -> None:
        rank = data.draw(st.sampled_from(self.ranks()))
        step = self.step[rank]
        assert self.clocks.admit(rank, self.incarnations[rank], step) == "open"
        together = self.pushed[rank] | blocks
        number = len(together) if last else None
        payload = {name: f"{rank} {step} {name}" for name in blocks}
        said = self.said[rank]
        if (said is not None and len(together) > said) or (said is not None and number not in (None, said)):
            with pytest.raises(ContributionConflict):
                self.clocks.stage(rank, step, Push(payload, complete(number)))
            return
        staged = self.clocks.stage(rank, step, Push(payload, complete(number)))
        assert staged.num_new == len(together) - len(self.pushed[rank])
        self.pushed[rank] = together
        self.said[rank] = said if number is None else number

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        complete = [rank for rank in self.ranks() if self.said[rank] == len(self.pushed[rank])]
        assert complete == [rank for rank in self.ranks() if self.clocks.contribution(rank).is_complete]
        if not complete:
            return
        rank = data.draw(st.sampled_from(complete))
        taken = self.clocks.commit(rank)
        assert (taken.rank, taken.step) == (rank, self.step[rank])
        assert set(taken.contribution.blocks) == self.pushed[rank]
        self.queued += [(taken, name) for name in taken.contribution.blocks]
        self.unapplied[rank] |= {(taken.step, name) for name in taken.contribution.blocks}
        self.step[rank] += 1
        self.pushed[rank], self.said[rank] = set(), None

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        taken, name = self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))
        is_known = self.clocks.members.get(taken.rank) is not None and taken.steps is self.clocks._steps[taken.rank]
        before, applied = self.clock(taken.rank) if is_known else 0, self.clocks.applied
        self.clocks.count_applied_block(taken)
        if is_known:
            self.unapplied[taken.rank].discard((taken.step, name))
            assert self.clocks.applied - applied == self.clock(taken.rank) - before

    @rule(data=st.data())
    def leave_or_come_back(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(RANKS))
        if rank in self.incarnations and len(self.incarnations) > 1:
            del self.incarnations[rank]
        else:
            self.incarnations[rank] = self.incarnations.get(rank, 1) + 1
            self.step[rank], self.unapplied[rank] = 1, set()
        self.pushed[rank], self.said[rank] = set(), None
        self.clocks.install_members(Membership(self.incarnations))
        assert self.clocks.open_steps[rank] == self.step[rank]  # it outlives the membership

    @invariant()
    def clocks_are_what_is_applied(self) -> None:
        assert self.clocks.clocks == {rank: self.clock(rank) for rank in self.ranks()}

    @invariant()
    def gets_wait_for_those_who_are_behind_and_for_nobody_else(self) -> None:
        for rank in self.ranks():
            for step in range(self.step[rank] + 2):
                if step >= self.step[rank]:
                    with pytest.raises(FutureRound):
                        self.clocks.find_missing(rank, step)
                    continue
                expected = {rank} if self.wait and self.clock(rank) < step else set()
                if self.bound is not None:
                    expected |= {other for other in self.ranks() if self.clock(other) < step - self.bound}
                assert self.clocks.find_missing(rank, step) == sorted(expected)

    @invariant()
    def old_and_strange_messages_are_known_as_such(self) -> None:
        for rank in RANKS:
            if rank not in self.incarnations:
                with raises_code("stale_trainer"):
                    self.clocks.admit(rank, 1, 1)
                continue
            life = self.incarnations[rank]
            with raises_code("stale_trainer"):
                self.clocks.admit(rank, life + 1, 1)
            with pytest.raises(FutureRound):
                self.clocks.admit(rank, life, self.step[rank] + 1)
            for old in range(1, self.step[rank]):
                assert self.clocks.admit(rank, life, old) == "already_applied"


ClocksMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
TestClocks = ClocksMachine.TestCase


@pytest.mark.parametrize(("start", "opens"), [(1, 3), (3, 3), (4, 4), (None, 1)])
def test_a_new_incarnation_begins_with_its_start_or_behind_the_steps_that_are_here(start: Any, opens: int) -> None:
    clocks: Clocks[str] = Clocks({0: 1}, Consistency(mode="async"))
    for step in (1, 2):
        clocks.stage(0, step, Push({}, complete(0)))
        clocks.commit(0)
    clocks.install_members(Membership({0: 2}, starts={} if start is None else {0: start}))
    assert (clocks.open_steps, clocks.clocks) == ({0: opens}, {0: opens - 1})
    assert clocks.admit(0, 2, opens) == "open"
    with raises_code("stale_trainer"):
        clocks.admit(0, 1, opens)


def test_after_a_restart_a_trainer_may_be_ahead_until_its_first_step() -> None:
    """The checkpoint has steps 1 and 2 of trainer 0, which has pushed 1 to 5."""
    clocks: Clocks[str] = Clocks({}, Consistency(mode="async", max_delay=2), applied=2, steps={0: (1, 2)})
    for step in (3, 4, 5):
        with pytest.raises(ContributionMissing):
            clocks.find_missing(0, step)
    assert clocks.admit(0, 1, 4) == "open"
    assert clocks.stage(0, 4, Push({}, complete(0))).num_lost == 1
    with pytest.raises(FutureRound):
        clocks.admit(0, 1, 5)
    clocks.commit(0)
    assert (clocks.clocks, clocks.applied) == ({0: 4}, 3)
    with pytest.raises(FutureRound):
        clocks.admit(0, 1, 6)
    with pytest.raises(ContributionMissing):
        clocks.find_missing(0, 5)
