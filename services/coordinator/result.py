"""The result of a run: its summary, and the checkpoint of its last round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from ps_protocol.errors import GradpostError, NotReady, StaleRound
from ps_protocol.messages import PserverState, RunSummary, ShardSummary
from ps_protocol.vocabulary import Round
from services.runtime.logs import get_logger

from .pserver_calls import RESULT_SECONDS, WaitLog, read_state, want_checkpoint
from .state.cluster import Cluster
from .state.run import Run
from .state.status import copy_fields

log = get_logger()

RETRY_SECONDS = 1.0


class RunResult:
    """The result of the newest run. `wait_until` waits for a condition, for at most some seconds."""

    def __init__(
        self,
        cluster: Cluster,
        http: httpx.AsyncClient,
        now: Callable[[], float],
        wait_until: Callable[[Callable[[], bool], float], Awaitable[None]],
        waits: WaitLog,
    ) -> None:
        self._cluster = cluster
        self._http = http
        self._now = now
        self._wait_until = wait_until
        self._waits = waits
        self._last_summary: RunSummary | None = None
        self._summed_up: tuple[str, float | None, Round] = "", None, 0  # run, start and round of the newest summary
        self._summed_up_at = 0.0  # when its first summary was made

    async def save(self, run: Run) -> None:
        """Make the summary of a finished run, and a checkpoint of its last round. Then its pservers may exit."""
        cluster = self._cluster
        await self._make_summary()
        if cluster.is_current(run) and cluster.is_saving_result:
            await self._write_checkpoint(run)
            await self._make_summary()  # again, in case the checkpoint lacks rounds and the run has failed
        cluster.update(run, Run.note_saved_result)

    def find_summary(self, run: str) -> RunSummary | None:
        """Return the summary of a run that is over; None if it is not made yet, or another run has begun."""
        return self._last_summary if self._last_summary is not None and self._last_summary.run == run else None

    async def _write_checkpoint(self, run: Run) -> None:
        """Write the run's last checkpoint. A pserver that dies meanwhile may return within the rejoin time-out."""
        deadline = self._now() + run.settings.rejoin_timeout_seconds
        logged = ""
        while (problem := await self._try_to_write_checkpoint(run)) is not None:
            if self._now() > deadline:
                log.error("the run's last round has no checkpoint", error=problem)
                return
            if problem != logged:
                log.warning("the checkpoint of the run's last round is delayed", error=problem)
            logged = problem
            await asyncio.sleep(RETRY_SECONDS)

    async def _try_to_write_checkpoint(self, run: Run) -> str | None:
        """Try to write the run's last checkpoint. Returns the problem, or None."""
        cluster = self._cluster
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                rounds = [state.round for state in await self._read_states() if state.run == run.record.name]
                if len(rounds) < cluster.registry.num_pservers:
                    return f"{len(rounds)} of {cluster.registry.num_pservers} pservers have the run"
                round_ = max(rounds)
                try:
                    while (newer := await self._request_checkpoint(run.record.name, round_)) is not None:
                        round_ = newer
                except NotReady:
                    if round_ == 0:
                        return None  # the run ended without initial values
                    raise
                await self._wait_until(  # heartbeats report it
                    lambda: not cluster.is_current(run) or round_ in cluster.run.complete_checkpoints, RESULT_SECONDS
                )
                cluster.update(run, lambda last: last.fail_for_lost_rounds(round_, last.highest_round, self._now()))
        except (TimeoutError, httpx.HTTPError, GradpostError, ValueError) as error:
            return repr(error)
        return None

    async def _request_checkpoint(self, run: str, round_: Round) -> Round | None:
        """Request the last checkpoint. Returns a later round if a pserver has applied more than it reported."""
        members = self._cluster.registry.members.values()
        try:
            await asyncio.gather(*(want_checkpoint(self._http, m, run, round_, is_over=True) for m in members))
        except StaleRound as error:
            if (current := error.facts.get("current")) is None or current <= round_:
                raise
            return int(current)
        return None

    async def summary(self) -> RunSummary:
        """Return the summary of the run. Once it is over, its result is on the disk when this returns."""
        run = self._cluster.run
        if run.record.is_deserted:
            await self._wait_until(
                lambda: self._cluster.run.is_result_saved or not self._cluster.is_current(run), RESULT_SECONDS
            )
        return await self._make_summary()

    async def _make_summary(self) -> RunSummary:
        run = self._cluster.run
        last = self._last_summary
        if last is not None and (last.run, last.state) == (run.record.name, run.record.state) and run.record.is_over:
            return last
        answers = await self._read_states()
        run = self._cluster.refresh(run)
        states = [state for state in answers if state.run == run.record.name]
        is_ring = run.settings.consistency.is_ring
        rounds = run.highest_round if is_ring else min((state.round for state in states), default=0)
        carried = ["ring"] if is_ring else sorted({f"HTTP/{v}" for state in states for v in state.transports})
        # All trainers print their summary at the end, and after the same round each gets the same seconds.
        if self._summed_up != (run.record.name, run.started_at, rounds):
            self._summed_up, self._summed_up_at = (run.record.name, run.started_at, rounds), self._now()
        end = self._summed_up_at if run.ended_at is None else run.ended_at
        results: dict[str, float] = {}
        for _, report in sorted(run.reports.items(), reverse=True):
            results.update(report.heartbeat.results)  # the lowest rank's results win
        summary = RunSummary(
            run=run.record.name,
            state=run.record.state,
            mode=run.settings.mode,
            transport="+".join(carried) or "none",
            num_trainers=len(run.record.trainers),
            rounds=rounds,
            earlier_rounds=min(run.first_round or 0, rounds),
            seconds=0.0 if run.started_at is None else max(0.0, end - run.started_at),
            shards=tuple(copy_fields(ShardSummary, state, pserver=state.index or 0) for state in states),
            results=results,
        )
        if run.record.is_over:
            self._last_summary = summary
        return summary

    async def _read_states(self) -> list[PserverState]:
        """Return the states of all living pservers in order of their indices, without those that do not answer."""
        members = self._cluster.registry.sorted_members
        answers = await asyncio.gather(*(read_state(self._http, member) for member in members), return_exceptions=True)
        for member, answer in zip(members, answers, strict=True):
            self._waits.note(member.info.index, answer if isinstance(answer, BaseException) else None)
        return [answer for answer in answers if not isinstance(answer, BaseException)]
