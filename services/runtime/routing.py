"""Two kinds of routes: messages, whose bodies are read whole and therefore capped, and raw ASGI, which costs less."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

RawEndpoint: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # the plan of a model of very many blocks is the largest message


class MessageRoute(APIRoute):
    """A path operation that reads no more than `MAX_MESSAGE_BYTES` of a body and then answers `body_too_large`.

    FastAPI's own limit is not used: older versions have none, and its answer is not a problem document.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a request that counts what it receives."""
        handle = super().get_route_handler()

        async def handle_limited(request: Request) -> Response:
            return await handle(Request(request.scope, _limit(request.receive)))

        return handle_limited


class RawRoute(Route):
    """An ASGI function or method at a path, with the OpenAPI operation that describes it."""

    def __init__(
        self, path: str, endpoint: RawEndpoint, *, methods: Sequence[str], operation: Mapping[str, Any]
    ) -> None:
        super().__init__(path, endpoint)
        self.app = endpoint  # Starlette takes a function for `request -> response`; this one is the ASGI app itself
        self.methods = set(methods)  # without the HEAD that comes with GET: it would make a body to throw it away
        self.operations = {m.lower(): {**operation, "operationId": f"{self.name}_{m.lower()}"} for m in methods}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Starlette's match, with the route itself in the scope as FastAPI's routes do it; metrics are named by it."""
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope["route"] = self
        return match, child_scope


def _limit(receive: Receive) -> Receive:
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_MESSAGE_BYTES:
            # The only kind of exception that FastAPI lets through while it reads a body.
            detail = f"a message may have {MAX_MESSAGE_BYTES} bytes at most"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
        return message

    return limited
