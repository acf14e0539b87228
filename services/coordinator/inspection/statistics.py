"""Statistics of parameters: pservers describe their blocks, which are merged here; asked often, answered once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from ps_protocol.routes import BLOCK_STATISTICS
from ps_protocol.statistics import Statistics
from ps_protocol.vocabulary import Block, Round

from ..coordinator import Coordinator
from ..pservers import PserverMember
from .parameters import find_parameter, owners_of
from .reading import current_plan, get_from, read_alike

STEP_SECONDS = 1.0  # for the next update, whose size is part of what is asked for
FRESH_SECONDS = 1.0  # who asks again sooner gets the same answer

_LIST = TypeAdapter(list[Statistics])


@dataclass(frozen=True, slots=True)
class _Answer:
    attempt: int
    statistics: list[Statistics]

    @property
    def version(self) -> Round:
        return min(one.version for one in self.statistics)


@dataclass(slots=True)
class _Kept:
    asked_at: float
    answer: asyncio.Task[dict[str, Any]]


class ParameterStatistics:
    """Keeps the newest of each parameter of the run, so that a hundred who look cost the pservers what one does."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._run = ""
        self._kept: dict[str, _Kept] = {}

    async def describe(self, name: str) -> dict[str, Any]:
        """Of one parameter, not older than a second; see `Statistics.describe`. Raises NotFound, NotReady, TryAgain."""
        coordinator = self._coordinator
        spec, blocks = find_parameter(current_plan(coordinator), name)
        run = coordinator.cluster.run.name
        if run != self._run:
            self._run = run
            self._kept.clear()
        kept = self._kept.get(name)
        if kept is None or coordinator.now() - kept.asked_at > FRESH_SECONDS:
            answer = asyncio.create_task(self._ask(name, list(spec.shape), blocks), name="statistics")
            answer.add_done_callback(lambda task: task.cancelled() or task.exception())  # who asked may have left
            kept = self._kept[name] = _Kept(coordinator.now(), answer)
        try:
            return await asyncio.shield(kept.answer)
        except Exception:
            self._kept.pop(name, None)  # who asks again tries again
            raise

    async def _ask(self, name: str, shape: list[int], blocks: Sequence[Block]) -> dict[str, Any]:
        coordinator = self._coordinator
        run = coordinator.cluster.run

        async def ask(member: PserverMember, named: Round | None) -> _Answer:
            # What a round was named for is that all update it together: then their next updates are of one round, too.
            names = [block.name for block in blocks if block.pserver == member.info.index]
            is_moving = run.state == "training" and not run.awaited
            parameters = {"name": names, "wait_seconds": STEP_SECONDS if is_moving else 0.0}
            return _Answer(
                run.attempt, _LIST.validate_json(await get_from(coordinator, member, BLOCK_STATISTICS, parameters))
            )

        answers = await read_alike(coordinator, owners_of(blocks), ask)
        total = Statistics(version=min((answer.version for answer in answers), default=0), num_elements=0)
        total = total.model_copy(update={"update_squares": 0.0, "before_squares": 0.0})
        for answer in answers:
            for one in answer.statistics:
                total = total.merge(one)
        return {"run": run.name, "name": name, "shape": shape, **total.describe()}
