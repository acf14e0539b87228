"""The application of block updates, many of them in one job of `ComputeExecutor`.

Stepping a small block takes less time than a job, a call of the optimizer and a notification of the waiting requests.
So the updates that are due in one turn of the event loop share these three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from ...shard.compensation import compensate_gradient, divide_rates
from ...shard.tensors import StagedBlock
from ..context import RunContext
from .clocks import Clocks
from .queues import BlockUpdate


@dataclass(slots=True)
class _Due:
    """An update that the worker of a block waits for."""

    name: str
    update: BlockUpdate
    done: asyncio.Future[None]
    error: Exception | None = None


class UpdateJobs:
    """The jobs that apply updates. Those of one contribution are stepped together, and a failure stops all of them.

    The layout makes the bits of a block independent of the blocks that are stepped with it.
    """

    def __init__(self, context: RunContext, schedule: Clocks[StagedBlock]) -> None:
        self._context = context
        self._schedule = schedule
        self._shard = context.shard
        self._rules = context.installed.consistency
        self._due: list[_Due] = []  # in this turn of the event loop
        self._newest: asyncio.Task[None] | None = None

    async def apply(self, name: str, update: BlockUpdate) -> None:
        """Apply an update of a block, for its worker. Raises the error of its step."""
        if not self._due:
            self._newest = asyncio.create_task(self._apply_due(), name="updates")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._due.append(_Due(name, update, done))
        await done

    async def _apply_due(self) -> None:
        due = [each for each in self._due if not each.done.cancelled()]  # a queue that is closed cancels its worker
        self._due = []
        if not due:
            return
        begin = perf_counter()
        try:
            await self._context.run_update(self._step_all, due)
        except Exception as error:  # before any step, as once the compute thread is closed; no worker waits for ever
            for each in due:
                each.error = error
        seconds = perf_counter() - begin
        metrics, before = self._context.metrics, self._schedule.applied
        for each in due:
            if each.error is None:
                metrics.apply_seconds.observe(seconds)
                self._schedule.count_applied_block(each.update.committed)
        self._shard.version = self._schedule.applied
        metrics.rounds.inc(self._schedule.applied - before)
        metrics.updates.inc(sum(each.error is None for each in due))
        for each in due:
            if each.done.cancelled():
                continue
            if each.error is None:
                each.done.set_result(None)
            else:
                each.done.set_exception(each.error)
        await asyncio.sleep(0)  # the workers go first: the waiting requests read the queues
        await self._context.notify()

    def _step_all(self, due: Sequence[_Due]) -> None:
        """Step blocks, each of them once, as a job."""
        together: dict[tuple[int, int], list[_Due]] = {}  # with the same hyperparameters and counter
        for each in due:
            staleness = self._shard.versions[each.name] - each.update.pull.versions[each.name]
            self._context.metrics.staleness.observe(staleness)
            divisor = staleness if self._rules.compensation == "divide" else 1
            together.setdefault((each.update.committed.number, divisor), []).append(each)
        for (_, divisor), group in together.items():
            try:
                self._step(group, divisor)
            except Exception as error:
                for each in group:
                    each.error = error

    def _step(self, group: Sequence[_Due], divisor: int) -> None:
        rules, shard, gradients = self._rules, self._shard, {}
        for each in group:
            gradient, place = each.update.block.tensor(), shard.layout.place[each.name]
            if rules.compensation == "dc" and not place.buffer_rule:
                assert each.update.pull.values is not None
                pulled = each.update.pull.values[place.begin : place.end]
                gradient = compensate_gradient(gradient, shard.block(each.name), pulled, rules.dc_lambda)
            gradients[each.name] = gradient
        first = group[0].update
        shard.apply_blocks(gradients, divide_rates(first.hyper_parameters, divisor), counter=first.committed.rank)
