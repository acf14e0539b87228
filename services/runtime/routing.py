"""Two kinds of routes: messages, whose bodies are read completely and limited, and raw ASGI, which costs less."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps_protocol.routes import DECLARE_MODEL, MEMBERS, RUN

RawEndpoint: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_PLAN_BYTES = 64 * 1024 * 1024  # of messages that name all parameters or blocks of a model
MAX_MESSAGE_ITEMS = 4 * 1024 * 1024  # members and elements; each occupies some 60 bytes once parsed
MAX_MESSAGES_BYTES = 2 * MAX_PLAN_BYTES  # of all messages that are being received or processed

_LARGE = frozenset({DECLARE_MODEL, MEMBERS, RUN})


class MessageRoute(APIRoute):
    """A path operation that answers bodies over `MAX_MESSAGE_BYTES` with `body_too_large`.

    If all messages together exceed `MAX_MESSAGES_BYTES`, further ones are `overloaded`. FastAPI's own limit is not
    used: older versions have none, and its answer is not a problem document.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with a request that limits its body."""
        handle = super().get_route_handler()

        async def handle_limited(request: Request) -> Response:
            most = MAX_PLAN_BYTES if self.path in _LARGE else MAX_MESSAGE_BYTES
            message = _Message(request, most)
            try:
                return await handle(message)
            finally:
                message.forget()

        return handle_limited


class RawRoute(Route):
    """An ASGI function or method at a path, with the OpenAPI operation that describes it."""

    def __init__(
        self, path: str, endpoint: RawEndpoint, *, methods: Sequence[str], operation: Mapping[str, Any]
    ) -> None:
        super().__init__(path, endpoint)
        self.app = endpoint  # Starlette would take the function for `request -> response`
        self.methods = set(methods)  # without the HEAD that Starlette adds to GET: see AnswerHead
        self.operations = {m.lower(): {**operation, "operationId": f"{self.name}_{m.lower()}"} for m in methods}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request, and add the route to its scope as FastAPI does, for the names of metrics."""
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope["route"] = self
        return match, child_scope


class CallRawRoutes:
    """ASGI middleware that calls raw routes without the router, which takes as long as a small request itself.

    Their errors are answered by `AnswerFailures`.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[RawRoute]) -> None:
        self._app = app
        plain = (route for route in routes if "{" not in route.path)
        self._routes = {(method, route.path): route for route in plain for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, any other than to these routes as before."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
        else:
            scope["route"] = route
            await route.app(scope, receive, send)


class AnswerHead:
    """ASGI middleware that answers HEAD with the headers of GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, a HEAD as a GET without its body."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body"})

        await self._app({**scope, "method": "GET"}, receive, send_head)


class _Message(Request):
    """A request whose body is limited, and is JSON whatever its content type is; `curl -d` sends that of a form.

    It raises HTTPException, because FastAPI hides other exceptions.
    """

    def __init__(self, request: Request, most: int) -> None:
        others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
        headers = [*others, (b"content-type", b"application/json")]
        super().__init__({**request.scope, "headers": headers}, self._receive_counted)
        self._receive_next = request.receive
        self._most = most
        self._num_bytes = 0
        self._num_items = 0

    def forget(self) -> None:
        self._count(-self._num_bytes)

    async def _receive_counted(self) -> Message:
        message = await self._receive_next()
        body = message.get("body", b"")
        num_bytes = len(body)
        self._num_items += body.count(b",") + body.count(b"[") + body.count(b"{")
        if self._num_items > MAX_MESSAGE_ITEMS:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a message must have at most {MAX_MESSAGE_ITEMS} items"
            )
        if self._num_bytes + num_bytes > self._most:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the message must have at most {self._most} bytes"
            )
        if self._count(num_bytes) > MAX_MESSAGES_BYTES:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "too many large messages are being received")
        return message

    def _count(self, num_bytes: int) -> int:
        """Add bytes to the total of all messages of this application, and return the total."""
        self._num_bytes += num_bytes
        state = self.scope["app"].state
        state.message_bytes = getattr(state, "message_bytes", 0) + num_bytes
        total: int = state.message_bytes
        return total
