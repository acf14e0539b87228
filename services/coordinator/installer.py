"""Carries the cluster's decisions to the pservers: the start of a run, changes of members, rollbacks, its failure.

    gathering:   PUT run to every pserver
    training:    freeze every pserver ──► decide, durably ──► install on every pserver      one change at a time
    over:        PUT members with the failure

Each step may be repeated. A change that was interrupted, here or there, is repeated under a higher number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx
from pydantic import TypeAdapter

from ps_protocol.errors import ERRORS, Conflict, Ended, GradpostError, NotReady, StaleRun, StorageFailed
from ps_protocol.fields import Message
from ps_protocol.membership import Membership
from ps_protocol.messages import Freeze, FrozenRounds
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

RESTORE_TIMEOUT_SECONDS = 60.0  # reading a shard and its log

_RANGES = TypeAdapter(list[tuple[Round, Round]])


class Installer:
    """`keep` makes the cluster's state durable; a decision is carried out only after that."""

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
        # What each pserver has taken: its incarnation, run, attempt, and the number of the members.
        self._taken: dict[PserverIndex, tuple[Incarnation, str, int, int]] = {}
        self._restore: dict[PserverIndex, Round | None] = {}  # where each one stands, as of the newest decision
        self._failing: tuple[Run, float] | None = None  # since when nothing could be carried out in a run
        self._problem = ""  # the newest
        self._logged: set[str] = set()  # since everything was well

    async def reconcile(self) -> bool:
        """Bring every pserver to what was decided; False if one of them did not take it and it is to be tried again.

        That has the rejoin time-out to succeed: then the run fails, though all pservers are alive.
        """
        run = self._cluster.run
        if await self._reconcile():
            self._failing = None
            self._logged.clear()
            return True
        if self._failing is None or self._failing[0] is not run:
            self._failing = run, self._now()
        limit = run.defaults.rejoin_timeout_seconds
        if self._now() - self._failing[1] > limit:
            run.fail(
                Ended(f"no change could be carried out for {limit:g} s: {self._problem}", code="pserver_lost"),
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
            return True  # what is lost comes back, or ends the run
        number = run.number
        if any(self._taken.get(m.info.index) != self._state(run, m, number) for m in members):
            has_begun = run.state != "gathering"
            if has_begun and not await self._decide(run, members, number):
                return False
            results = await asyncio.gather(*(self._install(run, member, number) for member in members))
            if not all(results):
                if has_begun:
                    run.number += 1  # another try is another change
                return False
        if cluster.run is run and run.state == "gathering":
            run.begin_training(self._now())
            reach_failpoint("begin.before")
            await (
                self._persist()
            )  # before anybody has the plan, and trains: another life of this process would begin anew
            reach_failpoint("begin.after")
        if cluster.run is run:
            cluster.finish_change(number)
        return True

    def _log_problem(self, text: str, error: Exception, **facts: object) -> None:
        self._problem = f"{text}: {error!r}"
        line = f"{self._problem} {facts}"
        if line not in self._logged:  # a pserver that is dead is tried five times a second until its lease ends
            self._logged.add(line)
            log.warning(text, error=repr(error), **facts)

    def _state(self, run: Run, member: PserverMember, number: int) -> tuple[Incarnation, str, int, int]:
        return member.info.incarnation, run.name, run.attempt, number

    def _serves(self, run: Run, member: PserverMember) -> bool:
        """Whether it has taken this run, in this life."""
        taken = self._taken.get(member.info.index)
        return taken is not None and taken[:2] == (member.info.incarnation, run.name)

    # ------------------------------------------------------------------ freeze, decide

    async def _decide(self, run: Run, members: list[PserverMember], number: int) -> bool:
        targets = run.targets
        message = Freeze(run=run.name, attempt=run.attempt, number=number)
        try:
            answers = await asyncio.gather(*(self._freeze(run, member, message) for member in members))
        except (httpx.HTTPError, GradpostError, ValueError) as error:
            self._log_problem("a pserver did not answer before a change of members", error)
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
            newest, reason = min(lowest, run.rollback_to), "an administrator has asked for it"
            return Rollback(newest, reason, is_asked=newest == run.rollback_to)
        rules = run.defaults.consistency
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
        """Say what a pserver has lost that the run cannot go on without; an empty text: nothing."""
        if answer is None:
            return "holds nothing of the run"
        if not answer.is_readable and not has_same_uploader:
            return "has not got all initial values, and the trainer that uploads them is gone"
        if run.defaults.consistency.is_async:
            return ""
        if answer.is_short:
            return f"has lost what it had logged after round {answer.applied}"
        # The trainers that have received what was lost may be gone by now, so that none of them reports it.
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
        """Make it durable first: trainers hear of what is in effect in the answer to any heartbeat.

        What was wanted until now is in it.
        """
        reach_failpoint("decide.before")
        wanted, run.wanted = run.wanted, None
        run.pending = decision
        try:
            await self._persist()
            run.apply_decision(decision)
        except BaseException:
            run.wanted = run.wanted or wanted  # it is tried again; what came meanwhile was made from it
            raise
        finally:
            run.pending = None
        self._restore = restore
        self._cluster.run_incarnations = {member.info.index: member.info.incarnation for member in members}
        reach_failpoint("decide.after")

    async def _freeze(self, run: Run, member: PserverMember, message: Freeze) -> FrozenRounds | None:
        """Where a pserver stands; None if it holds nothing of the run that it could go on with by itself."""
        try:
            body = await call_pserver(self._http, member, "PUT", FREEZE, message)
        except StaleRun:
            # It has missed the rollback that this attempt began with; it will be told where that was.
            return FrozenRounds(applied=run.resume or 0, is_readable=run.resume is not None)
        except NotReady:
            # It names all complete checkpoints as restorable, so that none may be left which was undone.
            if not self._cluster.knows_checkpoints:
                raise
            return await self._find_checkpoint(run, member) if run.defaults.consistency.is_async else None
        return FrozenRounds.model_validate_json(body)

    async def _find_checkpoint(self, run: Run, member: PserverMember) -> FrozenRounds | None:
        """Where a pserver without a disk of its own could stand, where nobody else has to go back with it."""
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
        """Go back to the wanted round, or the newest before it that all can restore.

        Returns False if they do not say what they can restore, or the run was only asked to and stays.
        """
        try:
            round_, ranges = await self._find_common(run, members, wanted.newest)
        except (httpx.HTTPError, GradpostError, ValueError) as error:
            self._log_problem("a pserver did not say what it can restore", error)
            if wanted.is_asked:
                run.refuse_rollback(f"a pserver did not say what it can restore: {error}")
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
        # What stands, or is wanted, goes on standing.
        standing = run.membership.controls[-1:] if run.wanted is None else (run.wanted,)
        since = 0 if run.wanted is None else (round_ or 0) + 1
        controls = tuple(now.model_copy(update={"since": since}) for now in standing)
        decision = Decision(run.attempt + 1, round_, uploader, Membership(targets, controls=controls))
        await self._adopt(run, members, decision, {member.info.index: round_ for member in members})
        if gone := run.find_departed_after(round_ or 0):  # while the decision was written
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
        """Return the newest round, up to `newest`, that all pservers can restore, and what each of them can."""
        while True:
            ranges = await asyncio.gather(*(self._restorable(run, member, newest) for member in members))
            round_ = newest_common(newest, ranges)
            if round_ is None or round_ == newest:
                return round_, ranges
            newest = round_  # the checkpoints that lead there are read now

    def _find_obstacle(self, run: Run, asked: Round, common: Round | None) -> str:
        """Return why the run does not go back to a round as an administrator asked; an empty text if it does."""
        if common != asked:
            return f"not every pserver can restore round {asked}, and their logs say why"
        return run.find_rollback_obstacle(asked)

    # ------------------------------------------------------------------ install

    async def _install(self, run: Run, member: PserverMember, number: int) -> bool:
        if self._cluster.run is not run:
            return True  # the next one has begun meanwhile
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
            self._log_problem("a pserver did not take an installation over HTTP/1.1", error, pserver=index)
            return False
        except GradpostError as problem:
            self._log_problem("a pserver refused an installation", problem, pserver=index)
            # A conflict is over soon: such as that it has not read yet who it is now.
            if not problem.may_be_retried and not isinstance(problem, Conflict):
                code = "storage_failed" if isinstance(problem, StorageFailed) else "pserver_lost"
                text = f"pserver {index} cannot serve the run: {problem}"
                run.fail(ERRORS[code].family(text, code=code, pserver=index), self._now())
            return False
        self._taken[index] = state
        return True
