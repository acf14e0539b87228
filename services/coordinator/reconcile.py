"""The reconciliation of the pservers with the cluster's decisions: runs, changes of members, rollbacks, failures.

    gathering:   PUT run to every pserver
    training:    freeze every pserver ──► decide and persist ──► install on every pserver    one change at a time
    over:        PUT members with the failure

Every step may be repeated. A change that was interrupted is repeated under a higher number.

The run that a step begins with is out of date after every wait: the step reads the cluster's run again, and ends if
another run has begun. So no transition of a request handler is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import httpx
from pydantic import TypeAdapter

from ps_protocol.errors import (
    ERRORS,
    Conflict,
    Ended,
    GradpostError,
    NotReady,
    RoundPending,
    StaleRun,
    StorageFailed,
    TryAgain,
)
from ps_protocol.fields import Message
from ps_protocol.membership import Freeze, FrozenRounds, InstallMembers, InstallRun, RequiredStandbys
from ps_protocol.routes import FREEZE, MEMBERS, RESTORABLE, RUN
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger

from .shell import NO_ANSWER, TIMEOUT_SECONDS, Shell
from .state.cluster import Cluster
from .state.decision import Answers, Ranges, Refusal, Rollback, decide_change, decide_rollback, newest_common
from .state.pservers import PserverMember
from .state.record import Decision
from .state.run import Run

log = get_logger()

RESTORE_TIMEOUT_SECONDS = 60.0  # to read a shard and its log

# What a pserver must install, or has installed: its incarnation, run and attempt, and the number of the change.
Target: TypeAlias = tuple[Incarnation, str, int, int]

_RANGES = TypeAdapter(Ranges)


class _InterruptedError(Exception):
    """The change cannot be completed. It is made again, unless another run has begun."""


class Reconciler:
    """The loop that brings pservers to the decided state. A decision takes effect once it is persisted."""

    def __init__(self, shell: Shell, on_silence: Callable[[PserverIndex, Incarnation], None]) -> None:
        self._shell = shell
        self._cluster = shell.cluster
        self._on_silence = on_silence
        self._installed: dict[PserverIndex, Target] = {}
        self._restore: dict[PserverIndex, Round | None] = {}  # the round of each pserver, by the newest decision
        self._failing: tuple[str, float] | None = None  # the run and the time since when changes fail
        self._problem = ""  # why the newest change failed

    async def reconcile(self) -> bool:
        """Persist the cluster's state, and bring every pserver to it. Returns False if it must be tried again.

        If it fails for the rejoin time-out, the run fails although all pservers are alive. A disk that stays full fails
        the run, which the pservers must learn without a persisted decision.
        """
        run = self._cluster.run
        try:
            await self._shell.persist()
        except StorageFailed as error:
            self._fail(run, error)
        except TryAgain:
            if not self._cluster.run.record.is_over:
                return False
        try:
            if await self._update_pservers():
                self._failing = None
                return True
        except (TryAgain, StorageFailed):
            return False
        if self._failing is None or self._failing[0] != run.record.name:
            self._failing = run.record.name, self._shell.now()
        limit = run.settings.rejoin_timeout_seconds
        if self._shell.now() - self._failing[1] > limit:
            text = f"no change could be installed for {limit:g} s: {self._problem}"
            self._fail(run, Ended(text, code="pserver_lost"))
        return False

    def _fail(self, run: Run, failure: GradpostError) -> None:
        self._cluster.update(run, lambda newest: newest.fail(failure, self._shell.now()))

    async def _update_pservers(self) -> bool:
        """Make the newest change on all pservers. Returns False if it must be tried again."""
        cluster, run = self._cluster, self._cluster.run
        if run.record.plan is None:
            return True
        members = list(cluster.registry.members.values())
        number, has_begun = run.record.change_number, run.record.state != "gathering"
        targets = {member.info.index: _find_target(run, member, number) for member in members}
        if not cluster.serves_run:
            serving = [m for m in members if targets[m.info.index][:2] == self._installed.get(m.info.index, ())[:2]]
            return await self._install_everywhere(run, serving, number)
        if len(members) < cluster.registry.num_pservers:
            return True  # a lost pserver returns, or the run fails
        if any(self._installed.get(index) != target for index, target in targets.items()):
            try:
                if has_begun:
                    await self._decide(run, members, number)
                is_installed = await self._install_everywhere(run, members, number)
            except _InterruptedError:
                is_installed = False
            if not is_installed:
                if has_begun:
                    cluster.update(run, Run.with_change)  # a repetition is another change
                return False
        if cluster.is_current(run) and cluster.run.record.state == "gathering":
            reach_failpoint("begin.before")
            # Before a trainer gets the plan: after a restart the run would begin again.
            await self._shell.persist(lambda newest: newest.begin_training(self._shell.now()))
            reach_failpoint("begin.after")
        cluster.update(run, lambda newest: newest.finish_change(number))
        return True

    def _note_problem(self, text: str, error: Exception, **facts: object) -> None:
        self._problem = self._shell.note_problem(text, error, **facts)

    async def _call(self, member: PserverMember, *request: Any, **options: Any) -> bytes:
        """Return the answer of `Shell.call`. A pserver that does not answer is noted and suspected."""
        index, incarnation = member.info.index, member.info.incarnation
        try:
            answer = await self._shell.call(member, *request, **options)
        except httpx.HTTPError as error:
            self._note_problem(f"waiting for pserver {index}", error)
            self._on_silence(index, incarnation)
            raise
        self._shell.note_problem(f"waiting for pserver {index}", None)
        return answer

    # ------------------------------------------------------------------ freeze, decide

    async def _decide(self, run: Run, members: list[PserverMember], number: int) -> None:
        """Freeze the pservers, and put into effect the decision that follows from their answers."""
        targets = run.record.targets
        message = Freeze(run=run.record.name, attempt=run.record.attempt, number=number)
        try:
            frozen = await asyncio.gather(*(self._freeze(run, member, message) for member in members))
        except RoundPending:
            self._failing = None  # the pserver answers, and fails the run if its standbys are missing for too long
            raise
        except NO_ANSWER as error:
            self._note_problem("a pserver did not report its rounds before a change of members", error)
            raise _InterruptedError from error
        if not self._cluster.serves_run:
            raise _InterruptedError
        self._check_current(run)
        for rounds in frozen:
            if rounds is not None:
                self._cluster.run = self._cluster.run.note_applied(run.record.attempt, rounds.applied)
        answers: Answers = {
            m.info.index: (m.info.incarnation, rounds) for m, rounds in zip(members, frozen, strict=True)
        }
        outcome = decide_change(self._cluster.run, targets, answers)
        if isinstance(outcome, Rollback):
            await self._roll_back(run, members, targets, outcome)
            return
        restore = {
            index: rounds.applied if rounds is not None and rounds.is_readable else None
            for index, (_, rounds) in answers.items()
        }
        await self._adopt(members, outcome, restore)

    def _check_current(self, run: Run) -> None:
        if not self._cluster.is_current(run):
            raise _InterruptedError

    async def _adopt(
        self, members: list[PserverMember], decision: Decision, restore: dict[PserverIndex, Round | None]
    ) -> None:
        """Persist a decision, then put it into effect: any heartbeat reply may contain it from then on.

        With it the disk has the pservers that may hold the run from then on, so that their successors are known.
        """
        reach_failpoint("decide.before")
        run, holders = self._cluster.run, {member.info.index: member.info.incarnation for member in members}
        await self._shell.persist(lambda newest: newest.note_holders(holders).apply_decision(decision))
        self._check_current(run)
        self._restore = restore
        reach_failpoint("decide.after")

    async def _freeze(self, run: Run, member: PserverMember, message: Freeze) -> FrozenRounds | None:
        """Freeze a pserver and return its rounds; None if it holds nothing that it could continue from by itself."""
        try:
            body = await self._call(member, "PUT", FREEZE, message)
        except StaleRun:
            # It missed the rollback that this attempt began with, and will restore its round.
            return FrozenRounds(applied=run.record.base_round or 0, is_readable=run.record.base_round is not None)
        except NotReady:
            if not run.settings.consistency.is_async:
                return None
            for round_ in self._cluster.run.record.checkpoints:  # without a rollback, each continues from its newest
                if await self._list_restorable(run, member, round_):
                    return FrozenRounds(applied=round_)
            return None
        return FrozenRounds.from_answer(body)

    async def _list_restorable(self, run: Run, member: PserverMember, newest: Round) -> Ranges:
        is_complete = newest in self._cluster.run.record.checkpoints
        route = f"{RESTORABLE}?run={run.record.name}&newest={newest}&complete={str(is_complete).lower()}"
        body = await self._call(member, "GET", route, timeout=RESTORE_TIMEOUT_SECONDS)
        return _RANGES.validate_json(body)

    async def _roll_back(
        self, run: Run, members: list[PserverMember], targets: dict[Rank, Incarnation], wanted: Rollback
    ) -> None:
        """Roll back to the wanted round, or the newest before it that all pservers can restore."""
        cluster = self._cluster
        try:
            round_, ranges = await self._find_common(run, members, wanted.newest)
        except NO_ANSWER as error:
            self._note_problem("a pserver did not report which rounds it can restore", error)
            if wanted.is_asked:
                text = f"a pserver did not report which rounds it can restore: {error}"
                cluster.update(run, lambda newest: newest.refuse_rollback(text))
            raise _InterruptedError from error
        self._check_current(run)
        outcome = decide_rollback(cluster.run, targets, wanted, round_, ranges)
        if isinstance(outcome, Refusal):
            cluster.run = cluster.run.refuse_rollback(outcome.reason)
            raise _InterruptedError
        if isinstance(outcome, Ended):
            self._fail(run, outcome)
            raise _InterruptedError
        base, applied = round_ or 0, cluster.run.newest_applied  # all pservers may have lost it
        cluster.run = cluster.run.fail_for_lost_rounds(base, applied, self._shell.now())
        if cluster.run.record.state == "failed":
            raise _InterruptedError
        await self._adopt(members, outcome, {member.info.index: round_ for member in members})
        cluster.run = cluster.run.fail_for_lost_rounds(
            base, applied, self._shell.now()
        )  # trainers may have left meanwhile
        log.warning(
            "the run is rolled back",
            reason=wanted.reason, round=base, applied=applied, attempt=outcome.attempt, lost=applied - base,
        )  # fmt: skip

    async def _find_common(
        self, run: Run, members: list[PserverMember], newest: Round
    ) -> tuple[Round | None, dict[PserverIndex, Ranges]]:
        """Return the newest round up to `newest` that all pservers can restore, and the ranges of each.

        Pservers restore from their own folders, and complete checkpoints from the shared storage as well.
        """
        while True:
            ranges = await asyncio.gather(*(self._list_restorable(run, member, newest) for member in members))
            round_ = newest_common(newest, ranges)
            if round_ != newest:
                candidates = [complete for complete in self._cluster.run.record.checkpoints if complete < newest]
                round_ = max(candidates if round_ is None else [*candidates, round_], default=None)
            if round_ is None or round_ == newest:
                return round_, dict(zip((member.info.index for member in members), ranges, strict=True))
            newest = round_  # now with the snapshots before it

    # ------------------------------------------------------------------ install

    async def _install_everywhere(self, run: Run, members: list[PserverMember], number: int) -> bool:
        """Return whether all of these pservers have installed the run, after a request to each that has not."""
        return all(await asyncio.gather(*(self._install(run, member, number) for member in members)))

    async def _install(self, run: Run, member: PserverMember, number: int) -> bool:
        """Install the run on a pserver, or its members alone. Returns False if it must be tried again."""
        cluster, index = self._cluster, member.info.index
        if not cluster.is_current(run):
            return True  # the next run has begun
        run = cluster.run  # with the newest decision
        target, installed = _find_target(run, member, number), self._installed.get(index)
        if not cluster.serves_run and installed == target:
            return True
        message: Message
        has_run = installed is not None and installed[:-1] == target[:-1]
        if has_run or not cluster.serves_run:
            route, timeout, message = MEMBERS, TIMEOUT_SECONDS, make_members_message(run, number)
        elif cluster.find_required(index, member.info.incarnation) is None:
            return False  # another process has replaced it, or is about to
        else:
            restore = self._restore.get(index)
            if run.record.state == "gathering":
                cluster.run = run.note_holders({index: member.info.incarnation})
                restore = run.record.base_round
            route, timeout = RUN, RESTORE_TIMEOUT_SECONDS
            message = make_installation(cluster, index, number, restore)
        try:
            await self._call(member, "PUT", route, message, timeout)
        except httpx.HTTPError:
            return False
        except GradpostError as problem:
            self._note_problem("a pserver refused an installation", problem, pserver=index)
            # A conflict passes, for example when the pserver has not read its new identity yet.
            if not problem.may_be_retried and not isinstance(problem, Conflict):
                code = "storage_failed" if isinstance(problem, StorageFailed) else "pserver_lost"
                text = f"pserver {index} cannot serve the run: {problem}"
                self._fail(run, ERRORS[code].family(text, code=code, pserver=index))
            return False
        self._installed[index] = target
        return True


def _find_target(run: Run, member: PserverMember, number: int) -> Target:
    return member.info.incarnation, run.record.name, run.record.attempt, number


def make_installation(cluster: Cluster, index: PserverIndex, number: int, restore: Round | None) -> InstallRun:
    """Return the order to serve the run for pserver `index`, as part of change `number`.

    `restore` is the round to restore; None: the pserver begins with initial values.
    """
    run, settings = cluster.run, cluster.run.settings
    assert run.record.plan is not None
    assert run.record.declaration is not None
    return InstallRun(
        run=run.record.name,
        attempt=run.record.attempt,
        plan=run.record.plan,
        incarnation=run.holders[index],
        membership=run.record.membership,
        consistency=settings.consistency,
        nonfinite=run.nonfinite,
        max_grad_norm=run.record.declaration.max_grad_norm,
        patience_seconds=settings.patience_seconds,
        durability=settings.log_durability,
        checkpoint_rounds=run.checkpoint_interval,
        max_log_bytes=settings.limit_log(run.record.plan) if run.record.plan.sparse_groups else 0,
        keep_checkpoints=settings.keep_checkpoints,
        restore=restore,
        began=run.record.began,
        source=run.record.source,
        uploader=run.record.uploader,
        number=number,
        required=cluster.find_required(index, run.holders[index]) or RequiredStandbys(),
    )


def make_members_message(run: Run, number: int) -> InstallMembers:
    """Return the membership as decided, or the run's failure, for all pservers."""
    return InstallMembers(
        run=run.record.name,
        attempt=run.record.attempt,
        number=number,
        membership=run.record.membership,
        failure=run.record.failure.to_problem() if run.record.failure else None,
    )
