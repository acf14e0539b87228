"""The result of a run: its summary, and the checkpoint of its last round."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from ps_protocol.errors import RunStopped, TryAgain
from ps_protocol.messages import RunSummary
from ps_protocol.vocabulary import Round
from services.runtime.logs import get_logger

from .checkpoints import Checkpoints
from .shell import Shell
from .state.run import Run

log = get_logger()

RESULT_SECONDS = 60.0  # for a request to wait for the checkpoint of a finished run


class RunResult:
    """The result of the newest run."""

    def __init__(self, shell: Shell, checkpoints: Checkpoints) -> None:
        self._shell = shell
        self._checkpoints = checkpoints
        self._saving: asyncio.Task[None] | None = None
        self._last_summary: RunSummary | None = None
        # When a summary of the newest run, start and round was made first.
        self._ends: dict[tuple[str, float | None, Round], float] = {}

    def save_if_due(self) -> None:
        """Begin to save the result of a run that its trainers have left, unless that is done or under way."""
        run = self._shell.cluster.run
        if run.record.is_deserted and not run.is_result_saved and (self._saving is None or self._saving.done()):
            self._saving = asyncio.create_task(self._save(run), name="save the result")

    async def _save(self, run: Run) -> None:
        """Make a checkpoint of a finished run's last round, and then the summary. Then its pservers may exit."""
        cluster = self._shell.cluster
        try:
            if cluster.is_current(run) and cluster.is_saving_result:
                await self._write_checkpoint(run)
            if warning := (await self._make_summary()).warning:
                log.warning(warning)
            cluster.update(run, lambda newest: replace(newest, is_result_saved=True))
        finally:
            self._shell.changed()

    def find_summary(self, run: str) -> RunSummary | None:
        """Return the summary of a run that is over; None if it is not made yet, or another run has begun."""
        return self._last_summary if self._last_summary is not None and self._last_summary.run == run else None

    async def _write_checkpoint(self, run: Run) -> None:
        """Make the run's last checkpoint. A pserver that dies meanwhile may return within the rejoin time-out."""
        shell = self._shell
        await shell.read_states()
        if max(shell.cluster.rounds, default=0) == 0:
            return  # the run ended without a round
        try:
            round_ = await self._checkpoints.make(run, run.settings.rejoin_timeout_seconds, math.inf)
        except TryAgain as error:
            log.error("the run's last round has no checkpoint", error=error.detail)
            return
        shell.cluster.update(run, lambda last: last.fail_for_lost_rounds(round_, last.highest_round, shell.now()))

    async def summary(self) -> RunSummary:
        """Return the summary of the run. Once it is over, its result is on the disk when this returns."""
        cluster, run = self._shell.cluster, self._shell.cluster.run
        if run.record.is_deserted:
            await self._shell.wait_until(
                lambda: cluster.run.is_result_saved or not cluster.is_current(run), RESULT_SECONDS
            )
        return await self._make_summary()

    async def _make_summary(self) -> RunSummary:
        run = self._shell.cluster.run
        last = self.find_summary(run.record.name)
        if last is not None and last.state == run.record.state:
            return last
        answers = await self._shell.read_states()
        run = self._shell.cluster.refresh(run)
        states = [state for state in answers if state.run == run.record.name]
        is_ring = run.settings.consistency.is_ring
        rounds = run.highest_round if is_ring else min((state.round for state in states), default=run.highest_round)
        carried = ["ring"] if is_ring else sorted({f"HTTP/{v}" for state in states for v in state.transports})
        # All trainers print their summary at the end, and after the same round each gets the same seconds.
        of = run.record.name, run.started_at, rounds
        self._ends = {of: self._ends.get(of, self._shell.now())}
        end = self._ends[of] if run.ended_at is None else run.ended_at
        results: dict[str, float] = {}
        for _, report in sorted(run.reports.items(), reverse=True):
            results.update(report.heartbeat.results)  # the lowest rank's results win
        summary = RunSummary(
            run=run.record.name,
            state=run.record.state,
            is_stopped=isinstance(run.record.failure, RunStopped),
            mode=run.settings.mode,
            transport="+".join(carried) or "none",
            num_trainers=len(run.record.trainers),
            rounds=rounds,
            earlier_rounds=min(run.first_round or 0, rounds),
            seconds=0.0 if run.started_at is None else max(0.0, end - run.started_at),
            shards=tuple(states),
            results=results,
            warning=run.describe_left_early(rounds),
        )
        if run.record.is_over:
            self._last_summary = summary
        return summary
