"""Freeze, decide, install, as one machine: whatever dies and whenever, all pservers apply the same sets.

The real `Rounds` of every pserver and the real `decide`, driven by trainers and a coordinator in arbitrary
interleavings. A pserver that dies keeps what it has applied (the log) and loses what was staged; a trainer that is
asked for a round's bytes again still has them until it has pulled the round from everybody.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import StaleTrainer
from ps_protocol.messages import FrozenRounds
from ps_protocol.optimizers import HyperParameters
from services.coordinator.decision import Membership, Rollback, decide, newest_common
from services.pserver.history import History
from services.pserver.rounds import Rounds

NUMBERS: list[HyperParameters] = [{"lr": 0.1}]
MAX_TRAINERS = 3


@dataclass
class Pserver:
    rounds: Rounds[str]
    attempt: int = 0
    history: dict[int, tuple[int, ...]] = field(default_factory=dict)
    number: int = 0  # of the members that it has installed
    is_up: bool = True

    def settle(self, apply: object) -> None:
        """Applies are done at once; what follows from them, too."""
        while apply is not None:
            following = self.rounds.applying
            assert following is not None
            self.history[following.round] = following.ranks
            for rank, contribution in zip(following.ranks, following.contributions, strict=True):
                assert contribution.is_complete, f"half of trainer {rank} would be applied"
            apply = self.rounds.round_applied()


@dataclass
class Trainer:
    rank: int
    incarnation: int
    round: int  # that it works on
    attempt: int
    pushed: set[int] = field(default_factory=set)  # pservers that have acknowledged every push
    pulled: set[int] = field(default_factory=set)
    has_begun: bool = True  # a joining trainer begins once it has pulled the round before its first


@dataclass
class Change:
    number: int
    targets: dict[int, int]
    answers: dict[int, FrozenRounds] = field(default_factory=dict)
    to_install: set[int] | None = None  # None: not decided yet


class Changes(RuleBasedStateMachine):
    """`take_over` is policy `wait`; without it `continue`."""

    @initialize(
        num_trainers=st.integers(1, MAX_TRAINERS), num_pservers=st.integers(1, 3), max_delay=st.integers(0, 1),
        take_over=st.booleans(),
    )  # fmt: skip
    def begin(self, num_trainers: int, num_pservers: int, max_delay: int, take_over: bool) -> None:
        members = dict.fromkeys(range(num_trainers), 1)
        self.max_delay, self.take_over = max_delay, take_over
        self.membership = Membership(dict(members))
        self.attempt, self.resume, self.number = 0, 0, 0
        self.pservers = [Pserver(Rounds(members, max_delay)) for _ in range(num_pservers)]
        self.trainers = {rank: Trainer(rank, 1, 1, 0) for rank in members}
        self.lives = dict(members)
        self.awaited: set[int] = set()
        self.change: Change | None = None
        self.is_dirty = False

    # ------------------------------------------------------------ trainers

    def _trainer(self, which: int) -> Trainer | None:
        living = sorted(self.trainers)
        return self.trainers[living[which % len(living)]] if living else None

    def _follow(self, trainer: Trainer) -> bool:
        """Whether it may send: it has heard of every rollback, as its heartbeats tell it."""
        if trainer.attempt < self.attempt:
            trainer.attempt, trainer.round = self.attempt, self.resume + 1
            trainer.pushed, trainer.pulled = set(), set()
        return True

    @rule(which=st.integers(0, 9), to=st.integers(0, 9))
    def push(self, which: int, to: int) -> None:
        trainer = self._trainer(which)
        if trainer is not None:
            self._push(trainer, to % len(self.pservers))

    def _push(self, trainer: Trainer, index: int) -> bool:
        pserver = self.pservers[index]
        self._follow(trainer)
        if not pserver.is_up or pserver.attempt != trainer.attempt or not self._has_begun(trainer):
            return False
        try:
            admission = pserver.rounds.admit(trainer.rank, trainer.incarnation, trainer.round)
        except StaleTrainer:
            return False
        if admission == "open":
            payload = f"{trainer.rank}/{trainer.incarnation}"
            pserver.rounds.blocks_arrived(trainer.rank, {"b": payload}, 1, NUMBERS, trainer.round)
        trainer.pushed.add(index)
        return True

    def _has_begun(self, trainer: Trainer) -> bool:
        if not trainer.has_begun:
            trainer.has_begun = 0 < trainer.round <= min(p.rounds.applied for p in self.pservers) + 1
        return trainer.has_begun

    @rule(which=st.integers(0, 9), to=st.integers(0, 9))
    def barrier(self, which: int, to: int) -> None:
        trainer = self._trainer(which)
        if trainer is not None and len(trainer.pushed) == len(self.pservers):
            self._barrier(trainer, to % len(self.pservers))

    def _barrier(self, trainer: Trainer, index: int) -> None:
        """The barrier rides on the get: if the round is applied, it is pulled."""
        pserver = self.pservers[index]
        self._follow(trainer)
        if not pserver.is_up or pserver.attempt != trainer.attempt or len(trainer.pushed) < len(self.pservers):
            return
        rounds, round_ = pserver.rounds, trainer.round
        try:
            if rounds.admit(trainer.rank, trainer.incarnation, round_) == "open" and not rounds.is_complete(
                trainer.rank, round_
            ):
                assert self._push(trainer, index)  # contribution_missing: the same bytes again
            pserver.settle(rounds.batch_barrier_arrived(trainer.rank, trainer.incarnation, round_))
        except StaleTrainer:
            return
        if rounds.applied >= round_:
            trainer.pulled.add(index)
        if len(trainer.pulled) == len(self.pservers):
            trainer.round, trainer.pushed, trainer.pulled = round_ + 1, set(), set()

    @rule(which=st.integers(0, 9))
    def kill_trainer(self, which: int) -> None:
        trainer = self._trainer(which)
        if trainer is not None:
            del self.trainers[trainer.rank]
            if self.take_over:
                self.awaited.add(trainer.rank)
            self.is_dirty = True

    @rule(rank=st.integers(0, MAX_TRAINERS - 1))
    def start_trainer(self, rank: int) -> None:
        if rank in self.trainers or (rank not in self.lives and rank not in self.membership.members):
            return
        self.lives[rank] += 1
        self.trainers[rank] = Trainer(rank, self.lives[rank], -1, self.attempt, has_begun=False)
        self.is_dirty = True

    # ------------------------------------------------------------ pservers

    @rule(which=st.integers(0, 9))
    def restart_pserver(self, which: int) -> None:
        pserver = self.pservers[which % len(self.pservers)]
        applied = pserver.rounds.applied
        participants = {r: ranks for r, ranks in pserver.history.items() if applied - self.max_delay <= r <= applied}
        pserver.rounds = Rounds({}, self.max_delay, applied=applied, history=History(participants))
        pserver.is_up, pserver.number = False, 0
        self.is_dirty = True

    # ------------------------------------------------------------ the coordinator

    def _targets(self) -> dict[int, int]:
        targets = {}
        for rank in range(MAX_TRAINERS):
            if rank in self.trainers:
                targets[rank] = self.trainers[rank].incarnation
            elif rank in self.awaited and rank in self.membership.members:
                targets[rank] = self.membership.members[rank]
        return targets

    @precondition(lambda self: self.is_dirty or self.change is not None)
    @rule(which=st.integers(0, 9), crash=st.booleans())
    def go_on_with_the_change(self, which: int, crash: bool) -> None:
        """One step of it: freeze one, decide, or install one. The coordinator may forget all but its decision."""
        self._step_change(which, crash=crash and which == 0)

    def _step_change(self, which: int, *, crash: bool = False) -> None:
        if crash or self.change is None or (self.is_dirty and self.change.to_install is not None):
            self.number += 1
            self.change, self.is_dirty = Change(self.number, self._targets()), False
            return
        change = self.change
        index = which % len(self.pservers)
        if change.to_install is None:
            missing = [i for i in range(len(self.pservers)) if i not in change.answers]
            if missing:
                self._freeze(change, missing[which % len(missing)])
            else:
                self._decide(change)
        elif change.to_install:
            self._install(change, sorted(change.to_install)[index % len(change.to_install)])
        else:
            self.change = None

    def _freeze(self, change: Change, index: int) -> None:
        pserver = self.pservers[index]
        if pserver.attempt != self.attempt:  # it has missed a rollback
            change.answers[index] = FrozenRounds(applied=self.resume)
        elif pserver.is_up:
            change.answers[index] = pserver.rounds.freeze()
        else:
            change.answers[index] = FrozenRounds(
                applied=pserver.rounds.applied, participants=pserver.rounds.history.participants
            )

    def _decide(self, change: Change) -> None:
        answers = [change.answers[i] for i in range(len(self.pservers))]
        if self.is_dirty:  # a pserver has died meanwhile, so that its answer is worth nothing: once more
            self.change = None
            return
        take_over = set(self.awaited) if self.take_over else set()
        decision = decide(self.membership, change.targets, answers, max_delay=self.max_delay, take_over=take_over)
        if isinstance(decision, Rollback):
            ranges = [[(0, p.rounds.applied)] for p in self.pservers]
            round_ = newest_common(decision.newest, ranges)
            assert round_ is not None
            self.attempt, self.resume = self.attempt + 1, round_
            decision = Membership(dict(change.targets))
        self.membership = decision
        self.awaited -= {rank for rank, life in decision.members.items() if self._lives_as(rank, life)}
        for trainer in self.trainers.values():
            if decision.members.get(trainer.rank) == trainer.incarnation and trainer.round < 0:
                trainer.round = decision.starts.get(trainer.rank, self.resume + 1)
                trainer.attempt = self.attempt
        change.to_install = set(range(len(self.pservers)))

    def _lives_as(self, rank: int, life: int) -> bool:
        return rank in self.trainers and self.trainers[rank].incarnation == life

    def _install(self, change: Change, index: int) -> None:
        pserver, decided = self.pservers[index], self.membership
        if pserver.attempt != self.attempt:
            pserver.history = {r: ranks for r, ranks in pserver.history.items() if r <= self.resume}
            newest = {r: s for r, s in pserver.history.items() if r >= self.resume - self.max_delay}
            pserver.rounds = Rounds({}, self.max_delay, applied=self.resume, history=History(newest))
            pserver.attempt = self.attempt
        assert change.to_install is not None
        pserver.settle(pserver.rounds.members_changed(decided.members, decided.starts, decided.sets))
        pserver.is_up, pserver.number = True, change.number
        change.to_install.discard(index)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_pservers_apply_the_same(self) -> None:
        for one in self.pservers:
            for other in self.pservers:
                if one.attempt == other.attempt:
                    for round_ in one.history.keys() & other.history.keys():
                        assert one.history[round_] == other.history[round_], f"round {round_}"

    @invariant()
    def applied_rounds_are_close(self) -> None:
        """Rounds that were decided to be empty are passed over at once, so that they do not count."""
        stepped = [sum(map(bool, p.history.values())) for p in self.pservers if p.attempt == self.attempt]
        assert not stepped or max(stepped) - min(stepped) <= self.max_delay + 1

    def teardown(self) -> None:
        """If nothing more dies, whoever was lost comes back, and everybody does what is due, three rounds follow."""
        if not hasattr(self, "pservers"):
            return
        for rank in sorted(self.lives):
            self.start_trainer(rank)
        for _ in range(40):
            if not self.is_dirty and self.change is None:
                break
            self._step_change(1)
        before = min(p.rounds.applied for p in self.pservers)
        for _ in range(60):
            for trainer in self.trainers.values():
                for index in range(len(self.pservers)):
                    if index not in trainer.pushed:
                        self._push(trainer, index)
                for index in range(len(self.pservers)):
                    if index not in trainer.pulled:
                        self._barrier(trainer, index)
        after = min(p.rounds.applied for p in self.pservers)
        assert after >= before + 3, (self.pservers, self.trainers, self.membership)
        self.all_pservers_apply_the_same()


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
