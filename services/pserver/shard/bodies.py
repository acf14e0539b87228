"""Large bodies in buffers that are reused, because page faults are half the cost of receiving a large body.

A buffer belongs to one `Body`, referenced by its request and then by the blocks staged from it, or to the copy of the
shard that a trainer pulls. It returns to the pool when the last reference is released.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from starlette.types import Receive, Scope

from ps_http2.asgi import receive_into
from ps_protocol.errors import BadInput
from ps_protocol.frames import Frame, FrameLimits, TensorEntry, parse_frame

PAGE_BYTES = 4 * 1024  # sizes of buffers are multiples of it,
GRAIN_BYTES = 64 * 1024  # or of this: bodies with the same blocks have headers of different lengths
LARGE_BYTES = 1024 * 1024


class BufferPool:
    """Buffers of the sizes that recur every round. They are acquired on the event loop, and released on any thread."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[memoryview]] = defaultdict(list)
        self.idle_bytes = 0
        self.used_bytes = 0
        self._peak_bytes = 0

    def acquire(self, num_bytes: int) -> memoryview:
        """Return a buffer of this size or a little more, with undefined content.

        A new one takes memory only where it is written: a body that is announced and never sent costs nothing.
        """
        grain = GRAIN_BYTES if num_bytes >= LARGE_BYTES else PAGE_BYTES
        num_bytes += -num_bytes % grain
        if same_size := self._idle[num_bytes]:
            self.idle_bytes -= num_bytes
            buffer = same_size.pop()
        else:
            buffer = np.empty(num_bytes, np.uint8).data
        self.used_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
        return buffer

    def release(self, buffer: memoryview) -> None:
        """Keep the buffer, unless more bytes would be idle than were ever in use at a time."""
        self.used_bytes -= len(buffer)
        if self.idle_bytes + len(buffer) <= self._peak_bytes:
            self.idle_bytes += len(buffer)
            self._idle[len(buffer)].append(buffer)

    def free(self, buffer: memoryview) -> None:
        """Free a buffer whose size will not be needed again."""
        self.used_bytes -= len(buffer)
        self._peak_bytes -= len(buffer)

    def free_idle(self) -> None:
        """Free the idle buffers, since other sizes will be needed from now on."""
        self._idle.clear()
        self.idle_bytes = 0
        self._peak_bytes = self.used_bytes


class PooledBuffer:
    """Memory of a pool. Views of it are valid while this object is referenced. Created on the event loop."""

    def __init__(self, pool: BufferPool, num_bytes: int) -> None:
        self.is_recurring = True  # a body of this size comes in every round
        self._pool = pool
        self._memory = pool.acquire(num_bytes)
        self.buffer = self._memory[:num_bytes]

    def __del__(self) -> None:
        if self.is_recurring:
            self._pool.release(self._memory)
        else:
            self._pool.free(self._memory)


class Body(PooledBuffer):
    """One received frame: its buffer and the parsed header."""

    frame: Frame

    @property
    def data(self) -> memoryview:
        """The data section, without a copy."""
        return self.buffer[self.frame.data_begin :]

    def view(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor, without a copy."""
        return self.data[entry.begin : entry.end]


def content_length(headers: dict[str, str], limits: FrameLimits) -> int:
    """Return the announced length of a body, checked before anything is allocated. Raises BadInput."""
    text = headers.get("content-length", "")
    if not (text.isascii() and text.isdigit()):
        raise BadInput("a tensor body needs a Content-Length header", code="length_required")
    if len(text) > 18 or int(text) > limits.max_body_bytes:
        raise BadInput(
            "the body is too large",
            code="body_too_large", expected=f"<= {limits.max_body_bytes} bytes", actual=text[:40],
        )  # fmt: skip
    return int(text)


async def receive_body(scope: Scope, receive: Receive, num_bytes: int, limits: FrameLimits, pool: BufferPool) -> Body:
    """Receive exactly `num_bytes` and parse them. Waits for the client. Raises BadInput if the body ends early."""
    body = Body(pool, num_bytes)
    filled = 0
    more = True
    while more:
        try:
            received, more = await receive_into(body.buffer[filled:], scope, receive)
        except ValueError:
            raise BadInput(
                "the body is longer than its Content-Length", code="malformed_frame", expected=f"{num_bytes} bytes"
            ) from None
        filled += received
    if filled != num_bytes:
        raise BadInput("the body ended early", code="malformed_frame", expected=f"{num_bytes} bytes", actual=filled)
    body.frame = parse_frame(body.buffer, limits)
    return body
