"""The reading part of the coordinator's API, which needs the scope `read` and changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypeAlias

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Receive, Scope, Send

from ps_protocol import routes
from ps_protocol.errors import TryAgain
from ps_protocol.fields import Name, OrdinalText, Round
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.messages import ClusterStatus
from ps_protocol.process_reports import TrainerOutput
from services.runtime.large_replies import LargeReplies, LargeReply
from services.runtime.statistics import ParameterStatistics

from ..activity import MAX_POINTS, Activity, CurveList
from ..coordinator import Coordinator
from ..events import MAX_EVENTS, Event
from ..state.status import describe_status
from .formats import CONTENT_TYPES, Format
from .parameters import (
    ParameterList,
    describe_parameters,
    find_parameter,
    open_model,
    open_parameter,
    open_slots,
    owners_of,
    wait_for_newer,
)
from .reading import current_plan, read_versions, round_everywhere
from .statistics import StatisticsCache

MAX_WAIT_SECONDS = 30.0

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_VALUES: dict[int | str, dict[str, Any]] = {
    200: {"content": {CONTENT_TYPE: _BINARY, "application/octet-stream": _BINARY, "application/json": {}}},
    304: {"description": "The parameter is unchanged, or had no newer version in time."},
}
_FILE: dict[int | str, dict[str, Any]] = {200: {"content": {CONTENT_TYPE: _BINARY}}}

EventId: TypeAlias = Annotated[OrdinalText, Query()]


def add_inspection_routes(app: FastAPI, coordinator: Coordinator) -> None:
    """Add the routes to the application."""
    large = LargeReplies()
    statistics = StatisticsCache(coordinator)
    places = asyncio.Semaphore(MAX_STREAMS)

    @app.get(routes.STATUS, tags=["inspection"])
    async def status() -> ClusterStatus:
        """Return the state of the cluster and its members."""
        cluster, process = coordinator.cluster, coordinator.meter.measure()
        now = coordinator.now()
        standbys = coordinator.standbys.describe(now, cluster.registry.replicas)
        return describe_status(cluster.run, cluster.registry, now, process, standbys)

    @app.get(routes.ACTIVITY, tags=["inspection"])
    async def activity() -> Activity:
        """Return the rates, the barriers and the work of each member, from heartbeats."""
        return coordinator.activity.describe(coordinator.cluster, coordinator.now(), time.time())

    @app.get(routes.OUTPUT, tags=["inspection"])
    async def output(rank: OrdinalText) -> TrainerOutput:
        """Return the newest lines that a trainer's script wrote, and the traceback of a failed one."""
        return coordinator.output.describe(coordinator.cluster.run, rank)

    @app.get(routes.PARAMETERS, tags=["inspection"])
    async def parameters() -> ParameterList:
        """Return all parameters with their shapes, blocks and owners."""
        return describe_parameters(coordinator)

    @app.get(routes.PARAMETER, tags=["inspection"], response_class=Response, responses=_VALUES)
    async def parameter(
        name: Name,
        request: Request,
        form: Annotated[Format, Query(alias="format")] = "safetensors",
        after_version: Annotated[OrdinalText | None, Query(description="version to wait beyond, else 304")] = None,
        wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = MAX_WAIT_SECONDS,
    ) -> Response:
        """Return one parameter, live, with its version in the ETag and the body.

        In the synchronous mode all blocks are of one round. JSON is for parameters of at most 1,000 elements; NaN and
        the infinities are strings in it.
        """
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if known != [""] and after_version is None:
            _, blocks = find_parameter(current_plan(coordinator), name)
            versions = await read_versions(coordinator, owners_of(blocks)) or {round_everywhere(coordinator)}
            if len(versions) == 1 and (tag := _tag(coordinator, min(versions))) in known:
                return Response(status_code=304, headers={"etag": tag})
        if after_version is not None:
            has_other = known != [""] and not any(_is_of_this_attempt(coordinator, tag) for tag in known)
            if not has_other and not await wait_for_newer(coordinator, name, after_version, wait_seconds):
                return Response(status_code=304)

        return LargeReply(large, lambda: open_parameter(coordinator, name, form), CONTENT_TYPES[form])

    @app.get(routes.STATISTICS, tags=["inspection"], response_model=ParameterStatistics)
    async def parameter_statistics(name: Name) -> Response:
        """Return the norm, mean, deviation, extremes, NaN count, histogram and newest update of one parameter.

        An answer may be a second old. `update_ratio` is null if no update was seen.
        """
        return Response(await statistics.describe(name), media_type="application/json")

    @app.get(routes.PARAMETER_SLOTS, tags=["inspection"], response_class=Response, responses=_FILE)
    async def slots(name: Name) -> Response:
        """Return the optimizer slots of one parameter, as a safetensors file of float32 tensors of its shape."""
        return LargeReply(large, lambda: open_slots(coordinator, name), CONTENT_TYPE)

    @app.get(routes.MODEL, tags=["inspection"], response_class=Response, responses=_FILE)
    async def model() -> Response:
        """Return the whole model of one round, with buffers and tied names, for `load_state_dict`."""
        return LargeReply(large, lambda: open_model(coordinator), CONTENT_TYPE)

    @app.get(routes.CURVES, tags=["inspection"], response_model=CurveList)
    async def curves(max_points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = MAX_POINTS) -> dict[str, Any]:
        """Return the results that trainers report (`Session.report`), as curves by name and rank, in columns.

        A point is the mean of `count` values. A curve has at most `max_points` points, which are means of more values
        if there are more; all curves together have at most 100,000.
        """
        return coordinator.curves.describe(max_points)

    @app.get(routes.EVENTS, tags=["inspection"])
    async def events(after: EventId = 0, limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100) -> list[Event]:
        """Return the newest events after the id `after`, oldest first."""
        return coordinator.events.after(after)[-limit:]

    @app.get(
        routes.EVENT_STREAM,
        tags=["inspection"],
        response_class=Response,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def event_stream(request: Request, after: EventId = 0) -> Response:
        """Stream events as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

        The stream begins after the id in `Last-Event-ID`.
        """
        last = request.headers.get("last-event-id", "")
        newest = int(last) if last.isascii() and last.isdecimal() and len(last) < 18 else after
        return EventStream(coordinator, places, newest)


def _is_of_this_attempt(coordinator: Coordinator, tag: str) -> bool:
    run = coordinator.cluster.run
    return tag.startswith(f'"{run.record.name}.{run.record.attempt}.')


def _tag(coordinator: Coordinator, version: Round) -> str:
    run = coordinator.cluster.run
    return f'"{run.record.name}.{run.record.attempt}.{version}"'


MAX_STREAMS = 64
SILENT_SECONDS = 15.0  # then a comment keeps the connection open
RETRY_MILLISECONDS = 1000


class EventStream(StreamingResponse):
    """A reply that lasts until its client leaves or the service stops. It holds one of `places` while it is sent."""

    def __init__(self, coordinator: Coordinator, places: asyncio.Semaphore, after: int) -> None:
        events = _stream_events(coordinator, after)
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply. Raises TryAgain without a free place."""
        if self._places.locked():
            raise TryAgain(f"the limit of {MAX_STREAMS} event streams is reached; retry later", code="overloaded")
        async with self._places:
            await super().__call__(scope, receive, send)


async def _stream_events(coordinator: Coordinator, after: int) -> AsyncIterator[bytes]:
    events = coordinator.events

    def has_news() -> bool:
        return events.newest_id > after or coordinator.is_stopping

    yield format_sse_event(comment="events of the cluster", retry=RETRY_MILLISECONDS)
    while not coordinator.is_stopping:
        await coordinator.wait_until(has_news, SILENT_SECONDS)
        news = events.after(after)
        for event in news:
            after = event.id
            yield format_sse_event(data_str=event.model_dump_json(), event=event.kind, id=str(event.id))
        if not news:
            yield format_sse_event(comment="")
