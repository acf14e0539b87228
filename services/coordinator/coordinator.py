"""The coordinator's shell: the clock, and the task that carries the cluster's decisions to the pservers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from ps_protocol.errors import Conflict, NotReady, PserverLost, error_from_problem
from ps_protocol.messages import Message, PlanReady, PserverState, RunSummary, ShardSummary
from ps_protocol.routes import MEMBERS, RUN, STATE
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank
from services.runtime.logs import bind_facts, get_logger

from .cluster import Cluster
from .pservers import PserverMember
from .run import Run
from .settings import CoordinatorSettings

log = get_logger()
T = TypeVar("T")

PSERVER_TIMEOUT_SECONDS = 5.0
RETRY_SECONDS = 0.2


class Coordinator:
    """One event loop, one cluster. Handlers change `cluster` synchronously and then call `changed`."""

    def __init__(self, settings: CoordinatorSettings, http: httpx.AsyncClient) -> None:
        self.cluster = Cluster(
            settings.num_pservers,
            settings.run_defaults,
            lease_seconds=settings.lease_seconds,
            exit_when_done=settings.exit_when_done,
            name_run=lambda: secrets.token_hex(6),
        )
        self.http = http
        self._condition = asyncio.Condition()
        self._wake = asyncio.Event()
        # What each pserver has acknowledged: its incarnation, the run, and the number of the members.
        self._acknowledged: dict[PserverIndex, tuple[Incarnation, str, int]] = {}
        self._last_summary: RunSummary | None = None

    def now(self) -> float:
        """The monotonic clock that leases run on."""
        return asyncio.get_running_loop().time()

    def changed(self) -> None:
        """Something was decided: let the reconciler carry it out."""
        self._wake.set()

    # ------------------------------------------------------------------ background

    async def run(self, stop: asyncio.Event) -> None:
        """Expire leases and reconcile the pservers until `stop` is set, which this also does when the work is done."""
        async with asyncio.TaskGroup() as tasks:
            expiring = tasks.create_task(self._expire_leases())
            await self._reconcile_until(stop)
            expiring.cancel()

    async def _expire_leases(self) -> None:
        # Apart from the reconciliation, which waits for pservers that may be the very ones to be lost.
        period = min(0.5, self.cluster.lease_seconds / 4)
        due = self.now()
        while True:
            if (paused := self.now() - due) > self.cluster.lease_seconds / 2:
                # This process was stopped (SIGSTOP, a paused machine): the silence was ours, not theirs.
                log.warning("the coordinator was paused; all leases are renewed", seconds=round(paused, 1))
                self.cluster.renew_leases(self.now())
            self.cluster.expire(self.now())
            self.changed()
            due = self.now() + period
            await asyncio.sleep(period)

    async def _reconcile_until(self, stop: asyncio.Event) -> None:
        said = ""
        while not stop.is_set():
            await self._wake.wait()
            self._wake.clear()
            if not await self._reconcile():
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()
            async with self._condition:
                self._condition.notify_all()
            said = self._say_news(said)
            if self.cluster.run.is_deserted:
                await self._record_run()
            if self.cluster.may_exit:
                stop.set()

    def _say_news(self, said: str) -> str:
        """Log one line when what the run waits for, or its state, is another than what was said last."""
        run = self.cluster.run
        bind_facts(run=run.name)
        news = f"waiting for {', '.join(self.cluster.waiting_for)}" if self.cluster.waiting_for else f"run {run.state}"
        if news != said and run.failure is not None:
            trainers = run.failure.facts.get("ranks") or run.failure.facts.get("missing")
            log.error(news, round=run.round, trainer=trainers, code=run.failure.code, reason=run.failure.detail)
        elif news != said:
            log.info(news, round=run.round)
        return news

    async def _record_run(self) -> None:
        run = self.cluster.run
        await self.summary()
        if self.cluster.run is run:  # else the next one has begun meanwhile
            self.cluster.run_recorded()

    async def _reconcile(self) -> bool:
        """Bring every pserver to what was decided; False if one of them did not take it."""
        cluster = self.cluster
        cluster.start_run_if_complete()
        run = cluster.run
        if run.plan is None:
            return True
        members = [member for _, member in sorted(cluster.registry.members.items())]
        results = await asyncio.gather(*(self._reconcile_pserver(run, member) for member in members))
        complete = all(results) and len(results) == cluster.registry.num_pservers
        if complete and run.state == "gathering" and cluster.run is run:
            run.installed(self.now())
            log.info("plan installed", plan=run.plan.digest, trainers=len(run.members))
        return all(results)

    async def _reconcile_pserver(self, run: Run, member: PserverMember) -> bool:
        index, incarnation = member.info.index, member.info.incarnation
        if self._acknowledged.get(index, (0, "", -1))[:2] != (incarnation, run.name):
            if run.is_over or self.cluster.run is not run:
                return True  # it never took part in this run
            number = run.number
            if not await self._put(run, member, RUN, self.cluster.installation(index)):
                return False
            self._acknowledged[index] = (incarnation, run.name, number)
        # The next run may have begun meanwhile; then nobody is left in this one.
        if self.cluster.run is run and self._acknowledged[index][2] != run.number:
            number = run.number
            if not await self._put(run, member, MEMBERS, self.cluster.members_message()):
                return False
            self._acknowledged[index] = (incarnation, run.name, number)
        return True

    async def _put(self, run: Run, member: PserverMember, route: str, message: Message) -> bool:
        try:
            response = await self.http.put(
                member.info.address + route, content=message.model_dump_json(), timeout=PSERVER_TIMEOUT_SECONDS,
                headers={"content-type": "application/json"},
            )  # fmt: skip
            problem = error_from_problem(response.json()) if response.is_error else None
        except (httpx.TransportError, ValueError) as error:
            log.warning("a pserver did not take an installation", pserver=member.info.index, error=repr(error))
            return False
        if problem is None:
            return True
        log.warning("a pserver refused an installation", pserver=member.info.index, error=repr(problem))
        # A conflict is over soon: such as that it has not read yet who it is now.
        if not problem.may_be_retried and not isinstance(problem, Conflict):
            reason = f"pserver {member.info.index} cannot serve the run: {problem}"
            run.fail(PserverLost(reason, pserver=member.info.index), self.now())
        return False

    # ------------------------------------------------------------------ waiting

    async def wait_for_plan(self, rank: Rank, run: str, incarnation: Incarnation, wait_seconds: float) -> PlanReady:
        """Wait for the run to start; NotReady says what it waits for, the run's failure who is to blame."""

        def ready() -> bool:
            return self.cluster.run.name != run or self.cluster.run.state != "gathering"

        async with self._condition:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._condition.wait_for(ready), wait_seconds)
        current = self.cluster.run
        current.member(rank, run, incarnation)
        if current.failure is not None:
            raise copy.copy(current.failure)  # every waiter its own: a raised exception collects frames
        plan = self.cluster.plan_ready()
        if plan is None:
            waits = self.cluster.waiting_for
            raise NotReady(f"the cluster waits for {', '.join(waits)}", waiting_for=waits)
        return plan

    # ------------------------------------------------------------------ summary

    async def summary(self) -> RunSummary:
        """The current run in a few numbers; that of a finished run is kept, since its pservers may exit."""
        run = self.cluster.run
        if self._last_summary is not None and self._last_summary.run == run.name and run.is_over:
            return self._last_summary
        answers = await self.ask_pservers(self._state_of)
        states = [state for state in answers if state.run == run.name]
        end = run.ended_at if run.ended_at is not None else self.now()
        results: dict[str, float] = {}
        for _, trainer in sorted(run.trainers.items(), reverse=True):
            results.update(trainer.results)  # the lowest rank's word counts
        summary = RunSummary(
            run=run.name,
            state=run.state,
            mode=run.mode,
            transport="+".join(sorted({f"HTTP/{v}" for state in states for v in state.transports})) or "none",
            num_trainers=len(run.trainers),
            rounds=min((state.round for state in states), default=0),
            seconds=0.0 if run.started_at is None else end - run.started_at,
            shards=tuple(
                ShardSummary(
                    pserver=state.index or 0,
                    shard_bytes=state.shard_bytes,
                    pushed_bytes=state.pushed_bytes,
                    pulled_bytes=state.pulled_bytes,
                )
                for state in states
            ),
            results=results,
        )
        if run.is_over:
            self._last_summary = summary
        return summary

    async def _state_of(self, member: PserverMember) -> PserverState:
        response = await self.http.get(member.info.address + STATE, timeout=PSERVER_TIMEOUT_SECONDS)
        response.raise_for_status()
        return PserverState.model_validate_json(response.content)

    async def ask_pservers(self, ask: Callable[[PserverMember], Awaitable[T]]) -> list[T]:
        """Ask all living pservers at once, in the order of their indices; those that do not answer are left out."""
        members = [member for _, member in sorted(self.cluster.registry.members.items())]
        answers = await asyncio.gather(*(ask(m) for m in members), return_exceptions=True)
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("a pserver did not answer", pserver=member.info.index, error=repr(answer))
        return [answer for answer in answers if not isinstance(answer, BaseException)]
