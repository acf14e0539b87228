"""The reading part of the coordinator's API: the state of the cluster, live parameters, and their statistics.

Its routes need the scope `read`, and change nothing. A file of parameters is of one version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import reduce
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response
from pydantic import BaseModel, TypeAdapter

from ps_config.process_meter import measure_process
from ps_protocol import routes
from ps_protocol.fields import Name, OrdinalText
from ps_protocol.frames import CONTENT_TYPE, encode_header
from ps_protocol.messages import ClusterStatus
from ps_protocol.process_reports import TrainerOutput
from ps_protocol.vocabulary import DTYPE_BYTES, PserverIndex, Round
from services.runtime.large_replies import LargeReplies, LargeReply, Stream
from services.runtime.statistics import ParameterStatistics, Statistics

from .administration import describe_overrides
from .coordinator import Coordinator
from .curves import MAX_POINTS, CurveList
from .events import MAX_EVENTS, Event
from .reading import IncomingFrame, current_plan, find_member, get_from, open_frames
from .state.model import find_parameter
from .state.status import describe_status

STEP_SECONDS = 1.0  # for the next update, whose size is part of the answer
FRESH_SECONDS = 1.0  # a younger answer is sent again

_LIST = TypeAdapter(list[Statistics])

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE: dict[int | str, dict[str, Any]] = {200: {"content": {CONTENT_TYPE: _BINARY}}}


def add_inspection_routes(app: FastAPI, coordinator: Coordinator) -> None:
    """Add the routes to the application."""
    large = LargeReplies()
    statistics = StatisticsCache(coordinator)

    @app.get(routes.STATUS, tags=["inspection"])
    async def status() -> ClusterStatus:
        """Return the state of the cluster and its members, with their newest heartbeats."""
        cluster, now = coordinator.cluster, coordinator.now()
        overrides = describe_overrides(cluster.run, coordinator.events.after(0))
        process = measure_process()
        return describe_status(cluster.shown_run, cluster.registry, now, time.time(), process, overrides)

    @app.get(routes.OUTPUT, tags=["inspection"])
    async def output(rank: OrdinalText) -> TrainerOutput:
        """Return the newest lines that a trainer's script wrote, and the traceback of a failed one."""
        return coordinator.output.describe(coordinator.cluster.run, rank)

    @app.get(routes.PARAMETERS, tags=["inspection"])
    async def parameters() -> ParameterList:
        """Return all parameters with their shapes, blocks and owners."""
        return describe_parameters(coordinator)

    @app.get(routes.PARAMETER, tags=["inspection"], response_class=Response, responses=_FILE)
    async def parameter(
        name: Name, form: Annotated[Literal["safetensors"], Query(alias="format")] = "safetensors"
    ) -> Response:
        """Return one parameter, live, as a safetensors file of `format`; its version is in `gradpost-round`.

        In the synchronous mode all blocks are of one round.
        """
        return LargeReply(large, lambda: open_file(coordinator, name), CONTENT_TYPE)

    @app.get(routes.STATISTICS, tags=["inspection"], response_model=ParameterStatistics)
    async def parameter_statistics(name: Name) -> Response:
        """Return the norm, mean, deviation, extremes, NaN count, histogram and newest update of one parameter.

        An answer may be a second old. `update_ratio` is null if no update was seen.
        """
        return Response(await statistics.describe(name), media_type="application/json")

    @app.get(routes.MODEL, tags=["inspection"], response_class=Response, responses=_FILE)
    async def model() -> Response:
        """Return the whole model of one round, with buffers and tied names, for `load_state_dict`."""
        return LargeReply(large, lambda: open_file(coordinator), CONTENT_TYPE)

    @app.get(routes.CURVES, tags=["inspection"], response_model=CurveList)
    async def curves(max_points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = MAX_POINTS) -> dict[str, Any]:
        """Return the results that trainers report (`Session.report`), as curves by name and rank, in columns.

        A point is the mean of `count` values. A curve has at most `max_points` points, which are means of more values
        if there are more; all curves together have at most 100,000.
        """
        return coordinator.curves.describe(max_points)

    @app.get(routes.EVENTS, tags=["inspection"])
    async def events(
        after: Annotated[OrdinalText, Query()] = 0, limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100
    ) -> list[Event]:
        """Return the newest events after the id `after`, oldest first."""
        return coordinator.events.after(after)[-limit:]


# ---------------------------------------------------------------- parameters


class BlockEntry(BaseModel):
    """A block in the list: elements `begin` to `end` of the flattened parameter."""

    name: str
    begin: int
    end: int
    pserver: PserverIndex


class ParameterEntry(BaseModel):
    """A parameter in the list; `bytes` is the size of its values in its own dtype.

    `optimizer` is the name of its optimizer, if the run has several.
    """

    name: str
    shape: list[int]
    dtype: str
    group: int
    optimizer: str | None
    bytes: int
    blocks: list[BlockEntry]


class ParameterList(BaseModel):
    """All parameters in the model's order; `version` is the newest round that all pservers have applied."""

    run: str
    digest: str
    version: Round
    parameters: list[ParameterEntry]


def describe_parameters(coordinator: Coordinator) -> ParameterList:
    """Return all parameters with their blocks, in the model's order."""
    plan = current_plan(coordinator)
    return ParameterList(
        run=coordinator.cluster.run.record.name,
        digest=plan.digest,
        version=min(coordinator.cluster.rounds, default=0),
        parameters=[
            ParameterEntry(
                name=spec.name,
                shape=list(spec.shape),
                dtype=spec.dtype,
                group=spec.group,
                optimizer=None if plan.optimizer is None else plan.optimizer.find_member(spec.group),
                bytes=spec.num_elements * DTYPE_BYTES[spec.dtype],
                blocks=[
                    BlockEntry(name=block.name, begin=block.begin, end=block.end, pserver=block.pserver)
                    for block in plan.blocks_of[spec.name]
                ],
            )
            for spec in plan.parameters
        ],
    )


@asynccontextmanager
async def open_file(coordinator: Coordinator, name: str | None = None) -> AsyncIterator[Stream]:
    """Open a safetensors file of one parameter or, without a name, of the model, for `load_state_dict`.

    The model has tied names and buffers, too. Every pserver sends its blocks in plan order, then its buffers. The file
    has the same order, so that at most one tensor is held here. In asynchronous modes each shard is of its own version,
    which the metadata describes. Raises NotFound, NotReady, TryAgain, RoundPending.
    """
    plan, run = current_plan(coordinator), coordinator.cluster.run
    specs = plan.parameters if name is None else [find_parameter(plan, name)]
    buffers = plan.buffers if name is None else ()
    pieces = {spec.name: [(b.pserver, plan.block_bytes(b)) for b in plan.blocks_of[spec.name]] for spec in specs}
    pieces |= {spec.name: [(spec.pserver, spec.num_bytes)] for spec in buffers}
    further: dict[str, list[str]] = {}
    if name is None and run.record.declaration is not None:
        for alias, of in run.record.declaration.aliases.items():
            further.setdefault(of, []).append(alias)
    entries = [(key, s.dtype, s.shape) for s in (*specs, *buffers) for key in (s.name, *further.get(s.name, ()))]
    names: dict[PserverIndex, list[str]] = {index: [] for index in range(plan.num_pservers)}
    if name is not None:
        owners = {block.pserver for block in plan.blocks_of[name]}
        names = {index: [b.name for b in plan.blocks_of[name] if b.pserver == index] for index in sorted(owners)}
    async with open_frames(coordinator, names) as frames:
        metadata = {"format": "pt", "run": run.record.name, **_describe(coordinator, frames)}
        header = encode_header(entries, metadata)

        async def parts() -> AsyncIterator[bytes]:
            yield header
            for key, of_tensor in pieces.items():
                copies: list[bytes] = []
                for pserver, num_bytes in of_tensor:
                    async for part in frames[pserver].read(num_bytes):
                        yield part
                        if key in further:
                            copies.append(part)
                for part in copies * len(further.get(key, ())):
                    yield part

        sizes = {key: sum(size for _, size in of_tensor) for key, of_tensor in pieces.items()}
        num_bytes = len(header) + sum(size * (1 + len(further.get(key, ()))) for key, size in sizes.items())
        file = f"{run.record.name}-round-{metadata['round']}.safetensors"
        headers = {"gradpost-round": metadata["round"], "content-disposition": f'attachment; filename="{file}"'}
        yield Stream(num_bytes, parts(), headers)


def _describe(coordinator: Coordinator, frames: Mapping[PserverIndex, IncomingFrame]) -> dict[str, str]:
    """Return the version of the frames: the run may have been rolled back since it was read."""
    run, versions = coordinator.cluster.run, [frame.version for frame in frames.values()]
    described = {
        "attempt": str(max((frame.attempt for frame in frames.values()), default=run.record.attempt)),
        "round": str(min(versions, default=min(coordinator.cluster.rounds, default=0))),
    }
    for index, frame in frames.items():
        facts = {key: value for key, value in frame.metadata.items() if key not in ("run", "attempt", "round")}
        described |= {f"pserver{index}.{key}": value for key, value in facts.items()}
    return described


# ---------------------------------------------------------------- statistics


class StatisticsCache:
    """The newest statistics of each parameter, so that the load on pservers does not grow with the readers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._cached: dict[tuple[str, str], tuple[float, asyncio.Task[bytes]]] = {}  # by run and name; when requested

    async def describe(self, name: str) -> bytes:
        """Return `ParameterStatistics` as JSON, at most a second old. Raises NotFound, NotReady, TryAgain."""
        now, run = self._coordinator.now(), self._coordinator.cluster.run.record.name
        self._cached = {
            key: (asked_at, task)
            for key, (asked_at, task) in self._cached.items()
            if not task.done() or (now - asked_at <= FRESH_SECONDS and task.exception() is None)
        }
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
                    routes.BLOCK_STATISTICS,
                    {
                        "name": [block.name for block in blocks if block.pserver == index],
                        "wait_seconds": STEP_SECONDS if is_moving else 0.0,
                    },
                )
                for index in sorted({block.pserver for block in blocks})
            )
        )
        described = [part for answer in answers for part in _LIST.validate_json(answer)]
        total = reduce(Statistics.merge, described or [Statistics(version=min(coordinator.cluster.rounds, default=0))])
        is_frozen = name in run.record.membership.newest_controls.frozen
        return (
            ParameterStatistics(
                run=run.record.name, name=name, shape=spec.shape, is_frozen=is_frozen, **total.describe()
            )
            .model_dump_json()
            .encode()
        )
