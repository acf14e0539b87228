"""Tensors over HTTP/1.1: bodies from memoryviews, replies in pieces, httpx's errors, connections that are kept."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_config.certificates import TlsFiles
from ps_config.tokens import TokenPair
from ps_http2.asgi import send_from
from ps_http2.client import BODY_EXTENSION
from services.runtime.app import add_raw_route
from trainer_client.transport.exchange import Exchange
from trainer_client.transport.http1 import CHUNK_BYTES, Http1Transport

from ..protocol.test_tokens import NEW, OLD, put
from ..runtime.support import Sample, running

pytestmark = pytest.mark.asyncio


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send_from(memoryview(body), scope, send, more_body=False)


@contextlib.asynccontextmanager
async def exchanging(tokens: TokenPair | None = None, **settings: Any) -> AsyncIterator[tuple[Exchange, httpx.URL]]:
    app = Sample().make_app()
    add_raw_route(app, "/echo", echo, methods=["POST"], summary="The same again")
    exchange = Exchange(TlsFiles(), tokens, http2=False)
    async with running(app, **settings) as service:
        try:
            yield exchange, httpx.URL(service.address)
        finally:
            await exchange.aclose()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, CHUNK_BYTES, 3 * CHUNK_BYTES + 7)])
async def test_a_body_comes_back_in_pieces(sizes: tuple[int, ...]) -> None:
    parts = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]
    async with exchanging() as (exchange, url):
        response = await exchange.begin("POST", url.join("/echo"), {"x-a": "b"}, body=parts)
        pieces = [piece async for piece in response.aiter_raw()]
        await response.aclose()
    assert (response.status_code, response.http_version) == (200, "HTTP/1.1")
    assert b"".join(pieces) == b"".join(parts)
    assert len(pieces) > 1 or sum(sizes) < CHUNK_BYTES


async def test_the_token_that_was_replaced_is_sent_with_the_whole_body_again(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    put(tmp_path / "tokens" / "admin", OLD)
    put(tmp_path / "admin", NEW)
    put(tmp_path / "admin.previous", OLD)
    async with exchanging(TokenPair(tmp_path / "admin"), tokens_dir=tmp_path / "tokens") as (exchange, url):
        response = await exchange.send("POST", url.join("/echo"), {}, body=(memoryview(b"12"), memoryview(b"345")))
    assert (response.status_code, response.content) == (200, b"12345")


async def test_errors_are_those_of_httpx() -> None:
    async with exchanging() as (exchange, url):
        with pytest.raises(httpx.RemoteProtocolError):
            await exchange.send("POST", url.join("/raw/cut"), {}, body=(memoryview(b"x"),))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            with pytest.raises(httpx.ConnectError):
                await exchange.send("GET", url.copy_with(port=free.getsockname()[1]), {})


async def test_connections_are_kept_and_there_are_as_many_as_requests() -> None:
    async with exchanging() as (exchange, url):
        used = set()
        for _ in range(2):
            begun = await asyncio.gather(*(exchange.begin("GET", url.join("/healthz"), {}) for _ in range(30)))
            for response in begun:
                connection = response.extensions["network_stream"].get_extra_info("socket")
                used.add(connection.getsockname())
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                await response.aread()
                await response.aclose()
        assert len(used) == 30


async def test_the_caller_bounds_a_request() -> None:
    sample = Sample()
    async with (
        running(sample.make_app()) as service,
        httpx.AsyncClient(transport=Http1Transport(), timeout=0.01) as client,
    ):
        slow = asyncio.create_task(client.get(f"{service.address}/slow", extensions={BODY_EXTENSION: ()}))
        await sample.slow_begun.wait()
        await asyncio.sleep(0.1)
        sample.slow_ends.set()
        assert (await slow).json() == "slow"
