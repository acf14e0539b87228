"""Servers of h2 for tests of the trainer's HTTP/2 transport."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from h2.events import RequestReceived, StreamEnded
from hpack import Encoder

from ps_config.certificates import TlsFiles, server_context
from ps_http2 import frames
from ps_http2.frames import pack

from ..http2.sockets import Talker

OK = [(b":status", b"200")]


def answering(headers: Any = OK, body: bytes = b"fine") -> Callable[[Talker], Awaitable[None]]:
    """Return a server that answers each request in the same way once all of it is received."""

    async def serve(talker: Talker) -> None:
        answered: set[int] = set()
        while await talker.hear():
            for event in talker.of(StreamEnded):
                if event.stream_id not in answered:
                    answered.add(event.stream_id)
                    talker.h2.send_headers(event.stream_id, headers)
                    talker.h2.send_data(event.stream_id, body, end_stream=True)
            talker.flush()

    return serve


def writing(*data: bytes, stays: bool = True) -> Callable[[Talker], Awaitable[None]]:
    """Return a server that answers the first request with these bytes, and may close the connection then."""

    async def serve(talker: Talker) -> None:
        await talker.until(RequestReceived)
        talker.writer.write(b"".join(data))
        if stays:
            await talker.hear()

    return serve


async def ask(client: httpx.AsyncClient, address: str, method: str = "GET", **extensions: Any) -> httpx.Response:
    return await asyncio.wait_for(client.request(method, address, extensions=extensions), 10)


def heads(headers: list[tuple[bytes, bytes]], *, is_last: bool = False) -> bytes:
    flags = frames.END_HEADERS | (frames.END_STREAM if is_last else 0)
    return pack(frames.HEADERS, flags, 1, Encoder().encode(headers))


def data(body: bytes, *, is_last: bool = False) -> bytes:
    return pack(frames.DATA, frames.END_STREAM if is_last else 0, 1, body)


def secure(files: TlsFiles, *protocols: str) -> ssl.SSLContext:
    context = server_context(TlsFiles(None, files.cert, files.key))
    context.set_alpn_protocols(protocols)
    return context
