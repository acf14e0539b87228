"""Peers on a real socket: the h2 library, and raw frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded, StreamReset

from ps_http2 import frames
from ps_http2.frames import ErrorCode
from ps_http2.stream import Headers

E = TypeVar("E", bound=Event)

GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", b"/healthz")]


def get(path: bytes) -> Headers:
    return [*GET[:3], (b":path", path)]


def post(path: bytes, *more: tuple[bytes, bytes]) -> Headers:
    return [(b":method", b"POST"), *GET[1:3], (b":path", path), *more]


class Talker:
    """An h2 peer on a socket. It collects `events`, and sends window updates at once unless asked not to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(
            H2Configuration(
                client_side=is_client,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.events: list[Event] = []
        self.acknowledges = True
        self.is_over = False

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def say(self, data: bytes) -> None:
        """Bytes that h2 knows nothing of."""
        self.flush()
        self.writer.write(data)

    async def hear(self) -> bool:
        """Wait for more bytes; False at the end."""
        try:
            data = await self.reader.read(1 << 20)
        except ConnectionError:
            data = b""
        self.is_over = not data
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if self.acknowledges and isinstance(event, DataReceived) and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self.flush()
        return bool(data)

    async def until(self, kind: type[E], number: int | None = None, *, seconds: float = 10) -> E:
        """Wait for an event of this kind, of this stream; it may be here already."""
        async with asyncio.timeout(seconds):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and number in (None, getattr(event, "stream_id", None)):
                        return event
                assert await self.hear(), f"no {kind.__name__} before the end; {self.events}"

    async def end(self, *, seconds: float = 10) -> ErrorCode | None:
        """Wait until the other end has closed the connection; the code that it named, if it did."""
        async with asyncio.timeout(seconds):
            while await self.hear():
                pass
        codes = [event.error_code for event in self.events if isinstance(event, ConnectionTerminated)]
        return ErrorCode(codes[0]) if codes else None

    async def raw_end(self, *, seconds: float = 10) -> ErrorCode | None:
        """Send frames before h2 has received any, without its knowledge."""
        data = bytearray()
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):
                while part := await self.reader.read(1 << 20):
                    data += part
        at = 0
        while at + frames.FRAME_HEADER_BYTES + 8 <= len(data):
            length, kind, _, _ = frames.unpack_frame_header(bytes(data[at : at + frames.FRAME_HEADER_BYTES]))
            if kind == frames.GOAWAY:
                return ErrorCode(int.from_bytes(data[at + 13 : at + 17], "big"))
            at += frames.FRAME_HEADER_BYTES + length
        return None

    def of(self, kind: type[E], number: int | None = None) -> list[E]:
        return [e for e in self.events if isinstance(e, kind) and number in (None, getattr(e, "stream_id", None))]

    async def reset_of(self, number: int) -> ErrorCode:
        return ErrorCode((await self.until(StreamReset, number)).error_code)

    async def body(self, number: int) -> bytes:
        await self.until(StreamEnded, number)
        return b"".join(event.data for event in self.of(DataReceived, number))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await asyncio.sleep(0)


class Caller(Talker):
    """A client."""

    def ask(self, headers: Headers = GET, *, end_stream: bool = True) -> int:
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, headers, end_stream=end_stream)
        self.flush()
        return number

    def forget(self, number: int) -> None:
        """Let h2 believe that it has opened a stream. Its table of headers is of no use from then on."""
        self.h2.send_headers(number, GET, end_stream=True)
        self.h2.data_to_send()

    async def status(self, headers: Headers = GET, body: bytes | None = None) -> int:
        """Ask, and wait for all of the answer."""
        number = self.ask(headers, end_stream=body is None)
        if body is not None:
            self.h2.send_data(number, body, end_stream=True)
            self.flush()
        await self.body(number)
        [answer] = self.of(ResponseReceived, number)
        assert answer.headers is not None
        return int(dict(answer.headers)[b":status"])


async def connect(
    address: str,
    *,
    settings: dict[int, int] | None = None,
    tls: ssl.SSLContext | None = None,
    greets: bool = True,
    widens: bool = True,
) -> Caller:
    """Return a client that has sent its preface and, if it widens, the largest window for the connection."""
    url = urlsplit(address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=tls)
    caller = Caller(reader, writer, is_client=True)
    if greets:
        caller.h2.initiate_connection()
        if settings:
            caller.h2.update_settings(settings)  # type: ignore[arg-type]
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
    """A server whose every connection is served by this; yields its address. What it raises is raised here.

    With `local` it listens on that Unix socket alone.
    """
    connections: list[asyncio.Task[Any]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(talk(reader, writer)))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with Talker(reader, writer, is_client=False) as talker:
            talker.h2.initiate_connection()
            if settings:
                talker.h2.update_settings(settings)  # type: ignore[arg-type]
            talker.flush()
            await serve(talker)

    if local is None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
    else:
        server, port = await asyncio.start_unix_server(accept, sock=local), 0
    try:
        yield f"{'http' if tls is None else 'https'}://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        ended = await asyncio.gather(*connections, return_exceptions=True)
        for each in ended:
            if isinstance(each, Exception) and not isinstance(each, ConnectionError):
                raise each
