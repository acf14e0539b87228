"""Large replies that are created for each request: few at a time, and sent part by part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ps_protocol.errors import TryAgain

PART_BYTES = 1024 * 1024  # that are sent at a time
MAX_AT_ONCE = 4
PATIENCE_SECONDS = 10.0  # for which a request waits for a slot
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Stream:
    """A reply whose parts, of any size, arrive one by one; they can be read once and contain `num_bytes` together."""

    num_bytes: int
    parts: AsyncIterator[bytes | memoryview]
    headers: Mapping[str, str]


class LargeReplies:
    """Slots for large replies: inspection must not exhaust the memory or the compute thread of training."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._slots = asyncio.Semaphore(max_at_once)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the block. Raises TryAgain after `PATIENCE_SECONDS`."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            raise TryAgain("too many clients are reading large replies; retry later", code="overloaded") from None
        try:
            yield
        finally:
            self._slots.release()


def stream_chunks(chunks: Sequence[bytes | memoryview], headers: Mapping[str, str] = NO_HEADERS) -> Stream:
    """Return a stream of chunks that are in the memory of this process."""

    async def parts() -> AsyncIterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk

    return Stream(sum(map(len, chunks)), parts(), headers)


class LargeReply(Response):
    """A reply that is created once a slot is free, and that holds the slot until the client has received it.

    `open_it` opens the stream of its parts. An exception that it raises becomes a problem document.
    """

    def __init__(
        self, replies: LargeReplies, open_it: Callable[[], AbstractAsyncContextManager[Stream]], media_type: str
    ) -> None:
        super().__init__(media_type=media_type)
        self._replies = replies
        self._open = open_it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create and send the reply."""
        left = watch_for_disconnect(receive)
        try:
            async with self._replies.slot():
                await asyncio.sleep(0)  # so that a disconnect meanwhile is noticed
                if left.done():
                    raise ClientDisconnect
                async with self._open() as stream:
                    await self._send(stream, send, left)
        finally:
            left.cancel()

    async def _send(self, stream: Stream, send: Send, left: asyncio.Task[None]) -> None:
        headers = {"content-type": str(self.media_type), "content-length": str(stream.num_bytes), **stream.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async for chunk in stream.parts:
            for at in range(0, len(chunk), PART_BYTES):
                if left.done():  # servers accept any number of parts after a disconnect
                    return
                part = chunk[at : at + PART_BYTES]
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def watch_for_disconnect(receive: Receive) -> asyncio.Task[None]:
    """Return a task that ends when the client of a message disconnects."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return asyncio.create_task(wait())
