"""A disturbed network: a TCP proxy before one service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived
from h2.exceptions import ProtocolError

Direction = Literal["up", "down"]  # to the service, and from it

ALL_CLIENTS = ""
UPLOAD_BYTES = 400  # a chunk of at least so much is the body of a push
CHECK_SECONDS = 0.02
CHUNK_BYTES = 64 * 1024
PREFACE = b"PRI * HTTP/2.0"


@dataclass(eq=False)
class _Connection:
    """A client's connection and that to the service, or the client's alone if it gets pages."""

    client: str
    ends: list[asyncio.StreamWriter]
    is_deaf: bool = False  # responses are discarded

    def reset(self) -> None:
        for writer in self.ends:
            linger = struct.pack("ii", 1, 0)  # closing sends a reset and discards unsent bytes
            with contextlib.suppress(OSError):  # it is closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


class Proxy:
    """A proxy that forwards connections to a port on loopback in its own thread, until `close`.

    Any thread may set its public attributes at any time. `name_client` returns the client of a port, and `find_target`
    the port of the service.
    """

    def __init__(self, name_client: Callable[[int], str], find_target: Callable[[], int]) -> None:
        self.blocked: set[tuple[Direction, str]] = set()  # directions and clients; bytes are held back, none is lost
        self.delay_seconds = 0.0  # of every chunk
        self.num_lost_replies = 0  # of the next uploads
        self.num_cut_replies = 0  # of the next replies, as if the service had closed the connection
        self.page: int | None = None  # the status of the page that answers every request on a new connection
        self._name_client = name_client
        self._find_target = find_target
        self._connections: set[_Connection] = set()
        self._ends: list[asyncio.StreamWriter] = []  # of all connections, to the end
        self.port = 0
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    async def _run(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._is_ready.set()
            await self._is_over.wait()
            for end in self._ends:  # also those that wait for a process that is stopped to take the rest
                end.transport.abort()
            await asyncio.sleep(0)  # for the transports to close their sockets

    @property
    def address(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def cut_off(self, *clients: str | None, directions: Collection[Direction] = ("up", "down")) -> Iterator[None]:
        """Hold back the bytes of these clients within the block; None stands for no client."""
        blocked = {(direction, client) for client in clients if client is not None for direction in directions}
        self.blocked = self.blocked | blocked
        yield
        self.blocked = self.blocked - blocked

    def reset(self) -> None:
        """Reset all connections, also in the middle of a request."""
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for connection in tuple(self._connections):
            connection.reset()

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._name_client(writer.get_extra_info("peername")[1])
        connection = _Connection(client, [writer])
        self._ends.append(writer)
        try:
            await self._pass("up", client)  # a partition holds back the first packet, too
            self._connections.add(connection)
            if self.page is not None:
                await answer_pages(reader, writer, self.page)
                return
            there, back = await asyncio.open_connection("127.0.0.1", self._find_target())
            connection.ends.append(back)
            self._ends.append(back)
            pumps = {
                asyncio.ensure_future(self._pump("up", connection, reader, back)),
                asyncio.ensure_future(self._pump("down", connection, there, writer)),
            }
            _, running = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in running:
                pump.cancel()
        except OSError:
            writer.transport.abort()  # as the service does not listen
        finally:
            self._connections.discard(connection)
            for end in connection.ends:
                end.close()

    async def _pump(
        self, direction: Direction, connection: _Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(CHUNK_BYTES):
                await asyncio.sleep(self.delay_seconds)
                await self._pass(direction, connection.client)
                if direction == "down" and connection.is_deaf:
                    connection.reset()
                    return
                if direction == "down" and self.num_cut_replies and len(chunk) > 1:
                    self.num_cut_replies -= 1
                    sink.write(chunk[: len(chunk) // 2])
                    return
                sink.write(chunk)
                if direction == "up" and self.num_lost_replies and len(chunk) >= UPLOAD_BYTES:
                    self.num_lost_replies -= 1
                    connection.is_deaf = True
                await sink.drain()

    async def _pass(self, direction: Direction, client: str) -> None:
        while {(direction, client), (direction, ALL_CLIENTS)} & self.blocked:  # noqa: ASYNC110 - which other threads set
            await asyncio.sleep(CHECK_SECONDS)


async def answer_pages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int) -> None:
    """Answer each request with a page as a gateway does, until the connection ends; over HTTP/1.1 that is at once."""
    phrase = HTTPStatus(status).phrase
    page = f"<html><head><title>{status} {phrase}</title></head><body><h1>{phrase}</h1></body></html>".encode()
    data = await reader.read(CHUNK_BYTES)
    if not data.startswith(PREFACE):
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/html\r\ncontent-length: {len(page)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode() + page)
        await writer.drain()
        while data:  # closing with unread bytes resets the connection, and the page may be lost
            data = await reader.read(CHUNK_BYTES)
        return
    connection = H2Connection(H2Configuration(client_side=False))
    connection.initiate_connection()
    while data:
        try:
            events = connection.receive_data(data)
        except ProtocolError:
            return
        for event in events:
            if isinstance(event, RequestReceived):
                headers = [(":status", str(status)), ("content-type", "text/html"), ("content-length", str(len(page)))]
                connection.send_headers(event.stream_id, headers)
                connection.send_data(event.stream_id, page, end_stream=True)
            elif isinstance(event, DataReceived):
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        writer.write(connection.data_to_send())
        await writer.drain()
        data = await reader.read(CHUNK_BYTES)
