"""Peers on a real socket: the h2 library, and raw frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from h2.events import ConnectionTerminated, RequestReceived, ResponseReceived, StreamEnded, StreamReset
from hpack import Encoder

from ps_config.certificates import TlsFiles, server_context
from ps_http2 import frames
from ps_http2.frames import ErrorCode, pack
from ps_http2.stream import Headers

from .support import E, H2Peer

GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", b"/healthz")]
OK = [(b":status", b"200")]
ACCEPT_STEPS = 3  # of the loop, in which it accepts a connection that has been made, though its client may be gone


def get(path: bytes) -> Headers:
    return [*GET[:3], (b":path", path)]


def post(path: bytes, *more: tuple[bytes, bytes]) -> Headers:
    return [(b":method", b"POST"), *GET[1:3], (b":path", path), *more]


def headers_frame(headers: Headers, stream_id: int = 1, *, end_stream: bool = False) -> bytes:
    """Return a HEADERS frame whose block leaves the header table unchanged, so that it can be repeated."""
    encoder = Encoder()
    encoder.header_table_size = 0
    flags = frames.END_HEADERS | (frames.END_STREAM if end_stream else 0)
    return pack(frames.HEADERS, flags, stream_id, encoder.encode(headers))


def data_frame(body: bytes, stream_id: int = 1, *, end_stream: bool = False) -> bytes:
    return pack(frames.DATA, frames.END_STREAM if end_stream else 0, stream_id, body)


class Talker(H2Peer):
    """An h2 peer on a socket. It collects `events`, and sends window updates at once unless asked not to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool) -> None:
        super().__init__(client_side=is_client, validate_outbound_headers=False, normalize_outbound_headers=False)
        self.reader, self.writer = reader, writer

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def write(self, data: bytes) -> None:
        """Write bytes without h2's knowledge."""
        self.flush()
        self.writer.write(data)

    async def hear(self) -> bool:
        """Wait for more bytes; return False at the end."""
        try:
            data = await self.reader.read(1 << 20)
        except ConnectionError:
            data = b""
        self.receive(data)
        self.flush()
        return bool(data)

    async def until(self, kind: type[E], number: int | None = None) -> E:
        """Return the first event of this kind and stream, and wait for it if necessary."""
        async with asyncio.timeout(10):
            while not (found := self.of(kind, number)):
                assert await self.hear(), f"no {kind.__name__} before the end; {self.events}"
        return found[0]

    async def end(self) -> ErrorCode | None:
        """Wait until the other end has closed the connection, and return the code of its GOAWAY, if any."""
        async with asyncio.timeout(10):
            while await self.hear():
                pass
        codes = [event.error_code for event in self.of(ConnectionTerminated)]
        return ErrorCode(codes[0]) if codes else None

    async def reset_of(self, number: int) -> ErrorCode:
        return ErrorCode((await self.until(StreamReset, number)).error_code)

    async def body(self, number: int) -> bytes:
        await self.until(StreamEnded, number)
        return self.body_of(number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await asyncio.sleep(0)


class Caller(Talker):
    """A client."""

    async def __aexit__(self, *_: object) -> None:
        if self.writer.transport.get_write_buffer_size():
            self.writer.transport.abort()  # else it would stay open until all is sent
        await super().__aexit__()

    def ask(self, headers: Headers = GET, *, end_stream: bool = True) -> int:
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, headers, end_stream=end_stream)
        self.flush()
        return number

    def send(self, number: int, body: bytes, *, end_stream: bool = False) -> None:
        self.h2.send_data(number, body, end_stream=end_stream)
        self.flush()

    def widen(self, num_bytes: int, number: int | None = None) -> None:
        """Send a window update."""
        self.h2.increment_flow_control_window(num_bytes, number)
        self.flush()

    def reset(self, number: int) -> None:
        self.h2.reset_stream(number, ErrorCode.CANCEL)
        self.flush()

    def write_request(self, number: int, headers: Headers = GET) -> None:
        """Write a request that h2 would refuse, but let h2 know of the stream. h2's table of headers is stale then."""
        self.write(headers_frame(headers, number, end_stream=True))
        self.h2.send_headers(number, GET, end_stream=True)
        self.h2.data_to_send()

    async def status(self, headers: Headers = GET, body: bytes | None = None) -> int:
        """Send a request, and return the status of its complete response."""
        number = self.ask(headers, end_stream=body is None)
        if body is not None:
            self.send(number, body, end_stream=True)
        await self.body(number)
        [answer] = self.of(ResponseReceived, number)
        assert answer.headers is not None
        return int(dict(answer.headers)[b":status"])


async def connect(
    address: str | socket.socket, *, settings: dict[int, int] | None = None, greets: bool = True, widens: bool = True
) -> Caller:
    """Return a client that has sent its preface and, if it widens, the largest window for the connection."""
    if isinstance(address, str):
        url = urlsplit(address)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
    else:
        reader, writer = await asyncio.open_unix_connection(sock=address)
    caller = Caller(reader, writer, is_client=True)
    if greets:
        caller.h2.initiate_connection()
        caller.h2.update_settings(settings or {})
        if widens:
            caller.h2.increment_flow_control_window(frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
        caller.flush()
    return caller


@contextlib.asynccontextmanager
async def serving(
    serve: Callable[[Talker], Awaitable[None]],
    *,
    settings: dict[int, int] | None = None,
    tls: ssl.SSLContext | None = None,
    local: socket.socket | None = None,
) -> AsyncIterator[str]:
    """Serve each connection by `serve`, and yield the address; at the end raise what `serve` has raised.

    With `local` the server listens on that Unix socket alone.
    """
    connections: list[asyncio.Task[Any]] = []
    writers: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connections.append(asyncio.create_task(talk(reader, writer)))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with Talker(reader, writer, is_client=False) as talker:
            talker.h2.initiate_connection()
            talker.h2.update_settings(settings or {})
            talker.flush()
            await serve(talker)

    if local is None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
    else:
        server, port = await asyncio.start_unix_server(accept, sock=local), 0
    try:
        yield f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    finally:
        for _ in range(ACCEPT_STEPS):
            await asyncio.sleep(0)
        server.close()
        for task in connections:
            task.cancel()
        results = await asyncio.gather(*connections, return_exceptions=True)
        for writer in writers:  # also of a task that was cancelled before its first step
            writer.transport.abort()
        await asyncio.sleep(0)
        for ended in results:
            if isinstance(ended, Exception) and not isinstance(ended, ConnectionError):
                raise ended


def answering(body: bytes = b"fine", headers: Headers = OK) -> Callable[[Talker], Awaitable[None]]:
    """Return a server that answers each request in the same way once all of it is received."""

    async def serve(talker: Talker) -> None:
        answered: set[int] = set()
        while await talker.hear():
            for number in {event.stream_id for event in talker.of(StreamEnded)} - answered:
                answered.add(number)
                talker.h2.send_headers(number, headers)
                talker.h2.send_data(number, body, end_stream=True)
            talker.flush()

    return serve


def in_turn(serves: list[Callable[[Talker], Awaitable[None]]]) -> Callable[[Talker], Awaitable[None]]:
    """Return a server that takes the next of these for each connection; a further connection is an error."""

    async def serve(talker: Talker) -> None:
        await serves.pop(0)(talker)

    return serve


def writing(*data: bytes, stays: bool = True) -> Callable[[Talker], Awaitable[None]]:
    """Return a server that answers the first request with these bytes, and may close the connection then."""

    async def serve(talker: Talker) -> None:
        await talker.until(RequestReceived)
        talker.writer.write(b"".join(data))
        if stays:
            await talker.hear()

    return serve


def secure(files: TlsFiles, *protocols: str) -> ssl.SSLContext:
    context = server_context(TlsFiles(None, files.cert, files.key))
    context.set_alpn_protocols(protocols)
    return context


async def ask(client: httpx.AsyncClient, address: str, method: str = "GET", **extensions: Any) -> httpx.Response:
    return await asyncio.wait_for(client.request(method, address, extensions=extensions), 10)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
