"""A small application with every kind of route, servers for it, and clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from ps_protocol.errors import StaleRound
from services.runtime.app import add_raw_route, make_app
from services.runtime.metrics import ServiceMetrics
from services.runtime.server import serve
from services.runtime.settings import ServiceSettings

from ..http2.shells import PolledOnLoop


class Greeting(BaseModel):
    name: str
    times: int


@dataclass
class Sample:
    """The application, its metrics, and events of its routes."""

    metrics: ServiceMetrics = field(default_factory=lambda: ServiceMetrics("sample"))
    missing: str | None = None
    lifespan: list[str] = field(default_factory=list)
    slow_begun: asyncio.Event = field(default_factory=asyncio.Event)
    slow_ends: asyncio.Event = field(default_factory=asyncio.Event)

    def make_app(self) -> FastAPI:
        app = make_app(
            title="Sample",
            role="sample",
            metrics=self.metrics,
            is_ready=lambda: self.missing,
        )
        measured = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.lifespan.append("begin")
            try:
                async with measured(app):
                    yield
            finally:
                self.lifespan.append("end")

        app.router.lifespan_context = lifespan

        @app.post("/greet/{name:path}")
        async def greet(name: str, greeting: Greeting) -> str:
            return f"{name} {greeting.name}"

        @app.get("/bug")
        async def bug() -> None:
            raise ZeroDivisionError("secret")

        @app.get("/stale")
        async def stale() -> None:
            raise StaleRound("round 3 is over", expected="round 4", actual="round 3", current=4)

        @app.get("/slow")
        async def slow() -> str:
            self.slow_begun.set()
            await self.slow_ends.wait()
            return "slow"

        for how in ("fine", "stale", "bug", "cut", "late"):
            add_raw_route(
                app,
                f"/raw/{how}",
                self.raw,
                methods=["POST"],
                summary="Echo how much came",
                openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}}, "responses": {"200": {}}},
            )
        add_raw_route(app, "/raw-refusal", self.raw_refusal, methods=["POST"], summary="Refuse without reading")
        add_raw_route(app, "/raw-bug", self.raw_bug, methods=["POST"], summary="Fail without reading")
        return app

    async def raw_refusal(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise StaleRound("round 3 is over")

    async def raw_bug(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("secret")

    async def raw(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0
        more = True
        while more:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
        match how := scope["path"].rpartition("/")[2]:
            case "stale":
                raise StaleRound("round 3 is over", expected="round 4", actual="round 3", current=4)
            case "bug":
                raise ZeroDivisionError("secret")
        body = f"{num_bytes} HTTP/{scope['http_version']}".encode()
        headers = [(b"content-length", b"%d" % (len(body) + 1))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if how == "cut":
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            raise ZeroDivisionError("secret")
        if how == "late":
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            raise StaleRound("round 3 is being overwritten")
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"\n"})


@dataclass
class Running:
    """A server that serves until `stop` is set."""

    address: str
    stop: asyncio.Event
    task: asyncio.Task[None]


@asynccontextmanager
async def running(app: FastAPI, *, local: socket.socket | None = None, **settings: Any) -> AsyncIterator[Running]:
    """Serve during the block. Raises the exceptions of `serve`."""
    stop = asyncio.Event()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(app, ServiceSettings(**settings), stop=stop, on_started=started.set_result, local=local)
    )
    task.add_done_callback(lambda _: started.cancel())
    try:
        address = await started
    except asyncio.CancelledError:
        await task  # raises the reason
        raise
    try:
        yield Running(address, stop, task)
    finally:
        stop.set()
        await task


def http2_client() -> httpx.AsyncClient:
    """Return a client of another project that speaks HTTP/2 only, without TLS."""
    return httpx.AsyncClient(http1=False, http2=True)


def trainer_client() -> httpx.AsyncClient:
    """Return the client with which trainers send tensors over HTTP/2."""
    return httpx.AsyncClient(transport=PolledOnLoop(), timeout=None, trust_env=False)


class RawConnection:
    """A connection to a service, on which a test writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.write = writer.write

    async def read_all(self) -> bytes:
        """Return the bytes until the service closes the connection."""
        return await asyncio.wait_for(self.reader.read(), 10)

    async def read_line(self) -> bytes:
        return await asyncio.wait_for(self.reader.readline(), 5)


@asynccontextmanager
async def raw_connection(address: str, request: bytes = b"") -> AsyncIterator[RawConnection]:
    """Connect to a service, and write the beginning of a request."""
    host, port = address.rpartition("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.close()


async def ask_raw(address: str, request: bytes) -> bytes:
    """Return everything that the service sends until it closes the connection."""
    async with raw_connection(address, request) as connection:
        return await connection.read_all()
