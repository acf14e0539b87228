"""A run whose pservers and trainers may die, return or fall silent at any time, and the changes of its members.

The `Rounds` of every pserver, and the `Run` of the coordinator with its decisions, are the real ones. See
test_membership_changes.py for what is simulated.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, TrainerLost
from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.messages import Leave, TrainerHeartbeat
from ps_protocol.norms import agree
from ps_protocol.optimizers import HyperParameters
from ps_protocol.requests import Completion
from services.coordinator.state.decision import Rollback, decide_change, decide_rollback, newest_common
from services.coordinator.state.joining import declare_model, join_run, start_run
from services.coordinator.state.losses import leave_run, lose_trainer, note_heartbeat
from services.coordinator.state.record import Decision
from services.coordinator.state.run import Run
from services.pserver.run.rounds import Rounds
from services.pserver.run.staging import MembershipChanges, Push

from .coordinator.support import defaults, joining, model
from .simulated_members import LOST, Change, Pserver, Sent, Trainer, find_nonfinite

MAX_TRAINERS = 3
NUMBERS: list[HyperParameters] = [{"lr": 0.1}]


class ChangingRun:
    """`take_over` is policy `wait`; without it `continue`, where fewer than `min_trainers` wait for who was lost.

    Each event may happen at any time. `which` and `to` choose a process among those that exist.
    """

    def __init__(
        self,
        num_trainers: int,
        num_pservers: int,
        max_delay: int,
        take_over: bool,
        min_trainers: int,
        clips: bool,
    ) -> None:
        members = dict.fromkeys(range(num_trainers), 1)
        self.is_damaged = False  # a pserver has lost rounds since the newest rollback
        self.max_delay, self.take_over, self.clips, self.num_trainers = max_delay, take_over, clips, num_trainers
        policy = {
            "on_trainer_loss": "wait" if take_over else "continue",
            "min_trainers": min_trainers,
            "durability": "log",
        }
        self.settings = defaults(num_trainers, consistency=Consistency(max_delay=max_delay)).model_copy(update=policy)
        run, self.num_processes = Run.begin("run1", self.settings, {}), num_trainers
        for rank in members:
            run = declare_model(join_run(run, joining(str(rank), rank), 0), rank, model())
        run = start_run(run, dict.fromkeys(range(num_pservers), 1), None, 0).begin_training(0)
        self.run = run.finish_change(run.record.change_number)
        self.pservers = [Pserver(Rounds(members, max_delay, clips=clips)) for _ in range(num_pservers)]
        # Those whose heartbeats the coordinator receives.
        self.trainers = {rank: Trainer(rank, 1, 1, 0) for rank in members}
        self.silent: list[Trainer] = []  # lost trainers, whose requests may still arrive
        # The incarnation that has pulled a round from all pservers, by round and rank.
        self.ended: dict[tuple[int, int], int] = {}
        self.change: Change | None = None
        self.sent: deque[Sent] = deque(maxlen=12)

    @property
    def attempt(self) -> int:
        return self.run.record.attempt

    @property
    def resume(self) -> int:
        return self.run.record.base_round or 0

    @property
    def has_lost_rounds(self) -> bool:
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

    def barrier(self, which: int, to: int) -> None:
        trainer = self._trainer(which)
        if trainer is not None and to % len(self.pservers) in trainer.pushed:
            trainer.counted.pop(to % len(self.pservers), None)  # it may come once more
            self._barrier(trainer, to % len(self.pservers))

    def _barrier(self, trainer: Trainer, index: int) -> None:
        """The barrier rides on the get: if the round is applied, it is pulled."""
        pserver = self.pservers[index]
        self._follow(trainer)
        if not pserver.is_up or pserver.attempt != trainer.attempt or index not in trainer.pushed:
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

    def take_steps(self, slow: int) -> None:
        """All but one go as far as they can, or really all: else few rounds would ever end."""
        for trainer in [*self.trainers.values(), *self.silent]:
            if trainer.rank != slow:
                self.take_step(trainer)

    def take_step(self, trainer: Trainer) -> None:
        for index in range(len(self.pservers)):
            if index not in trainer.pushed:
                self._push(trainer, index)
        for index in range(len(self.pservers)):
            if index not in trainer.pulled:
                self._barrier(trainer, index)
        if self.trainers.get(trainer.rank) is trainer:
            self._send_heartbeat(trainer)

    def kill_trainer(self, which: int) -> None:
        trainer = self._trainer(which)
        if trainer is not None:
            if trainer not in self.silent:
                self._lose(trainer)
            self.silent.remove(trainer)

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

    def fail_silently(self, which: int) -> None:
        """A lost trainer reports its failure, which does not remove a later incarnation."""
        if self.silent:
            trainer = self.silent[which % len(self.silent)]
            message = Leave(run="run1", incarnation=trainer.incarnation, outcome="failed")
            with suppress(Conflict):
                self.run = leave_run(self.run, trainer.rank, message, 0)

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

    def restart_pserver(self, which: int, loses: bool) -> None:
        """With `loses` its disk has none of the attempt's rounds, one of which a trainer is known to have received."""
        pserver = self.pservers[which % len(self.pservers)]
        if loses and self.run.newest_confirmed > self.resume:
            pserver.attempt, self.is_damaged = LOST, True
        pserver.restore(self.resume if pserver.attempt == LOST else pserver.rounds.applied, self.max_delay)
        pserver.is_up, pserver.changes = False, MembershipChanges()
        pserver.life += 1
        self.run = self.run.with_change()

    # ------------------------------------------------------------ the coordinator

    def request_rollback(self, back: int) -> None:
        applied = [pserver.rounds.applied for pserver in self.pservers if pserver.attempt == self.attempt]
        if len(applied) == len(self.pservers):
            self.run = self.run.request_rollback(max(0, min(applied) - back))

    def go_on_with_the_change(self, which: int, crash: bool) -> None:
        """One step of it: freeze one, decide, or install one. The coordinator may forget all but its record."""
        if crash and which == 0 and not self.has_lost_rounds:  # else trainers would have to report what was lost
            incarnations = self.run.incarnations
            self.run, self.change = Run.begin("run1", self.settings, incarnations).restore(self.run.record, 0), None
        self.step_change(which)

    def end_the_change(self) -> None:
        """Or make one more of the same members: whole changes follow each other in the middle of a round."""
        self.step_change(0)
        for _ in range(4 * len(self.pservers) + 6):  # one that has to be made again is the longest
            if self.change is not None:
                self.step_change(0)

    def step_change(self, which: int) -> None:
        is_outdated = self.change is not None and self.run.record.change_number > self.change.number
        if self.change is None or (is_outdated and self.change.to_install):
            # Also with the same members: every change has a number of its own.
            self.run = self.run.with_change()
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
                if trainer.state == "declared" and self.run.installed_members.get(trainer.rank) == trainer.incarnation:
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

    def old_message(self, which: int) -> None:
        """It comes once more, or for the first time."""
        if self.sent:
            self._arrive(self.sent[which % len(self.sent)])

    def _arrive(self, message: Sent) -> bool:
        if message.decided is None:
            return self._frozen(message) is not None
        return self._installed_at(message, message.decided)

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
                self.step_change(0)

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
            stepped = [p.history.items() for p in self.pservers if p.attempt == self.attempt]
            lost = max((sum(r > decision.newest and bool(lives) for r, lives in each) for each in stepped), default=0)
            is_repair = self.run.rollback_to is None and not self.is_damaged
            assert not is_repair or lost <= 1 + self.max_delay, "a dead trainer costs one round"
            ranges = {index: [(0, pserver.rounds.applied)] for index, pserver in enumerate(self.pservers)}
            round_ = newest_common(decision.newest, ranges.values())
            decision = decide_rollback(self.run, change.targets, decision, round_, ranges)
            assert isinstance(decision, Decision), decision
            assert decision.attempt == self.attempt + 1
            self.ended = {(r, rank): life for (r, rank), life in self.ended.items() if r <= (round_ or 0)}
            self.is_damaged = False
        assert decision.membership.members == change.targets
        self.run = self.run.apply_decision(decision)
        change.to_install = set(range(len(self.pservers)))

    def _admit_newcomers(self) -> None:
        """Let trainers that every pserver has installed learn where they begin."""
        members, starts = self.run.installed_members, self.run.record.membership.starts
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
