"""The reading part of the coordinator's API: the state of the cluster, live parameters, and their statistics.

Its routes need the scope `read`, and change nothing. A file of parameters is of one version: rounds go on while
pservers answer, so if their newest rounds differ, a later round is named, and each pserver answers when it has applied
it. Tensors are streamed: a frame is never held as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import reduce
from typing import Annotated, Any, Literal

import httpx
from fastapi import FastAPI, Query, Response
from pydantic import BaseModel, TypeAdapter

from ps_config.control_client import may_be_problem, raise_for_problem
from ps_config.process_meter import measure_process
from ps_protocol import routes
from ps_protocol.errors import NotReady, StaleRound, TryAgain
from ps_protocol.fields import Name, OrdinalText
from ps_protocol.frames import (
    CONTENT_TYPE,
    LENGTH_BYTES,
    TRUSTED_LIMITS,
    Frame,
    encode_header,
    parse_header,
    parse_length,
)
from ps_protocol.messages import ClusterStatus
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import SHARD
from ps_protocol.vocabulary import DTYPE_BYTES, PserverIndex, Round
from services.runtime.app import PART_BYTES, LargeReplies, LargeReply, Stream
from services.runtime.statistics import ParameterStatistics, Statistics

from .coordinator import Coordinator
from .events import MAX_EVENTS, Event
from .history import MAX_POINTS, CurveList
from .state.joining import find_parameter
from .state.pservers import PserverMember
from .state.status import describe_status

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
        return describe_status(cluster.shown_run, cluster.registry, now, time.time(), measure_process())

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
        """Return the norm, mean, deviation, extremes, NaN count and histogram of one parameter.

        An answer may be a second old.
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
        answers = await asyncio.gather(
            *(
                get_from(
                    coordinator,
                    find_member(coordinator, index),
                    routes.BLOCK_STATISTICS,
                    {"name": [block.name for block in blocks if block.pserver == index]},
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


# ---------------------------------------------------------------- reads of several pservers at one version

TRIES = 6
WAIT_SECONDS = 10.0  # until a named round is applied
READ_SECONDS = 30.0  # for the answer itself


def current_plan(coordinator: Coordinator) -> SlicePlan:
    """Return the run's plan. Raises NotReady without one, and Conflict (`no_pservers`) in a ring."""
    coordinator.cluster.require_pservers()
    plan = coordinator.cluster.run.record.plan
    if plan is None:
        raise NotReady("no run has begun, so there are no parameters yet", waiting_for=coordinator.cluster.waiting_for)
    return plan


def find_member(coordinator: Coordinator, index: PserverIndex) -> PserverMember:
    """Return a living pserver. Raises NotReady if it is not registered."""
    member = coordinator.cluster.registry.members.get(index)
    if member is None:
        raise NotReady(f"pserver {index} is not registered", waiting_for=f"pserver {index}")
    return member


async def get_from(coordinator: Coordinator, member: PserverMember, route: str, parameters: dict[str, Any]) -> bytes:
    """Return the body of a pserver's answer. Raises its GradpostError, or TryAgain without an answer."""
    try:
        response = await coordinator.http.get(
            member.info.address + route, params=parameters, timeout=READ_SECONDS + WAIT_SECONDS
        )
        raise_for_problem(response)
    except httpx.HTTPError as error:
        raise TryAgain(f"pserver {member.info.index} did not answer: {error!r}") from error
    return response.content


STILL_SECONDS = 7.0  # a server closes a stalled connection after `body_timeout_seconds`, which is longer
PARTS_AT_ONCE = 2  # more than the kernels' buffers between two processes hold
GONE = "a pserver went away while its shard was being read"


class IncomingFrame:
    """A pserver's frame: a parsed header with the version, and data that is read in order.

    `version` is the round; in asynchronous modes the number of contributions.
    """

    def __init__(self, frame: Frame, parts: AsyncIterator[bytes], rest: bytes) -> None:
        self.metadata = dict(frame.metadata)
        self.run = self.metadata["run"]
        self.attempt = int(self.metadata["attempt"])
        self.version: Round = int(self.metadata["round"])
        self._parts = parts
        self._rest = bytearray(rest)
        self._receive_lock = asyncio.Lock()

    async def _receive(self) -> bool:
        """Receive the next part. Returns False at the end. Raises httpx.HTTPError."""
        async with self._receive_lock:
            part = await anext(self._parts, None)
            self._rest += part or b""
            return part is not None

    async def drain_slowly(self) -> None:
        """Receive a little now and then, while the client still reads the tensors before this frame's."""
        with suppress(httpx.HTTPError):  # the reader gets the error
            while True:
                await asyncio.sleep(STILL_SECONDS / 2)
                for _ in range(PARTS_AT_ONCE):
                    if not await self._receive():
                        return

    async def read(self, num_bytes: int) -> AsyncIterator[bytes]:
        """Yield the next bytes. Raises TryAgain if the frame ends before."""
        while num_bytes:
            if not self._rest:
                try:
                    await self._receive()
                except httpx.HTTPError as error:
                    raise TryAgain(f"{GONE}: {error!r}") from error
            if not self._rest:
                raise TryAgain(GONE)
            part = bytes(self._rest[: min(num_bytes, PART_BYTES)])
            del self._rest[: len(part)]
            num_bytes -= len(part)
            yield part


@asynccontextmanager
async def open_frames(
    coordinator: Coordinator, names: Mapping[PserverIndex, Sequence[str]]
) -> AsyncIterator[dict[PserverIndex, IncomingFrame]]:
    """Open the frames of these pservers with these blocks (none: all of them).

    The frames are of one version, except in asynchronous modes. Raises NotReady, RoundPending, and TryAgain if the
    versions never agree.
    """
    has_common_versions = coordinator.cluster.run.settings.consistency.has_common_versions
    named: dict[str, Any] = {}
    ahead = 1
    for _ in range(TRIES):
        async with AsyncExitStack() as stack:
            opening = [
                _open_frame(coordinator, stack, find_member(coordinator, index), {**named, "name": list(of_pserver)})
                for index, of_pserver in names.items()
            ]
            answers = await asyncio.gather(*opening, return_exceptions=True)
            late = [error for error in answers if isinstance(error, StaleRound)]
            for error in answers:
                if isinstance(error, BaseException) and not isinstance(error, StaleRound):
                    raise error
            frames = [answer for answer in answers if not isinstance(answer, BaseException)]
            versions = {(frame.run, frame.attempt, frame.version) for frame in frames}
            if not late and (len(versions) <= 1 or not has_common_versions):
                async with _draining(frames):
                    yield dict(zip(names, frames, strict=True))
                return
        rounds = [version for _, _, version in versions]
        newest = max([*rounds, *(int(error.facts.get("current") or 0) for error in late)])
        named, ahead = {"round": newest + ahead, "wait_seconds": WAIT_SECONDS}, 2 * ahead
    raise TryAgain(f"the pservers applied rounds during each of {TRIES} attempts to read them; retry later")


@asynccontextmanager
async def _draining(frames: Sequence[IncomingFrame]) -> AsyncIterator[None]:
    """Drain the frames slowly during the block."""
    moving = [asyncio.create_task(frame.drain_slowly(), name="keep moving") for frame in frames]
    try:
        yield
    finally:
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)


async def _open_frame(
    coordinator: Coordinator, stack: AsyncExitStack, member: PserverMember, parameters: dict[str, Any]
) -> IncomingFrame:
    """Request a frame and read its header. The data arrives until the stack is closed."""
    try:
        response = await stack.enter_async_context(
            coordinator.http.stream(
                "GET", member.info.address + SHARD, params=parameters, timeout=READ_SECONDS + WAIT_SECONDS
            )
        )
        if may_be_problem(response):
            await response.aread()
        raise_for_problem(response)
        parts = response.aiter_bytes(PART_BYTES)
        begun = b""
        while len(begun) < LENGTH_BYTES or len(begun) < parse_length(begun, TRUSTED_LIMITS):
            begun += await anext(parts)
    except (httpx.HTTPError, StopAsyncIteration) as error:
        raise TryAgain(f"pserver {member.info.index} did not answer: {error!r}") from error
    data_begin = parse_length(begun, TRUSTED_LIMITS)
    return IncomingFrame(parse_header(begun[LENGTH_BYTES:data_begin], TRUSTED_LIMITS), parts, begun[data_begin:])
