"""A disturbed network: a TCP proxy before one service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .pages import answer_pages

Direction = Literal["up", "down"]  # to the service, and from it

ALL_CLIENTS = ""
UPLOAD_BYTES = 400  # a chunk of at least so much is the body of a push
SETTLING_TURNS = 5
CHECK_SECONDS = 0.02
CHUNK_BYTES = 64 * 1024


@dataclass(eq=False)
class _Connection:
    """A client's connection and that to the service, or the client's alone if it gets pages."""

    client: str
    ends: tuple[asyncio.StreamWriter, ...]
    is_deaf: bool = False  # responses are discarded

    def reset(self) -> None:
        for writer in self.ends:
            linger = struct.pack("ii", 1, 0)  # closing sends a reset and discards unsent bytes
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


class Proxy:
    """A proxy that forwards connections to `target` on loopback in its own thread, until `close`.

    Any thread may set its public attributes at any time. `name_client` returns the client of a port.
    """

    def __init__(self, name_client: Callable[[int], str]) -> None:
        self.target = 0  # the service's port
        self.blocked: set[tuple[Direction, str]] = set()  # directions and clients; bytes are held back, none is lost
        self.delay_seconds = 0.0  # of every chunk
        self.num_lost_replies = 0  # of the next uploads
        self.num_cut_replies = 0  # of the next replies, as if the service had closed the connection
        self.page: int | None = None  # the status of the page that answers every request on a new connection
        self._name_client = name_client
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Reset all connections, also in the middle of a request."""
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for connection in tuple(self._connections):
            connection.reset()

    def close(self) -> None:
        """Reset all connections and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        for _ in range(SETTLING_TURNS):  # accepted connections start, which needs an open server
            await asyncio.sleep(0)
        self._server.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in tuple(self._writers):
            writer.transport.abort()  # with unsent bytes
        for _ in range(SETTLING_TURNS):  # they are closed in the next iteration of the loop
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._own(asyncio.current_task())
        self._writers.add(writer)
        client = self._name_client(writer.get_extra_info("peername")[1])
        try:
            await self._pass("up", client)  # a partition holds back the first packet, too
            if self.page is not None:
                self._connections.add(connection := _Connection(client, (writer,)))
                try:
                    await answer_pages(reader, writer, self.page)
                finally:
                    self._connections.discard(connection)
                writer.close()
                return
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        self._writers.add(back)
        connection = _Connection(client, (writer, back))
        self._connections.add(connection)
        pumps = [
            self._own(asyncio.ensure_future(self._pump("up", connection, reader, back))),
            self._own(asyncio.ensure_future(self._pump("down", connection, there, writer))),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            self._connections.discard(connection)
            for end in connection.ends:
                end.close()

    def _own(self, task: asyncio.Task[None] | None) -> asyncio.Task[None]:
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
