"""The FastAPI application that the services have in common, and large replies: few at a time, and sent part by part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ps_config.process_meter import watch_loop_lag
from ps_protocol.errors import PROBLEM_CONTENT_TYPE, NotReady, TryAgain
from ps_protocol.routes import DECLARE_MODEL, HEALTH, MEMBERS, METRICS, READY, RUN
from ps_protocol.vocabulary import PROTOCOL_VERSION

from .gate import Entry, Gate
from .metrics import ServiceMetrics
from .security import PROBES, ROUTE_SCOPES, Guard

RawEndpoint: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_PLAN_BYTES = 64 * 1024 * 1024  # of messages that name all parameters or blocks of a model
PART_BYTES = 1024 * 1024  # of a large reply, that are sent at a time
MAX_AT_ONCE = 4  # large replies
PATIENCE_SECONDS = 10.0  # for which a request waits for a slot
NO_HEADERS: Mapping[str, str] = {}
_PLANS = frozenset({DECLARE_MODEL, MEMBERS, RUN})

_PROBLEM_SCHEMA = {
    "type": "object",
    "description": "RFC 9457 problem document; further members depend on the code",
    "required": ["type", "title", "status", "detail", "code", "may_be_retried"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string", "description": "path of the request"},
        "code": {"type": "string", "description": "stable name of the error"},
        "may_be_retried": {"type": "boolean"},
    },
}
_PROBLEM = {"content": {PROBLEM_CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
_PROBLEM_RESPONSE = {"description": "Any error", **_PROBLEM}
_TOKEN_RESPONSES = {
    "401": {"description": "`unauthenticated`: no bearer token, or none that is valid here", **_PROBLEM},
    "403": {"description": "`forbidden`: the token's scope does not cover the request; or `bad_origin`", **_PROBLEM},
}
_TOKEN_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of the named scope: `train` includes `read`, and `admin` includes both. "
    "A service without `tokens_dir` needs no token.",
}


class Healthy(BaseModel):
    """The answer to a successful probe."""

    status: Literal["ok"] = "ok"


def make_app(
    *,
    title: str,
    role: str,
    metrics: ServiceMetrics,
    is_ready: Callable[[], str | None],
) -> FastAPI:
    """Return an application behind a gate, with the common routes.

    `is_ready` returns None, or the missing condition as text; it is called for every probe and must be quick.
    `serve` sets limits and access control by its settings.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lag = asyncio.create_task(watch_loop_lag(metrics.loop_lag.observe))
        try:
            yield
        finally:
            lag.cancel()

    app = _ServiceApp(
        title=title,
        version=str(PROTOCOL_VERSION),
        lifespan=lifespan,
        docs_url=None,  # Swagger UI is loaded from another site
        redoc_url=None,
        responses={"default": _PROBLEM_RESPONSE},
        # OpenTelemetry would measure every request a second time, those that carry tensors included.
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.guard = Guard()
    app.state.metrics = metrics

    @app.get(HEALTH, tags=["service"])
    async def health() -> Healthy:
        """The process is alive and its event loop runs."""
        return Healthy()

    @app.get(READY, tags=["service"])
    async def ready() -> Healthy:
        """The service can work; else `not_ready`, with the missing condition in `waiting_for`."""
        if missing := is_ready():
            raise NotReady(f"this {role} is not ready", waiting_for=missing)
        return Healthy()

    @app.get(METRICS, tags=["service"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus_metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return app


def add_raw_route(
    app: FastAPI,
    path: str,
    asgi_endpoint: RawEndpoint,
    *,
    methods: Sequence[str],
    summary: str,
    openapi_extra: Mapping[str, Any] | None = None,
) -> None:
    """Serve `path` with an ASGI function or method, without the cost of a path operation.

    A GradpostError that the endpoint raises before its response begins becomes a problem document. The endpoint reads
    and limits the request's body itself. `openapi_extra` is its OpenAPI operation object (parameters, requestBody,
    responses), completed here.
    """
    extra = openapi_extra or {}
    responses = {**extra.get("responses", {}), "default": _PROBLEM_RESPONSE}
    app.router.routes.append(
        RawRoute(path, asgi_endpoint, methods, {"summary": summary, **extra, "responses": responses})
    )


class RawRoute(Route):
    """An ASGI function or method at a path, with the OpenAPI operation that describes it."""

    def __init__(self, path: str, endpoint: RawEndpoint, methods: Sequence[str], operation: Mapping[str, Any]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.app = endpoint  # Starlette would take the function for `request -> response`
        self.operations = {m.lower(): {**operation, "operationId": f"{self.name}_{m.lower()}"} for m in methods}


class _ServiceApp(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        """Return the gate, which calls all routes itself: no middleware and no router is between them."""
        table = {request: _make_entry(request, route) for request, route in self.requests()}
        return Gate(table, self.state.guard, self.state.metrics)

    def requests(self) -> Iterator[tuple[tuple[str, str], Route]]:
        """Yield the method and path of each request, and its route."""
        for route in self.routes:
            if isinstance(route, Route):
                for method in sorted((route.methods or set()) - {"HEAD"}):
                    yield (method, route.path), route

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for request, route in self.requests():
            if isinstance(route, RawRoute):
                document["paths"].setdefault(route.path_format, {}).update(route.operations)
            operation = document["paths"].get(route.path_format, {}).get(request[0].lower())
            if operation is not None:
                scope = _make_entry(request, route).scope
                operation["security"] = [] if scope is None else [{"token": [scope]}]
                operation["responses"] |= {} if scope is None else _TOKEN_RESPONSES
        components = document.setdefault("components", {})
        components.setdefault("schemas", {})["Problem"] = _PROBLEM_SCHEMA
        components["securitySchemes"] = {"token": _TOKEN_SCHEME}
        return document


def _make_entry(request: tuple[str, str], route: Route) -> Entry:
    scope, path = ROUTE_SCOPES.get(request, "admin"), route.path
    if isinstance(route, RawRoute):
        return Entry(path, route.app, scope)
    max_bytes = MAX_PLAN_BYTES if path in _PLANS else MAX_MESSAGE_BYTES
    return Entry(path, AsyncExitStackMiddleware(route.app), scope, max_bytes, is_probe=request in PROBES)


@dataclass(frozen=True, slots=True)
class Stream:
    """A reply whose parts, of any size, arrive one by one; they can be read once and contain `num_bytes` together."""

    num_bytes: int
    parts: AsyncIterator[bytes | memoryview]
    headers: Mapping[str, str]


class LargeReplies:
    """Slots for large replies: inspection must not exhaust the memory or the compute thread of training."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._slots = asyncio.Semaphore(max_at_once)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the block. Raises TryAgain after `PATIENCE_SECONDS`."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            raise TryAgain("too many clients are reading large replies; retry later", code="overloaded") from None
        try:
            yield
        finally:
            self._slots.release()


def stream_chunks(chunks: Sequence[bytes | memoryview], headers: Mapping[str, str] = NO_HEADERS) -> Stream:
    """Return a stream of chunks that are in the memory of this process."""

    async def parts() -> AsyncIterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk

    return Stream(sum(map(len, chunks)), parts(), headers)


class LargeReply(Response):
    """A reply that is created once a slot is free, and that holds the slot until the client has received it.

    `open_it` opens the stream of its parts. An exception that it raises becomes a problem document.
    """

    def __init__(
        self, replies: LargeReplies, open_it: Callable[[], AbstractAsyncContextManager[Stream]], media_type: str
    ) -> None:
        super().__init__(media_type=media_type)
        self._replies = replies
        self._open = open_it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create and send the reply."""
        left = watch_for_disconnect(receive)
        try:
            async with self._replies.slot():
                await asyncio.sleep(0)  # so that a disconnect meanwhile is noticed
                if left.done():
                    raise ClientDisconnect
                async with self._open() as stream:
                    await self._send(stream, send, left)
        finally:
            left.cancel()

    async def _send(self, stream: Stream, send: Send, left: asyncio.Task[None]) -> None:
        headers = {"content-type": str(self.media_type), "content-length": str(stream.num_bytes), **stream.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async for chunk in stream.parts:
            for at in range(0, len(chunk), PART_BYTES):
                if left.done():  # servers accept any number of parts after a disconnect
                    return
                part = chunk[at : at + PART_BYTES]
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def watch_for_disconnect(receive: Receive) -> asyncio.Task[None]:
    """Return a task that ends when the client of a message disconnects."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return asyncio.create_task(wait())
