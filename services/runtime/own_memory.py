"""An extension of ASGI: bodies that are received into, and sent from, the application's own memory without a copy.

A server that has it puts a `Landing` into a request's scope and takes memoryviews as parts of a response; with others
the functions here copy.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

LANDING = "gradpost.landing"  # name of the extension in a scope
COPY_BYTES = 1024 * 1024  # at once, where parts of a response have to be bytes


class Landing:
    """Where the next part of a request's body belongs."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def offer(self, buffer: memoryview) -> None:
        """The next `receive` may write there, and answer with a view of what it has written."""
        self._buffer = buffer

    def take(self) -> memoryview | None:
        """The server's side: what was offered, once."""
        buffer, self._buffer = self._buffer, None
        return buffer


async def receive_into(buffer: memoryview, scope: Scope, receive: Receive) -> tuple[int, bool]:
    """Receive the next part of a body at the beginning of a buffer; returns its bytes, and whether more may come.

    Raises ValueError if it does not fit.
    """
    landing = scope.get("extensions", {}).get(LANDING)
    if landing is not None:
        landing.offer(buffer)
    message = await receive()
    part = message.get("body", b"")
    if len(part) > len(buffer):
        raise ValueError("the body is longer than its buffer")
    if not isinstance(part, memoryview):  # a view is of the buffer itself
        buffer[: len(part)] = part
    return len(part), message.get("more_body", False)


async def send_from(part: bytes | memoryview, scope: Scope, send: Send, *, more_body: bool) -> None:
    """Send a part of a response; a view may change again once this has returned, or was cancelled."""
    if isinstance(part, bytes) or LANDING in scope.get("extensions", {}):
        await send({"type": "http.response.body", "body": part, "more_body": more_body})
        return
    for at in range(0, len(part), COPY_BYTES):
        piece = bytes(part[at : at + COPY_BYTES])
        is_last = at + len(piece) == len(part)
        await send({"type": "http.response.body", "body": piece, "more_body": more_body or not is_last})
