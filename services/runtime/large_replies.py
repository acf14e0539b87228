"""Replies that are large and made anew for each request: few at once, and sent part by part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ps_protocol.errors import TryAgain

PART_BYTES = 1024 * 1024
MAX_AT_ONCE = 4
PATIENCE_SECONDS = 10.0  # of who waits for a place


@dataclass(frozen=True, slots=True)
class Stream:
    """A reply that is about to flow; `parts` can be read once, and are `num_bytes` in all."""

    num_bytes: int
    parts: AsyncIterator[bytes]
    headers: Mapping[str, str]


class LargeReplies:
    """Places for those who look at much: inspection must not take the memory, or the compute thread, of training."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._places = asyncio.Semaphore(max_at_once)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and hold it for the block. Raises TryAgain if there is none for long."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise TryAgain("too many are reading large replies", code="overloaded") from None
        try:
            yield
        finally:
            self._places.release()


class LargeReply(Response):
    """A reply that is made when there is a place for it, which it holds until the client has taken it.

    What `make` raises is answered as everywhere.
    """

    def __init__(self, places: LargeReplies, make: Callable[[], Awaitable[Sequence[bytes]]], media_type: str) -> None:
        super().__init__(media_type=media_type)
        self._places = places
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make it and send it."""
        while (await receive()).get("more_body"):  # to its end, behind which a disconnect is all that can come
            pass
        left = asyncio.create_task(_wait_until_left(receive))
        try:
            async with self._places.place():
                await asyncio.sleep(0)  # if its client has left meanwhile, let us hear of it
                if left.done():
                    raise ClientDisconnect
                await self._send(send, left)
        finally:
            left.cancel()

    async def _send(self, send: Send, left: asyncio.Task[None]) -> None:
        await send_parts(send, await self._make(), str(self.media_type))


class StreamedReply(LargeReply):
    """The same of something that is not in this process's memory: `open_it` gives its size and its parts."""

    def __init__(
        self, places: LargeReplies, open_it: Callable[[], AbstractAsyncContextManager[Stream]], media_type: str
    ) -> None:
        Response.__init__(self, media_type=media_type)
        self._places = places
        self._open = open_it

    async def _send(self, send: Send, left: asyncio.Task[None]) -> None:
        async with self._open() as stream:
            await send_start(send, stream.num_bytes, str(self.media_type), stream.headers)
            async for part in stream.parts:
                if left.done():  # servers take what nobody takes any more, as fast as it comes
                    return
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_parts(send: Send, chunks: Sequence[bytes], content_type: str) -> None:
    """Send a whole 200 reply in parts of `PART_BYTES` at most, each when the one before it was taken over."""
    await send_start(send, sum(map(len, chunks)), content_type)
    for chunk in chunks:
        for begin in range(0, len(chunk), PART_BYTES):
            part = chunk if len(chunk) <= PART_BYTES else chunk[begin : begin + PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def send_start(send: Send, num_bytes: int, content_type: str, more: Mapping[str, str] | None = None) -> None:
    """Begin a 200 reply."""
    headers = {"content-type": content_type, "content-length": str(num_bytes), **(more or {})}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
