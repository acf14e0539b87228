"""The installation of the cluster's decisions on the pservers: runs, changes of members, rollbacks, failures.

    gathering:   PUT run to every pserver
    training:    freeze every pserver ──► decide and persist ──► install on every pserver    one change at a time
    over:        PUT members with the failure

Every step may be repeated. A change that was interrupted is repeated under a higher number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx
from pydantic import TypeAdapter

from ps_protocol.errors import ERRORS, Conflict, Ended, GradpostError, NotReady, StaleRun, StorageFailed
from ps_protocol.fields import Message
from ps_protocol.membership import Freeze, FrozenRounds, Membership
from ps_protocol.routes import FREEZE, MEMBERS, RESTORABLE, RUN
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger

from .cluster import Cluster
from .control import TIMEOUT_SECONDS, call_pserver
from .decision import Decision, Rollback, decide, decide_steps, newest_common
from .pservers import PserverMember
from .run import Run

log = get_logger()

RESTORE_TIMEOUT_SECONDS = 60.0  # to read a shard and its log

_RANGES = TypeAdapter(list[tuple[Round, Round]])


class Installer:
    """The loop that brings pservers to the decided state. `persist` must succeed before a decision takes effect."""

    def __init__(
        self,
        cluster: Cluster,
        http: httpx.AsyncClient,
        now: Callable[[], float],
        persist: Callable[[], Awaitable[None]],
    ) -> None:
        self._cluster = cluster
        self._http = http
        self._now = now
        self._persist = persist
        # The newest state that each pserver has installed: incarnation, run, attempt and number.
        self._taken: dict[PserverIndex, tuple[Incarnation, str, int, int]] = {}
        self._restore: dict[PserverIndex, Round | None] = {}  # the round of each pserver, by the newest decision
        self._failing: tuple[Run, float] | None = None  # the run and the time since when changes fail
        self._problem = ""
        self._logged: set[str] = set()  # logged since the last success

    async def reconcile(self) -> bool:
        """Bring every pserver to the decided state. Returns whether that succeeded.

        If it fails for the rejoin time-out, the run fails although all pservers are alive.
        """
        run = self._cluster.run
        if await self._reconcile():
            self._failing = None
            self._logged.clear()
            return True
        if self._failing is None or self._failing[0] is not run:
            self._failing = run, self._now()
        limit = run.settings.rejoin_timeout_seconds
        if self._now() - self._failing[1] > limit:
            run.fail(
                Ended(f"no change could be installed for {limit:g} s: {self._problem}", code="pserver_lost"),
                self._now(),
            )
        return False

    async def _reconcile(self) -> bool:
        cluster, run = self._cluster, self._cluster.run
        if run.plan is None:
            return True
        members = [member for _, member in sorted(cluster.registry.members.items())]
        if not cluster.serves_run:
            notified = [self._notify(run, member) for member in members if self._serves(run, member)]
            return all(await asyncio.gather(*notified))
        if len(members) < cluster.registry.num_pservers:
            return True  # a lost pserver returns, or the run fails
        number = run.number
        if any(self._taken.get(m.info.index) != self._state(run, m, number) for m in members):
            has_begun = run.state != "gathering"
            if has_begun and not await self._decide(run, members, number):
                return False
            results = await asyncio.gather(*(self._install(run, member, number) for member in members))
            if not all(results):
                if has_begun:
                    run.number += 1  # a repetition is another change
                return False
        if cluster.run is run and run.state == "gathering":
            run.begin_training(self._now())
            reach_failpoint("begin.before")
            await self._persist()  # before a trainer gets the plan: after a restart the run would begin again
            reach_failpoint("begin.after")
        if cluster.run is run:
            cluster.finish_change(number)
        return True

    def _log_problem(self, text: str, error: Exception, **facts: object) -> None:
        self._problem = f"{text}: {error!r}"
        line = f"{self._problem} {facts}"
        if line not in self._logged:  # a dead pserver is tried five times a second until its lease expires
            self._logged.add(line)
            log.warning(text, error=repr(error), **facts)

    def _state(self, run: Run, member: PserverMember, number: int) -> tuple[Incarnation, str, int, int]:
        return member.info.incarnation, run.name, run.attempt, number

    def _serves(self, run: Run, member: PserverMember) -> bool:
        """Return whether this incarnation of the pserver has installed the run."""
        taken = self._taken.get(member.info.index)
        return taken is not None and taken[:2] == (member.info.incarnation, run.name)

    # ------------------------------------------------------------------ freeze, decide

    async def _decide(self, run: Run, members: list[PserverMember], number: int) -> bool:
        targets = run.targets
        message = Freeze(run=run.name, attempt=run.attempt, number=number)
        try:
            answers = await asyncio.gather(*(self._freeze(run, member, message) for member in members))
        except (httpx.HTTPError, GradpostError, ValueError) as error:
            self._log_problem("a pserver did not answer the freeze before a change of members", error)
            run.number += 1
            return False
        if not self._cluster.serves_run or self._cluster.run is not run:
            return False
        outcome = self._judge(run, targets, members, answers)
        if isinstance(outcome, Rollback):
            return await self._roll_back(run, members, targets, outcome)
        restore = {
            member.info.index: answer.applied if answer is not None and answer.is_readable else None
            for member, answer in zip(members, answers, strict=True)
        }
        if run.wanted is not None:  # the pservers stand still, so it counts from the first round that none has applied
            applied = [answer.applied for answer in answers if answer is not None]
            outcome = outcome.with_controls(
                run.wanted.model_copy(update={"since": max(applied) + 1}), first=min(applied) + 1
            )
        await self._adopt(run, members, replace(run.decision, membership=outcome), restore)
        return True

    def _judge(
        self,
        run: Run,
        targets: dict[Rank, Incarnation],
        members: list[PserverMember],
        answers: list[FrozenRounds | None],
    ) -> Membership | Rollback:
        rounds = [answer for answer in answers if answer is not None]
        lowest = min((answer.applied for answer in rounds), default=0)
        run.applied = max([run.applied, *(answer.applied for answer in rounds)])
        if run.rollback_to is not None:
            newest, reason = min(lowest, run.rollback_to), "an administrator requested it"
            return Rollback(newest, reason, is_asked=newest == run.rollback_to)
        rules = run.settings.consistency
        has_same_uploader = targets.get(run.uploader) == run.membership.members.get(run.uploader)
        for member, answer in zip(members, answers, strict=True):
            if reason := self._find_loss(run, member, answer, has_same_uploader=has_same_uploader):
                return Rollback(lowest, f"pserver {member.info.index} {reason}")
        decide_mode = decide_steps if rules.is_async else decide
        take_over = {trainer.rank for trainer in run.trainers.values() if trainer.is_awaited}
        return decide_mode(run.membership, targets, rounds, max_delay=rules.max_delay, take_over=take_over)

    def _find_loss(
        self, run: Run, member: PserverMember, answer: FrozenRounds | None, *, has_same_uploader: bool
    ) -> str:
        """Return what a pserver lost that the run cannot continue without; an empty text: nothing."""
        if answer is None:
            return "holds nothing of the run"
        if not answer.is_readable and not has_same_uploader:
            return "does not have all initial values, and the trainer that uploads them is gone"
        if run.settings.consistency.is_async:
            return ""
        if answer.is_short:
            return f"has lost what it had logged after round {answer.applied}"
        # The trainers that received the lost round may be gone, and do not report it.
        if answer.applied < run.received:
            return f"is at round {answer.applied}, and a trainer has received round {run.received}"
        report = run.lost_rounds.get(member.info.index)
        if report and report.incarnation == member.info.incarnation and answer.applied <= report.restored:
            received = f"trainer {report.rank} has received round {report.received}"
            return f"came back with round {answer.applied}, and {received}"
        return ""

    async def _adopt(
        self, run: Run, members: list[PserverMember], decision: Decision, restore: dict[PserverIndex, Round | None]
    ) -> None:
        """Persist a decision, then put it into effect: trainers receive what is in effect with any heartbeat."""
        reach_failpoint("decide.before")
        wanted, run.wanted = run.wanted, None
        run.pending = decision
        try:
            await self._persist()
            run.apply_decision(decision)
        except BaseException:
            run.wanted = run.wanted or wanted  # it is repeated; newer controls include it
            raise
        finally:
            run.pending = None
        self._restore = restore
        self._cluster.run_incarnations = {member.info.index: member.info.incarnation for member in members}
        reach_failpoint("decide.after")

    async def _freeze(self, run: Run, member: PserverMember, message: Freeze) -> FrozenRounds | None:
        """Freeze a pserver and return its rounds; None if it holds nothing that it could continue from by itself."""
        try:
            body = await call_pserver(self._http, member, "PUT", FREEZE, message)
        except StaleRun:
            # It missed the rollback that this attempt began with, and will restore its round.
            return FrozenRounds(applied=run.resume or 0, is_readable=run.resume is not None)
        except NotReady:
            # Its answer lists all complete checkpoints, so that undone ones must be deleted first.
            if not self._cluster.knows_checkpoints:
                raise
            return await self._find_checkpoint(run, member) if run.settings.consistency.is_async else None
        return FrozenRounds.model_validate_json(body)

    async def _find_checkpoint(self, run: Run, member: PserverMember) -> FrozenRounds | None:
        """Return the rounds that a pserver can restore from checkpoints in asynchronous modes, without a rollback."""
        ranges = await self._restorable(run, member)
        return FrozenRounds(applied=max(last for _, last in ranges)) if ranges else None

    async def _restorable(
        self, run: Run, member: PserverMember, newest: Round | None = None
    ) -> list[tuple[Round, Round]]:
        route = f"{RESTORABLE}?run={run.name}" + ("" if newest is None else f"&newest={newest}")
        body = await call_pserver(self._http, member, "GET", route, timeout=RESTORE_TIMEOUT_SECONDS)
        return _RANGES.validate_json(body)

    async def _roll_back(
        self, run: Run, members: list[PserverMember], targets: dict[Rank, Incarnation], wanted: Rollback
    ) -> bool:
        """Roll back to the wanted round, or the newest before it that all pservers can restore.

        Returns False if a pserver does not report its rounds, or a requested rollback is refused.
        """
        try:
            round_, ranges = await self._find_common(run, members, wanted.newest)
        except (httpx.HTTPError, GradpostError, ValueError) as error:
            self._log_problem("a pserver did not report which rounds it can restore", error)
            if wanted.is_asked:
                run.refuse_rollback(f"a pserver did not report which rounds it can restore: {error}")
            run.number += 1
            return False
        applied = run.applied  # all pservers may have lost it
        if wanted.is_asked and (reason := self._find_obstacle(run, wanted.newest, round_)):
            run.refuse_rollback(reason)
            run.number += 1
            return False
        if round_ is None and (applied > 0 or run.has_trained or run.resume is not None):
            empty = [member.info.index for member, one in zip(members, ranges, strict=True) if not one]
            text = f"pservers {empty} have lost their shards" if empty else "no round can be restored by all pservers"
            run.fail(
                Ended(f"{text}; the pservers can restore {ranges}", code="pserver_lost", pserver=empty), self._now()
            )
            return False
        if gone := run.find_departed_after(round_ or 0):
            run.fail_for_lost_rounds(gone, round_ or 0, applied, self._now())
            return False
        uploader = run.uploader if round_ is not None else min(targets, default=run.uploader)
        # The newest controls stay in effect.
        standing = run.membership.controls[-1:] if run.wanted is None else (run.wanted,)
        since = 0 if run.wanted is None else (round_ or 0) + 1
        controls = tuple(now.model_copy(update={"since": since}) for now in standing)
        decision = Decision(run.attempt + 1, round_, uploader, Membership(targets, controls=controls))
        await self._adopt(run, members, decision, {member.info.index: round_ for member in members})
        if gone := run.find_departed_after(round_ or 0):  # trainers that left while the decision was written
            run.fail_for_lost_rounds(gone, round_ or 0, applied, self._now())
        run.rollback_reason = wanted.reason
        self._cluster.forget_checkpoints_after(round_ or 0)
        log.warning(
            "the run is rolled back",
            reason=wanted.reason,
            round=round_ or 0,
            applied=applied,
            attempt=run.attempt,
            lost=applied - (round_ or 0),
        )
        return True

    async def _find_common(
        self, run: Run, members: list[PserverMember], newest: Round
    ) -> tuple[Round | None, list[list[tuple[Round, Round]]]]:
        """Return the newest round up to `newest` that all pservers can restore, and the ranges of each."""
        while True:
            ranges = await asyncio.gather(*(self._restorable(run, member, newest) for member in members))
            round_ = newest_common(newest, ranges)
            if round_ is None or round_ == newest:
                return round_, ranges
            newest = round_  # now with the checkpoints before it

    def _find_obstacle(self, run: Run, asked: Round, common: Round | None) -> str:
        """Return why a requested rollback is refused; an empty text if it is not."""
        if common != asked:
            return f"not every pserver can restore round {asked}, see the pservers' logs"
        return run.find_rollback_obstacle(asked)

    # ------------------------------------------------------------------ install

    async def _install(self, run: Run, member: PserverMember, number: int) -> bool:
        if self._cluster.run is not run:
            return True  # the next run has begun
        state = self._state(run, member, number)
        if self._taken.get(member.info.index, ())[:3] == state[:3]:
            message: Message = self._cluster.members_message(number)
            route = MEMBERS
        else:
            if run.state == "gathering":
                self._cluster.run_incarnations[member.info.index] = member.info.incarnation
            restore = run.resume if run.state == "gathering" else self._restore.get(member.info.index)
            message = self._cluster.installation(member.info.index, number, restore)
            route = RUN
        return await self._put(run, member, route, message, state)

    async def _notify(self, run: Run, member: PserverMember) -> bool:
        state = self._state(run, member, run.number)
        if self._cluster.run is not run or self._taken.get(member.info.index) == state:
            return True
        return await self._put(run, member, MEMBERS, self._cluster.members_message(run.number), state)

    async def _put(
        self,
        run: Run,
        member: PserverMember,
        route: str,
        message: Message,
        state: tuple[Incarnation, str, int, int],
    ) -> bool:
        index = member.info.index
        try:
            timeout = RESTORE_TIMEOUT_SECONDS if route == RUN else TIMEOUT_SECONDS
            await call_pserver(self._http, member, "PUT", route, message, timeout)
        except (httpx.HTTPError, ValueError) as error:
            self._log_problem("a pserver did not accept an installation", error, pserver=index)
            return False
        except GradpostError as problem:
            self._log_problem("a pserver refused an installation", problem, pserver=index)
            # A conflict passes, for example when the pserver has not read its new identity yet.
            if not problem.may_be_retried and not isinstance(problem, Conflict):
                code = "storage_failed" if isinstance(problem, StorageFailed) else "pserver_lost"
                text = f"pserver {index} cannot serve the run: {problem}"
                run.fail(ERRORS[code].family(text, code=code, pserver=index), self._now())
            return False
        self._taken[index] = state
        return True
