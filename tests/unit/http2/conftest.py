from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from ps_http2.asgi import receive_into
from ps_http2.local_sockets import bind_locally, connect_locally, local_name
from ps_http2.server import ServerConnection
from services.runtime import server as http_server
from services.runtime.app import add_raw_route

from ..runtime.conftest import clean_environment, configured_logs
from ..runtime.support import Sample, running
from .sockets import Caller, connect, until

__all__ = ["clean_environment", "configured_logs"]

LARGE = 64 * 1024 * 1024
BUFFER_BYTES = 20_000


class Served:
    """A service on a port and a Unix socket, its connections, and what its requests did."""

    def __init__(self) -> None:
        self.connections: list[ServerConnection] = []
        self.sample = Sample()
        self.local = bind_locally()
        self.sent_bytes = 0
        self.scopes: list[Scope] = []
        self.ended: list[str] = []
        self.address: str
        self.stop: asyncio.Event
        self.app = self.sample.make_app()
        for name, methods in (("large", ["GET"]), ("look", ["GET"]), ("upload", ["POST"]), ("linger", ["GET"])):
            add_raw_route(self.app, f"/{name}", getattr(self, name), methods=methods, summary=name)

    async def connect(self, *, is_local: bool = False, **options: Any) -> Caller:
        if is_local:
            assert self.local is not None
            return await connect(connect_locally(local_name(self.local)), **options)
        return await connect(self.address, **options)

    async def large(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send 64 MiB from one piece of memory."""
        part = memoryview(bytearray(1 << 20))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(LARGE >> 20):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if not self.connections[0]._transport.is_closing():
                    self.sent_bytes += len(part)
            await send({"type": "http.response.body"})
        finally:
            self.ended.append("large")

    async def look(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(dict(scope))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive into memory of BUFFER_BYTES, and send it back."""
        buffer, filled, more = bytearray(BUFFER_BYTES), 0, True
        try:
            while more:
                num_bytes, more = await receive_into(memoryview(buffer)[filled:], scope, receive)
                filled += num_bytes
            body = bytes(buffer[:filled])
        except ValueError:
            body = b"too long"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def linger(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond if there is a query, and wait until the client has gone."""
        if scope["query_string"]:
            await self.look(scope, receive, send)
        messages = [(await receive())["type"] for _ in range(2)]
        self.ended.append(messages[-1])


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings of the service; a test overrides them by parametrization."""
    return {}


@pytest.fixture
async def service(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Serve; at the end the service still answers, and nothing is left of any connection."""
    served = Served()

    class Remembered(ServerConnection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            served.connections.append(self)

    monkeypatch.setattr(http_server, "ServerConnection", Remembered)
    async with running(served.app, local=served.local, **settings) as server:
        served.address, served.stop = server.address, server.stop
        before = asyncio.all_tasks()
        yield served
        if not served.stop.is_set():
            async with await served.connect() as other:
                assert await other.status() == 200
            served.sample.slow_ends.set()
            await until(lambda: not asyncio.all_tasks() - before - {asyncio.current_task()})
    for connection in served.connections:
        assert connection.streams == {}
        assert connection._num_running == 0
        assert connection._watch is None or connection._watch._timer is None


@pytest.fixture
async def caller(service: Served) -> AsyncIterator[Caller]:
    async with await service.connect() as caller:
        yield caller
