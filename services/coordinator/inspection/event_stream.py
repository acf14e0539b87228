"""Events as they happen: server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager

from fastapi import Response
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Receive, Scope, Send

from ps_protocol.errors import TryAgain

from ..coordinator import Coordinator
from ..events import Event

MAX_STREAMS = 64
SILENT_SECONDS = 15.0  # then a comment shows that the connection lives
RETRY_MILLISECONDS = 1000


class EventStreams:
    """Those that are open. Each holds a connection, and nothing else."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._num_open = 0

    def open(self, after: int) -> Response:
        """A reply that lasts until its client leaves or the service stops; TryAgain if there are too many."""
        return _EventStream(self._stream(after), self.place())

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one for the block. Raises TryAgain."""
        if self._num_open >= MAX_STREAMS:
            raise TryAgain(f"{MAX_STREAMS} streams of events are open", code="overloaded")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def _stream(self, after: int) -> AsyncIterator[bytes]:
        yield format_sse_event(comment="events of the cluster", retry=RETRY_MILLISECONDS)
        while not self._coordinator.is_stopping:
            news = await self._wait_for_news(after)
            for event in news:
                after = event.id
                yield format_sse_event(data_str=event.model_dump_json(), event=event.kind, id=str(event.id))
            if not news:
                yield format_sse_event(comment="")

    async def _wait_for_news(self, after: int) -> list[Event]:
        """None if it is silent for long."""
        coordinator = self._coordinator
        await coordinator.wait_until(
            lambda: coordinator.events.newest_id > after or coordinator.is_stopping, SILENT_SECONDS
        )
        return coordinator.events.after(after)


class _EventStream(StreamingResponse):
    """It takes its place when it is sent, and gives it back when that ends, however it ends."""

    def __init__(self, content: AsyncIterator[bytes], place: AbstractContextManager[None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await super().__call__(scope, receive, send)
