"""Freeze, decide and install in random walks: all pservers apply the same sets under any faults.

The real `Rounds` of every pserver and the real `Run` of the coordinator with its decisions, driven in arbitrary
interleavings. The test carries out the coordinator's changes, which may be cut off anywhere. A pserver that dies keeps
what it has applied (the log) and loses what was staged; a trainer that is asked for a round's bytes again still has
them until it has pulled the round from all pservers. A silent trainer may still send, return, or have a successor that
sends as well. Messages of the coordinator may arrive at any later time, and more than once.

A trainer sends its batch barrier once to each incarnation of a pserver, with its verdict on the gradient, and rarely
again. Where gradients are clipped, a trainer asks every pserver for its norm before a get brings the sum to each of
them, one after the other, with anything in between.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, TrainerLost
from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.messages import Leave, TrainerHeartbeat
from ps_protocol.norms import AgreedNorm, ShardNorm, agree
from ps_protocol.optimizers import HyperParameters
from ps_protocol.requests import Completion
from services.coordinator.state.decision import Rollback, decide_change, decide_rollback, newest_common
from services.coordinator.state.joining import declare_model, join_run, start_run
from services.coordinator.state.losses import leave_run, lose_trainer, note_heartbeat
from services.coordinator.state.record import Decision
from services.coordinator.state.run import Run
from services.pserver.run.membership_changes import MembershipChanges
from services.pserver.run.staging import Push
from services.pserver.run.synchronous.rounds import Measure, Rounds
from services.pserver.shard.history import History

from ..soaking import examples
from .coordinator.support import defaults, joining, model

NUMBERS: list[HyperParameters] = [{"lr": 0.1}]
MAX_TRAINERS = 3
LOST = -1  # the attempt of a pserver that has lost rounds, until members are installed


def find_nonfinite(round_: int, lives: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks of a round whose gradients hold NaN or infinity; `lives` are the incarnations by rank."""
    return tuple(rank for rank, life in lives.items() if (round_ + rank + life) % 3 == 0)


@dataclass
class Pserver:
    rounds: Rounds[int]
    attempt: int = 0
    history: dict[int, dict[int, int]] = field(default_factory=dict)  # by round: which life of each rank is in it
    norms: dict[int, ShardNorm] = field(default_factory=dict)  # by round, where gradients are clipped: what was told
    totals: dict[int, float] = field(default_factory=dict)  # and what it was clipped by
    changes: MembershipChanges = field(default_factory=MembershipChanges)
    life: int = 1
    is_up: bool = True  # else it holds what is on its disk, and serves nothing

    def wait_for_writes(self, order: object, norm: ShardNorm | None = None) -> None:
        """Applies are done at once, and what follows from them, up to a round that waits for its norm."""
        while order is not None and not isinstance(order, Measure):
            following = self.rounds.applying
            lives = {}
            for rank, contribution in zip(following.ranks, following.contributions, strict=True):
                assert contribution.is_complete, f"half of trainer {rank} would be applied"
                lives[rank] = contribution.blocks["b"]
            assert following.nonfinite == find_nonfinite(following.round, lives)
            self.history[following.round] = lives
            if norm is not None:
                self.norms[following.round] = norm
            order, norm = self.rounds.finish_apply(norm), None

    def norm_of(self, round_: int, index: int) -> ShardNorm | None:
        """Return the norm of a complete round, whose sum identifies the incarnations in it and the pserver.

        Return None if the round is not complete, or was empty.
        """
        if round_ <= self.rounds.applied:
            return self.rounds.history.norms.get(round_)
        measured = self.rounds.measuring
        if measured is None or measured.round != round_:
            return None
        lives = (contribution.blocks["b"] for contribution in measured.contributions)
        return ShardNorm(repr(measured.identity), float(100 * index + sum(lives)))

    def take_norm(self, round_: int, index: int, norm: AgreedNorm) -> bool:
        """Accept the norm of a get; return whether it matches the measured round, unless that is applied."""
        own = self.norm_of(round_, index)
        if own is None or not norm.own.is_same(own):
            return round_ <= self.rounds.applied
        if self.rounds.measuring is not None and round_ > self.rounds.applied:
            self.totals[round_] = norm.total
            self.wait_for_writes(self.rounds.accept_norm(), own)
        return True

    def restore(self, applied: int, max_delay: int) -> None:
        """Restore the state on the disk: all rounds up to `applied`."""
        for known in (self.history, self.norms, self.totals):
            for round_ in [round_ for round_ in known if round_ > applied]:
                del known[round_]
        newest = range(applied - max_delay, applied + 1)
        participants = {r: tuple(lives) for r, lives in self.history.items() if r in newest}
        nonfinite = {r: ranks for r in participants if (ranks := find_nonfinite(r, self.history[r]))}
        norms = {r: norm for r, norm in self.norms.items() if r in newest}
        history = History(participants, nonfinite, norms=norms)
        self.rounds = Rounds({}, max_delay, applied=applied, history=history, clips=self.rounds.clips)


@dataclass
class Trainer:
    rank: int
    incarnation: int
    round: int  # that it works on
    attempt: int
    pushed: set[int] = field(default_factory=set)  # pservers that have acknowledged every push
    counted: dict[int, int] = field(default_factory=dict)  # by pserver: its life when the batch barrier reached it
    pulled: set[int] = field(default_factory=set)
    norms: dict[int, ShardNorm | None] = field(default_factory=dict)  # by pserver; None: it is over there without one
    finished: int = 0  # rounds before its first
    has_begun: bool = True  # a joining trainer begins once it has pulled the round before its first


@dataclass
class Change:
    number: int
    targets: dict[int, int]
    lives: list[int]  # of the pservers that it froze
    answers: dict[int, FrozenRounds] = field(default_factory=dict)
    to_install: set[int] | None = None  # None: not decided yet


@dataclass
class Sent:
    """A freeze, or without it an installation, as it was sent to one pserver."""

    index: int
    life: int
    number: int
    attempt: int
    resume: int
    decided: Membership | None = None


class Faults(RuleBasedStateMachine):
    """`take_over` is policy `wait`; without it `continue`, where fewer than `min_trainers` wait for who was lost."""

    @initialize(
        num_trainers=st.integers(1, MAX_TRAINERS), num_pservers=st.integers(1, 3), max_delay=st.integers(0, 1),
        take_over=st.booleans(), min_trainers=st.integers(1, MAX_TRAINERS), clips=st.booleans(),
    )  # fmt: skip
    def begin(
        self,
        num_trainers: int,
        num_pservers: int,
        max_delay: int,
        take_over: bool,
        min_trainers: int,
        clips: bool,
    ) -> None:
        members = dict.fromkeys(range(num_trainers), 1)
        self.max_delay, self.take_over, self.clips, self.num_trainers = max_delay, take_over, clips, num_trainers
        policy = {"on_trainer_loss": "wait" if take_over else "continue", "min_trainers": min_trainers}
        self.settings = defaults(num_trainers, consistency=Consistency(max_delay=max_delay)).model_copy(update=policy)
        run, self.num_processes = Run.begin("run1", self.settings, {}), num_trainers
        for rank in members:
            run = declare_model(join_run(run, joining(str(rank), rank), 0), rank, model())
        run = start_run(run, dict.fromkeys(range(num_pservers), 1), None, 0).begin_training(0)
        self.run = self.before = run.finish_change(run.record.change_number)
        self.pservers = [Pserver(Rounds(members, max_delay, clips=clips)) for _ in range(num_pservers)]
        self.trainers = {
            rank: Trainer(rank, 1, 1, 0) for rank in members
        }  # those whose heartbeats the coordinator receives
        self.silent: list[Trainer] = []  # lost trainers, whose requests may still arrive
        self.ended: dict[
            tuple[int, int], int
        ] = {}  # by round and rank: the incarnation that pulled it from all pservers
        self.change: Change | None = None
        self.sent: deque[Sent] = deque(maxlen=12)

    @property
    def attempt(self) -> int:
        return self.run.record.attempt

    @property
    def resume(self) -> int:
        return self.run.record.base_round or 0

    @property
    def _has_lost_rounds(self) -> bool:
        return any(pserver.attempt == LOST for pserver in self.pservers)

    # ------------------------------------------------------------ trainers

    def _trainer(self, which: int) -> Trainer | None:
        living = [*self.trainers.values(), *self.silent]
        return living[which % len(living)] if living else None

    def _follow(self, trainer: Trainer) -> None:
        """Let a trainer learn of a rollback by its heartbeat. A newcomer learns its attempt with its first round."""
        if trainer.round >= 0 and trainer.attempt < self.attempt and self.trainers.get(trainer.rank) is trainer:
            trainer.attempt, trainer.round = self.attempt, self.resume + 1
            trainer.pushed, trainer.counted, trainer.pulled, trainer.norms = set(), {}, set(), {}

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
        except Conflict:
            return False
        if admission == "open":
            pserver.rounds.stage(trainer.rank, trainer.round, Push({"b": trainer.incarnation}, Completion(1, NUMBERS)))
        trainer.pushed.add(index)
        return True

    def _has_begun(self, trainer: Trainer) -> bool:
        if not trainer.has_begun and trainer.round > 0:
            if self.clips:
                self._finish_rounds(trainer)
            trainer.has_begun = trainer.round <= min(p.rounds.applied for p in self.pservers) + 1
            trainer.norms = {} if trainer.has_begun else trainer.norms
        return trainer.has_begun

    def _finish_rounds(self, trainer: Trainer) -> None:
        """Send the norms of earlier rounds in their order, since the trainers of these rounds may be lost."""
        for round_ in range(max(1, trainer.round - 2 - 2 * self.max_delay), trainer.round):
            if round_ > trainer.finished:
                brought = [self._bring_norm(trainer, index, round_) for index in range(len(self.pservers))]
                if not all(brought):
                    break
                trainer.finished, trainer.norms = round_, {}

    @rule(which=st.integers(0, 9), to=st.integers(0, 9))
    def barrier(self, which: int, to: int) -> None:
        trainer = self._trainer(which)
        if trainer is not None and len(trainer.pushed) == len(self.pservers):
            trainer.counted.pop(to % len(self.pservers), None)  # it may come once more
            self._barrier(trainer, to % len(self.pservers))

    def _barrier(self, trainer: Trainer, index: int) -> None:
        """The barrier rides on the get: if the round is applied, it is pulled."""
        pserver = self.pservers[index]
        self._follow(trainer)
        if not pserver.is_up or pserver.attempt != trainer.attempt or len(trainer.pushed) < len(self.pservers):
            return
        rounds, round_ = pserver.rounds, trainer.round
        try:
            admission = rounds.admit(trainer.rank, trainer.incarnation, round_)
            if admission == "open" and trainer.counted.get(index) != pserver.life:
                if not rounds.is_complete(trainer.rank, round_):
                    assert self._push(trainer, index)  # contribution_missing: the same bytes again
                trainer.counted[index] = pserver.life
                is_finite = not find_nonfinite(round_, {trainer.rank: trainer.incarnation})
                pserver.wait_for_writes(
                    rounds.count_batch_barrier(trainer.rank, trainer.incarnation, round_, is_finite=is_finite)
                )
        except Conflict:
            return
        if self.clips and not self._bring_norm(trainer, index, round_):
            return
        if rounds.applied >= round_:
            trainer.pulled.add(index)
        if len(trainer.pulled) == len(self.pservers):
            if trainer.attempt == self.attempt:  # else a rollback has undone the round, and the trainer may not know it
                self.ended[round_, trainer.rank] = trainer.incarnation
            trainer.round = round_ + 1
            trainer.pushed, trainer.counted, trainer.pulled, trainer.norms = set(), {}, set(), {}

    def _bring_norm(self, trainer: Trainer, index: int, round_: int) -> bool:
        """Ask one pserver for its norm, or once all have been asked bring it the sum; whether it was, and is taken."""
        if len(trainer.norms) < len(self.pservers):
            for asked in {index, *trainer.pulled}:  # the latter are asked again if it has changed elsewhere
                self._ask_norm(trainer, asked, round_)
            return False
        norms = [trainer.norms[index] for index in range(len(self.pservers))]
        if None in norms:
            return True
        agreed = agree([norm for norm in norms if norm is not None])
        if agreed is not None:
            if not self._may_get(trainer, index, round_):
                return False
            if self.pservers[index].take_norm(round_, index, agreed[index]):
                return True
        trainer.norms = {}
        return False

    def _ask_norm(self, trainer: Trainer, index: int, round_: int) -> None:
        if self._may_get(trainer, index, round_):
            norm = self.pservers[index].norm_of(round_, index)
            if norm is not None or round_ <= self.pservers[index].rounds.applied:
                trainer.norms[index] = norm

    def _may_get(self, trainer: Trainer, index: int, round_: int) -> bool:
        pserver = self.pservers[index]
        if not pserver.is_up or pserver.attempt != trainer.attempt:
            return False
        try:
            pserver.rounds.admit_get(trainer.rank, trainer.incarnation, round_)
        except Conflict:
            return False
        return True

    @rule(slow=st.integers(0, MAX_TRAINERS))
    def take_steps(self, slow: int) -> None:
        """All but one go as far as they can, or really all: else few rounds would ever end."""
        for trainer in [*self.trainers.values(), *self.silent]:
            if trainer.rank != slow:
                self._take_step(trainer)

    def _take_step(self, trainer: Trainer) -> None:
        for index in range(len(self.pservers)):
            if index not in trainer.pushed:
                self._push(trainer, index)
        for index in range(len(self.pservers)):
            if index not in trainer.pulled:
                self._barrier(trainer, index)
        if self.trainers.get(trainer.rank) is trainer:
            self._send_heartbeat(trainer)

    @rule(which=st.integers(0, 9))
    def kill_trainer(self, which: int) -> None:
        trainer = self._trainer(which)
        if trainer is not None:
            if trainer not in self.silent:
                self._lose(trainer)
            self.silent.remove(trainer)

    @rule(which=st.integers(0, 9))
    def lose_trainer(self, which: int) -> None:
        """Its lease ends, or the round's time, but it lives."""
        if self.trainers and len(self.silent) < MAX_TRAINERS:
            self._lose([*self.trainers.values()][which % len(self.trainers)])

    def _lose(self, trainer: Trainer) -> None:
        del self.trainers[trainer.rank]
        self.silent.append(trainer)
        known = self.run.record.trainers[trainer.rank]
        self.run = lose_trainer(self.run, trainer.rank, TrainerLost(f"trainer {trainer.rank} was lost"), 0)
        if known.is_awaited and not known.has_declared:
            assert self.run.record.trainers[trainer.rank].is_awaited, "the next process must get the place"

    @rule(which=st.integers(0, 9))
    def send_heartbeat(self, which: int) -> None:
        """A silent trainer gets its place back while it is free and the run has not gone on without it."""
        trainer = self._trainer(which)
        if trainer is not None:
            self._send_heartbeat(trainer)

    def _send_heartbeat(self, trainer: Trainer) -> None:
        round_ = max(trainer.round - 1, 0)
        message = TrainerHeartbeat(run="run1", incarnation=trainer.incarnation, round=round_, attempt=trainer.attempt)
        known = self.run.record.trainers[trainer.rank]
        try:
            self.run = note_heartbeat(self.run, trainer.rank, message, 0)
        except Conflict:
            assert trainer in self.silent
            return
        if trainer in self.silent:
            assert known.is_awaited or not known.has_declared, "the run continues without it"
            self.silent.remove(trainer)
            self.trainers[trainer.rank] = trainer
            self._admit_newcomers()

    @rule(which=st.integers(0, 9))
    def fail_silently(self, which: int) -> None:
        """A lost trainer reports its failure, which does not remove a later incarnation."""
        if self.silent:
            trainer = self.silent[which % len(self.silent)]
            message = Leave(run="run1", incarnation=trainer.incarnation, outcome="failed")
            with suppress(Conflict):
                self.run = leave_run(self.run, trainer.rank, message, 0)

    @rule(rank=st.integers(0, MAX_TRAINERS - 1), declares=st.booleans())
    def start_trainer(self, rank: int, declares: bool) -> None:
        """A process takes a free rank, and declares its model at once or when this is called again."""
        if rank >= self.num_trainers:
            return
        if rank not in self.trainers:
            self.num_processes += 1
            self.run = join_run(self.run, joining(str(self.num_processes), rank), 0)
            incarnation = self.run.record.trainers[rank].incarnation
            self.trainers[rank] = Trainer(rank, incarnation, -1, self.attempt, has_begun=False)
        if declares and self.run.record.trainers[rank].state == "joined":
            self.run = declare_model(self.run, rank, model(self.trainers[rank].incarnation))

    # ------------------------------------------------------------ pservers

    @rule(which=st.integers(0, 9), loses=st.booleans())
    def restart_pserver(self, which: int, loses: bool) -> None:
        """With `loses` its disk has none of the attempt's rounds, one of which a trainer is known to have received."""
        pserver = self.pservers[which % len(self.pservers)]
        if loses and self.run.newest_confirmed > self.resume:
            pserver.attempt = LOST
        pserver.restore(self.resume if pserver.attempt == LOST else pserver.rounds.applied, self.max_delay)
        pserver.is_up, pserver.changes = False, MembershipChanges()
        pserver.life += 1
        self.run = self.run.with_change()

    # ------------------------------------------------------------ the coordinator

    @rule(back=st.integers(0, 3))
    def request_rollback(self, back: int) -> None:
        applied = [pserver.rounds.applied for pserver in self.pservers if pserver.attempt == self.attempt]
        if len(applied) == len(self.pservers):
            self.run = self.run.request_rollback(max(0, min(applied) - back))

    @precondition(lambda self: self.run.is_changing or self.change is not None)
    @rule(which=st.integers(0, 9), crash=st.booleans())
    def go_on_with_the_change(self, which: int, crash: bool) -> None:
        """One step of it: freeze one, decide, or install one. The coordinator may forget all but its record."""
        if crash and which == 0 and not self._has_lost_rounds:  # else trainers would have to report what was lost
            incarnations = self.run.incarnations
            self.run, self.change = Run.begin("run1", self.settings, incarnations).restore(self.run.durable, 0), None
        self._step_change(which)

    @rule()
    def end_the_change(self) -> None:
        """Or make one more of the same members: whole changes follow each other in the middle of a round."""
        self._step_change(0)
        for _ in range(4 * len(self.pservers) + 6):  # one that has to be made again is the longest
            if self.change is not None:
                self._step_change(0)

    def _step_change(self, which: int) -> None:
        is_outdated = self.change is not None and self.run.record.change_number > self.change.number
        if self.change is None or (is_outdated and self.change.to_install):
            self.run = (
                self.run.with_change()
            )  # also where the members are the same: every change has a number of its own
            lives = [pserver.life for pserver in self.pservers]
            self.change = Change(self.run.record.change_number, self.run.record.targets, lives)
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
            self.change, self.run = None, self.run.finish_change(change.number)
            for trainer in self.run.record.trainers.values():
                if trainer.state == "declared" and self.run.installed.members.get(trainer.rank) == trainer.incarnation:
                    assert not trainer.is_awaited, "the pservers have installed it"
            self._admit_newcomers()

    def _freeze(self, change: Change, index: int) -> None:
        self.sent.append(Sent(index, 0, change.number, self.attempt, self.resume))
        answer = self._frozen(self.sent[-1])
        assert answer is not None
        change.answers[index] = answer

    def _frozen(self, freeze: Sent) -> FrozenRounds | None:
        pserver = self.pservers[freeze.index]
        try:
            pserver.changes.begin_change(freeze.number)
        except Conflict:
            return None
        if pserver.attempt != freeze.attempt:  # it has missed a rollback
            return FrozenRounds(applied=freeze.resume)
        if pserver.is_up:
            return pserver.rounds.freeze()
        history = pserver.rounds.history
        return FrozenRounds(
            applied=pserver.rounds.applied, participants=history.participants, verdicts=history.nonfinite
        )

    @rule(which=st.integers(0, 11))
    def old_message(self, which: int) -> None:
        """It comes once more, or for the first time."""
        if self.sent:
            self._arrive(self.sent[which % len(self.sent)])

    def _arrive(self, message: Sent) -> bool:
        if message.decided is None:
            return self._frozen(message) is not None
        return self._installed_at(message, message.decided)

    @rule(which=st.integers(0, 9), num_told=st.integers(0, 2), loses=st.booleans())
    def late_installation(self, which: int, num_told: int, loses: bool) -> None:
        """It gets no answer in time, unlike some others, and arrives when the change has been decided once more."""
        self._decide_the_change()
        if self.change is None or not self.change.to_install:
            return
        late, *others = sorted(self.change.to_install, key=lambda index: (index - which) % len(self.pservers))
        message = self._send_installation(self.change, late)
        for index in others[:num_told]:
            if self.change is not None:
                self._install(self.change, index)
        self._repeat_change()
        if loses:
            self.lose_trainer(which)
        self._decide_the_change()
        self._arrive(message)

    def _decide_the_change(self) -> None:
        for _ in range(2 * len(self.pservers) + 4):
            if self.change is None or self.change.to_install is None:
                self._step_change(0)

    def _repeat_change(self) -> None:
        self.change, self.run = None, self.run.with_change()

    def _decide(self, change: Change) -> None:
        if change.lives != [pserver.life for pserver in self.pservers]:  # the answer of one that died is worth nothing
            self._repeat_change()
            return
        answers = {index: (change.lives[index], change.answers[index]) for index in range(len(self.pservers))}
        for answer in change.answers.values():
            self.run = self.run.note_applied(self.attempt, answer.applied)
        decision = decide_change(self.run, change.targets, answers)
        if isinstance(decision, Rollback):
            ranges = {index: [(0, pserver.rounds.applied)] for index, pserver in enumerate(self.pservers)}
            round_ = newest_common(decision.newest, ranges.values())
            decision = decide_rollback(self.run, change.targets, decision, round_, ranges)
            assert isinstance(decision, Decision), decision
            assert decision.attempt == self.attempt + 1
            self.ended = {(r, rank): life for (r, rank), life in self.ended.items() if r <= (round_ or 0)}
        assert decision.membership.members == change.targets
        self.run = self.run.propose(decision)
        assert self.run.durable.membership == decision.membership
        self.run = self.run.apply_decision(decision)
        change.to_install = set(range(len(self.pservers)))

    def _admit_newcomers(self) -> None:
        """Let trainers that every pserver has installed learn where they begin."""
        members, starts = self.run.installed.members, self.run.record.membership.starts
        for trainer in self.trainers.values():
            if members.get(trainer.rank) == trainer.incarnation and trainer.round < 0:
                trainer.round, trainer.attempt = starts.get(trainer.rank, self.resume + 1), self.attempt

    def _install(self, change: Change, index: int) -> None:
        message = self._send_installation(change, index)
        if (
            self._installed_at(message, self.run.record.membership)
            or self.pservers[index].changes.ended == change.number
        ):
            change.to_install.discard(index)
        else:  # this change is refused: another one is begun
            self._repeat_change()

    def _send_installation(self, change: Change, index: int) -> Sent:
        life = self.pservers[index].life
        self.sent.append(Sent(index, life, change.number, self.attempt, self.resume, self.run.record.membership))
        return self.sent[-1]

    def _installed_at(self, message: Sent, decided: Membership) -> bool:
        pserver = self.pservers[message.index]
        is_ours = message.life == pserver.life and message.attempt >= pserver.attempt
        if not is_ours or not pserver.changes.is_current(message.number):
            return False
        if pserver.attempt != message.attempt:
            pserver.restore(message.resume, self.max_delay)
            pserver.attempt = message.attempt
        pserver.changes.end_change(message.number)
        pserver.wait_for_writes(pserver.rounds.install_members(decided))
        pserver.is_up = True
        return True

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_pservers_apply_the_same(self) -> None:
        for one in self.pservers:
            for other in self.pservers:
                if one.attempt == other.attempt:
                    for round_ in one.history.keys() & other.history.keys():
                        assert one.history[round_] == other.history[round_], f"round {round_}"
                        assert one.totals.get(round_) == other.totals.get(round_), f"round {round_}"

    @invariant()
    def a_trainer_that_completed_a_round_is_in_it(self) -> None:
        for pserver in self.pservers:
            for (round_, rank), life in self.ended.items() if pserver.attempt != LOST else ():
                assert pserver.history[round_].get(rank) == life, f"trainer {rank} in round {round_}"

    @invariant()
    def who_is_awaited_is_in_every_round(self) -> None:
        for pserver in self.pservers if self.take_over else []:
            for round_, lives in pserver.history.items():
                assert lives.keys() == set(range(self.num_trainers)), f"round {round_}"

    @invariant()
    def a_run_that_continues_waits_only_below_its_minimum_of_trainers(self) -> None:
        if hasattr(self, "run") and not self.take_over:
            awaited = [trainer.rank for trainer in self.run.record.awaited if trainer.has_declared]
            assert not awaited or self.run.record.num_declared < self.settings.min_trainers

    @invariant()
    def the_run_is_consistent(self) -> None:
        if not hasattr(self, "run"):
            return
        run, record, before = self.run, self.run.record, self.before
        assert record.members == {rank: trainer.incarnation for rank, trainer in self.trainers.items()}
        assert record.change_number >= before.record.change_number
        assert all(run.incarnations[rank] >= newest for rank, newest in before.incarnations.items())
        assert run.installed.number <= record.change_number
        applied = [pserver.rounds.applied for pserver in self.pservers if pserver.attempt == self.attempt]
        assert self._has_lost_rounds or run.newest_applied <= max([self.resume, *applied])
        if not run.is_changing and run.installed.number:
            assert run.installed.members == record.membership.members == record.targets
        if self.take_over:
            assert {t.rank for t in record.awaited} == set(range(self.num_trainers)) - record.members.keys()
        for rank, incarnation in record.targets.items():
            trainer = record.trainers[rank]
            assert trainer.incarnation == incarnation or trainer.is_awaited, "the target has left"
        self.before = run

    @invariant()
    def applied_rounds_are_close(self) -> None:
        """Rounds that were decided to be empty are passed over at once, so that they do not count."""
        stepped = [sum(map(bool, p.history.values())) for p in self.pservers if p.attempt == self.attempt]
        assert not stepped or max(stepped) - min(stepped) <= self.max_delay + 1

    def teardown(self) -> None:
        """Complete three rounds after all lost processes have come back without further faults."""
        if not hasattr(self, "pservers"):
            return
        for rank in range(self.num_trainers):
            self.start_trainer(rank, declares=True)
        for _ in range(40):
            if not self.run.is_changing and self.change is None:
                break
            self._step_change(1)
        before = min(p.rounds.applied for p in self.pservers)
        for _ in range(60):
            for trainer in self.trainers.values():
                self._take_step(trainer)
        after = min(p.rounds.applied for p in self.pservers)
        assert after >= before + 3, (self.pservers, self.trainers, self.run.record.membership)
        self.all_pservers_apply_the_same()


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)


def walk(seed: int) -> None:
    """Many more rounds and changes than hypothesis makes, which leaves rules out and begins small."""
    chance = random.Random(seed)
    faults = Faults()
    max_delay, take_over, min_trainers = chance.choice((0, 0, 1)), chance.random() < 0.5, chance.choice((1, 1, 2, 3))
    num_trainers, num_pservers, clips = chance.randint(2, 3), chance.randint(1, 3), chance.random() < 0.5
    faults.begin(num_trainers, num_pservers, max_delay, take_over, min_trainers, clips)

    def which() -> int:
        return chance.randrange(10)

    actions: list[tuple[int, Callable[[], None]]] = [
        (8, lambda: faults.push(which(), which())),
        (8, lambda: faults.barrier(which(), which())),
        (8, lambda: faults.take_steps(chance.randint(0, MAX_TRAINERS))),
        (2, lambda: faults.kill_trainer(which())),
        (2, lambda: faults.lose_trainer(which())),
        (2, lambda: faults.send_heartbeat(which())),
        (1, lambda: faults.fail_silently(which())),
        (4, lambda: faults.start_trainer(chance.randrange(MAX_TRAINERS), chance.random() < 0.6)),
        (1, lambda: faults.restart_pserver(which(), chance.random() < 0.3)),
        (1, lambda: faults.request_rollback(chance.randint(0, 3))),
        (6, lambda: faults.go_on_with_the_change(which(), chance.random() < 0.5)),
        (4, lambda: faults.end_the_change()),
        (2, lambda: faults.old_message(which())),
        (2, lambda: faults.late_installation(which(), chance.randint(0, 2), chance.random() < 0.7)),
    ]
    for action in chance.choices([action for _, action in actions], [weight for weight, _ in actions], k=80):
        action()
        faults.the_run_is_consistent()
        faults.all_pservers_apply_the_same()
        faults.applied_rounds_are_close()
        faults.a_trainer_that_completed_a_round_is_in_it()
        faults.who_is_awaited_is_in_every_round()
        faults.a_run_that_continues_waits_only_below_its_minimum_of_trainers()
    faults.teardown()


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
