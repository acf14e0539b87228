"""The statistics of parameters: merged from those of blocks, and cached."""

from __future__ import annotations

import asyncio
from functools import reduce

from pydantic import TypeAdapter

from ps_protocol.routes import BLOCK_STATISTICS
from services.runtime.statistics import ParameterStatistics, Statistics

from ..coordinator import Coordinator
from .parameters import find_parameter
from .reading import current_plan, find_member, get_from, round_everywhere

STEP_SECONDS = 1.0  # for the next update, whose size is part of the answer
FRESH_SECONDS = 1.0  # a younger answer is sent again

_LIST = TypeAdapter(list[Statistics])


class StatisticsCache:
    """The newest statistics of each parameter, so that the load on pservers does not grow with the readers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._cached: dict[tuple[str, str], tuple[float, asyncio.Task[bytes]]] = {}  # by run and name; when requested

    async def describe(self, name: str) -> bytes:
        """Return `ParameterStatistics` as JSON, at most a second old. Raises NotFound, NotReady, TryAgain."""
        now, run = self._coordinator.now(), self._coordinator.cluster.run.record.name
        for key, (asked_at, task) in tuple(self._cached.items()):
            if task.done() and (now - asked_at > FRESH_SECONDS or task.exception() is not None):
                del self._cached[key]
        if (run, name) not in self._cached:
            self._cached[run, name] = now, asyncio.create_task(self._read(name), name="statistics")
        return await asyncio.shield(self._cached[run, name][1])

    async def _read(self, name: str) -> bytes:
        coordinator, run = self._coordinator, self._coordinator.cluster.run
        plan = current_plan(coordinator)
        spec, blocks = find_parameter(plan, name), plan.blocks_of[name]
        is_moving = run.record.state == "training" and not run.record.awaited
        answers = await asyncio.gather(
            *(
                get_from(
                    coordinator,
                    find_member(coordinator, index),
                    BLOCK_STATISTICS,
                    {
                        "name": [block.name for block in blocks if block.pserver == index],
                        "wait_seconds": STEP_SECONDS if is_moving else 0.0,
                    },
                )
                for index in sorted({block.pserver for block in blocks})
            )
        )
        described = [part for answer in answers for part in _LIST.validate_json(answer)]
        total = reduce(Statistics.merge, described or [Statistics(version=round_everywhere(coordinator))])
        is_frozen = name in run.record.membership.newest_controls.frozen
        return (
            ParameterStatistics(
                run=run.record.name, name=name, shape=spec.shape, is_frozen=is_frozen, **total.describe()
            )
            .model_dump_json()
            .encode()
        )
