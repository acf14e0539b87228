"""The statistics of parameters: merged from those of blocks, and cached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from ps_protocol.errors import TryAgain
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import BLOCK_STATISTICS
from ps_protocol.vocabulary import Block, ParameterSpec, PserverIndex, Round
from services.runtime.statistics import ParameterStatistics, Statistics

from ..coordinator import Coordinator
from .parameters import find_parameter, owners_of
from .reading import TRIES, current_plan, find_member, get_from, round_everywhere

STEP_SECONDS = 1.0  # for the next update, whose size is part of the answer
FRESH_SECONDS = 1.0  # a younger answer is sent again
SPACING_SECONDS = 0.5  # between batches: a request costs a pserver more than a small parameter
MAX_BATCH_ELEMENTS = 16 * 1024 * 1024  # of the parameters of a batch
MAX_BATCH_CHARACTERS = 2048  # of their names, which are part of the URL, as the names of a parameter's blocks are

_LIST = TypeAdapter(list[Statistics])


@dataclass(slots=True)
class _Batch:
    """Parameters of a plan whose statistics are requested together."""

    plan: SlicePlan
    specs: list[ParameterSpec] = field(default_factory=list)
    is_open: bool = True

    def has_room_for(self, plan: SlicePlan, spec: ParameterSpec) -> bool:
        num_elements = sum(known.num_elements for known in [*self.specs, spec])
        num_characters = sum(len(known.name) for known in [*self.specs, spec])
        fits = num_elements <= MAX_BATCH_ELEMENTS and num_characters <= MAX_BATCH_CHARACTERS
        return self.is_open and self.plan is plan and fits


@dataclass(slots=True)
class _CachedAnswer:
    asked_at: float
    answer: asyncio.Task[dict[str, bytes]]


class StatisticsCache:
    """The newest statistics of each parameter, so that the load on pservers does not grow with the readers.

    Requests for several parameters within half a second are sent together.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._run = ""
        self._cached: dict[str, _CachedAnswer] = {}
        self._batch: _Batch | None = None
        self._answer: asyncio.Task[dict[str, bytes]]  # the answer for that batch
        self._next_at = 0.0  # the earliest start of the next batch

    async def describe(self, name: str) -> bytes:
        """Return `ParameterStatistics` as JSON, at most a second old. Raises NotFound, NotReady, TryAgain."""
        coordinator = self._coordinator
        plan = current_plan(coordinator)
        spec, _ = find_parameter(plan, name)
        run = coordinator.cluster.run.record.name
        if run != self._run:
            self._run = run
            self._cached.clear()
        cached = self._cached.get(name)
        if cached is None or (cached.answer.done() and coordinator.now() - cached.asked_at > FRESH_SECONDS):
            cached = self._cached[name] = _CachedAnswer(coordinator.now(), self._join_batch(plan, spec))
        try:
            return (await asyncio.shield(cached.answer))[name]
        except Exception:
            if self._cached.get(name) is cached:
                del self._cached[name]  # an answer that is younger is sent again
            raise

    def _join_batch(self, plan: SlicePlan, spec: ParameterSpec) -> asyncio.Task[dict[str, bytes]]:
        if self._batch is None or not self._batch.has_room_for(plan, spec):
            now = self._coordinator.now()
            begin = max(now, self._next_at)
            self._next_at = begin + SPACING_SECONDS
            self._batch = _Batch(plan)
            self._answer = asyncio.create_task(self._ask(self._batch, begin - now), name="statistics")
            self._answer.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # its requesters may have left
        self._batch.specs.append(spec)
        return self._answer

    async def _ask(self, batch: _Batch, delay: float) -> dict[str, bytes]:
        await asyncio.sleep(delay)
        batch.is_open = False
        coordinator, plan = self._coordinator, batch.plan
        run = coordinator.cluster.run
        if run.record.plan is not plan:
            raise TryAgain("another run began during the request")
        found: dict[str, bytes] = {}
        for _ in range(TRIES):
            missing = [spec for spec in batch.specs if spec.name not in found]
            blocks = [block for spec in missing for block in plan.blocks_of[spec.name]]
            answers = await asyncio.gather(*(self._ask_one(index, blocks) for index in owners_of(blocks)))
            described = dict(item for answer in answers for item in answer.items())
            for spec in missing:
                parts = [described[block.name] for block in plan.blocks_of[spec.name]]
                if _are_alike(parts) or not run.settings.consistency.has_common_versions:
                    found[spec.name] = (
                        _merge(run.record.name, spec, parts, round_everywhere(coordinator)).model_dump_json().encode()
                    )
            if len(found) == len(batch.specs):
                return found
        raise TryAgain(f"the pservers applied rounds during each of {TRIES} attempts to read them; retry later")

    async def _ask_one(self, index: PserverIndex, blocks: Sequence[Block]) -> dict[str, Statistics]:
        names = [block.name for block in blocks if block.pserver == index]
        record = self._coordinator.cluster.run.record
        is_moving = record.state == "training" and not record.awaited
        parameters = {"name": names, "wait_seconds": STEP_SECONDS if is_moving else 0.0}
        member = find_member(self._coordinator, index)
        described = _LIST.validate_json(await get_from(self._coordinator, member, BLOCK_STATISTICS, parameters))
        return dict(zip(names, described, strict=True))


def _are_alike(blocks: Sequence[Statistics]) -> bool:
    """Return whether these blocks are of one round. A block without an update is of every round."""
    return len({None if block.update_squares is None else block.version for block in blocks}) <= 1


def _merge(run: str, spec: ParameterSpec, blocks: Sequence[Statistics], round_: Round) -> ParameterStatistics:
    version = min((block.version for block in blocks), default=round_)
    total = Statistics(version=version, num_elements=0, update_squares=0.0, before_squares=0.0)
    for block in blocks:
        total = total.merge(block)
    return ParameterStatistics(run=run, name=spec.name, shape=spec.shape, **total.describe())
