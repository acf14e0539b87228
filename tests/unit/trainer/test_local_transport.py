"""Over a Unix socket where that is possible, over TCP where it is not; the answer tells which way it came."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from h2.events import StreamEnded

from ps_config.certificates import TlsFiles
from ps_http2.client import LOCAL_EXTENSION, Http2Transport
from ps_http2.local_sockets import local_name

from ..http2.sockets import Talker, serving
from ..protocol.test_certificates import Authority
from .test_http2 import OK, answering, secure

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's"),
]

HERE, THERE = (b"local", True), (b"tcp", False)


@pytest.fixture
def transport(local: socket.socket) -> Http2Transport:
    return Http2Transport(local=local_name(local))


@pytest_asyncio.fixture
async def client(transport: Http2Transport) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=5) as http:
        yield http


async def ask(client: httpx.AsyncClient, address: str) -> tuple[bytes, bool]:
    response = await client.get(address)
    return response.content, response.extensions[LOCAL_EXTENSION]


async def lose_connection(transport: Http2Transport) -> None:
    """The server has closed it: wait until that is known here."""
    [origin] = transport._origins.values()
    async with asyncio.timeout(5):
        while origin._usable() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def answer_once(talker: Talker) -> None:
    """And close the connection."""
    await talker.until(StreamEnded)
    talker.h2.send_headers(1, OK)
    talker.h2.send_data(1, b"local", end_stream=True)
    talker.flush()


async def test_the_unix_socket_comes_first(local: socket.socket, client: httpx.AsyncClient) -> None:
    async with serving(answering(body=b"tcp")) as address, serving(answering(body=b"local"), local=local):
        assert [await ask(client, address) for _ in range(2)] == [HERE, HERE]


async def test_where_nobody_listens_tcp_does(local: socket.socket, client: httpx.AsyncClient) -> None:
    """As on another host."""
    async with serving(answering(body=b"tcp")) as address:
        assert await ask(client, address) == THERE


async def test_a_lost_connection_is_tried_in_the_same_order(
    local: socket.socket, client: httpx.AsyncClient, transport: Http2Transport
) -> None:
    async with serving(answering(body=b"tcp")) as address:
        async with serving(answer_once, local=local):
            for _ in range(3):
                assert await ask(client, address) == HERE
                await lose_connection(transport)
        assert await ask(client, address) == THERE  # the listener has gone meanwhile


async def test_another_users_process_is_not_spoken_to(
    local: socket.socket, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token would be told to it."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    async with serving(answering(body=b"tcp")) as address, serving(answering(body=b"local"), local=local):
        assert await ask(client, address) == THERE


async def test_where_nobody_listens_at_all(local: socket.socket, client: httpx.AsyncClient) -> None:
    async with serving(answering()) as address:
        pass
    with pytest.raises(httpx.ConnectError):
        await client.get(address)


async def test_never_with_tls(local: socket.socket, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.issue("service")
    transport = Http2Transport(TlsFiles(files.ca), local_name(local))
    async with (
        httpx.AsyncClient(transport=transport, timeout=5) as client,
        serving(answering(body=b"tcp"), tls=secure(files, "h2")) as address,
        serving(answering(body=b"local"), local=local),
    ):
        assert await ask(client, address) == THERE
