"""The reading part of the coordinator's API, which needs the scope `read` and changes nothing."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response

from ps_config.process_meter import measure_process
from ps_protocol import routes
from ps_protocol.fields import Name, OrdinalText
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.messages import ClusterStatus
from ps_protocol.process_reports import TrainerOutput
from services.runtime.large_replies import LargeReplies, LargeReply
from services.runtime.statistics import ParameterStatistics

from ..administration import describe_overrides
from ..coordinator import Coordinator
from ..curves import MAX_POINTS, CurveList
from ..events import MAX_EVENTS, Event
from ..state.status import describe_status
from .parameters import ParameterList, describe_parameters, open_file
from .statistics import StatisticsCache

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
        standbys = cluster.standbys.describe(now, cluster.registry.replicas)
        overrides = describe_overrides(cluster.run, coordinator.events.after(0))
        process = measure_process()
        return describe_status(cluster.shown_run, cluster.registry, now, time.time(), process, standbys, overrides)

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
