"""A service under uvicorn that listens on a Unix socket, too: what holds at the port holds there."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from starlette.types import Receive, Scope, Send

from ps_http2.local_sockets import connect_locally, enlarge_buffer, local_name
from ps_http2.server import ServerConnection
from services.runtime import http1
from services.runtime.app import add_raw_route

from ..http2.sockets import GET, Caller, get
from .support import Sample, running

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's"),
]

LARGE = 64 * 1024 * 1024


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[ServerConnection]:
    """Return the HTTP/2 connections as the service sees them."""
    found: list[ServerConnection] = []

    class Remembered(ServerConnection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(http1, "ServerConnection", Remembered)
    return found


async def connect(local: socket.socket, *, greets: bool = True) -> Caller:
    reader, writer = await asyncio.open_unix_connection(sock=connect_locally(local_name(local)))
    caller = Caller(reader, writer, is_client=True)
    if greets:
        caller.h2.initiate_connection()
        caller.flush()
    return caller


async def test_both_versions_on_both_sockets(local: socket.socket, connections: list[ServerConnection]) -> None:
    scopes = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append((scope["http_version"], scope["client"], scope["server"], scope["scheme"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    name = local_name(local)
    app = Sample().make_app()
    add_raw_route(app, "/look", look, methods=["GET"], summary="look")
    async with running(app, local=local) as service:
        uds = httpx.AsyncHTTPTransport(uds=f"\0{name}")
        async with httpx.AsyncClient(transport=uds) as old, httpx.AsyncClient() as http:
            assert (await old.get(f"{service.address}/look")).status_code == 200
            assert (await http.get(f"{service.address}/look")).status_code == 200
        async with await connect(local) as caller:
            assert await caller.status(get(b"/look")) == 200
            with socket.socket(socket.AF_UNIX) as plain:
                enlarge_buffer(plain)
                expected = plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            accepted = connections[0]._transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == expected
    assert scopes[0] == ("1.1", None, None, "http")
    assert scopes[1][1][0] == "127.0.0.1"
    assert scopes[2] == ("2", None, None, "http")
    with pytest.raises(ConnectionRefusedError):
        connect_locally(name)  # it has gone with the service


async def test_a_token_is_wanted_as_at_the_port(local: socket.socket, tmp_path: Path) -> None:
    for name in ("read", "admin"):
        (tmp_path / name).write_text(20 * name)
        (tmp_path / name).chmod(0o400)
    async with running(Sample().make_app(), tokens_dir=tmp_path, local=local):
        for headers, status in (
            ([], 401),
            ([(b"authorization", b"Bearer " + 20 * b"wrong")], 401),
            ([(b"authorization", b"Bearer " + 20 * b"read")], 200),
        ):
            async with await connect(local) as caller:
                assert await caller.status([*get(b"/metrics"), *headers]) == status


async def test_connections_of_both_count(local: socket.socket) -> None:
    async with (
        running(Sample().make_app(), max_connections=2, local=local) as service,
        await connect(local) as one,
        httpx.AsyncClient() as http,
    ):
        assert (await one.status(), (await http.get(f"{service.address}/healthz")).status_code) == (200, 200)
        async with await connect(local, greets=False) as third:
            answer = await asyncio.wait_for(third.reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"overloaded" in answer


@pytest.mark.parametrize("greets", [False, True])
async def test_who_asks_for_nothing_is_cut_off(greets: bool, local: socket.socket) -> None:
    async with (
        running(Sample().make_app(), header_timeout_seconds=0.2, local=local),
        await connect(local, greets=greets) as caller,
    ):
        assert await caller.raw_end(seconds=5) is None


async def test_who_takes_nothing_is_cut_off(local: socket.socket, connections: list[ServerConnection]) -> None:
    ended = asyncio.Event()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(LARGE)})
        ended.set()

    app = Sample().make_app()
    add_raw_route(app, "/large", large, methods=["GET"], summary="large")
    with structlog.testing.capture_logs() as logs:
        async with running(app, body_timeout_seconds=0.4, local=local):
            async with await connect(local) as caller:
                caller.h2.increment_flow_control_window(LARGE)
                caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
                caller.ask([*GET[:3], (b":path", b"/large")])
                await asyncio.wait_for(ended.wait(), 5)
            assert connections[0]._transport.is_closing()
    [line] = [line for line in logs if "does not take" in line["event"]]
    assert line["client"] == "a process on this host"
