"""A connection to another process of this host: lines of JSON, and regular signs of life.

Collectives do not report which process is missing, and NCCL's do not even notice. The end of this connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from ps_protocol.errors import BadModel, Ended, GradpostError, error_from_problem

MAX_LINE_BYTES = 16 * 1024 * 1024

Line = dict[str, Any]


class Peer:
    """Another process of this host. Lives on the I/O loop."""

    def __init__(
        self,
        process: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_failure: Callable[[GradpostError], None],
    ) -> None:
        """Listen on a connection; `on_failure` is called with an error that makes further waits useless."""
        self.process = process
        self.silent_periods = 0  # since the last message; `Host` counts them
        self.left = asyncio.Event()  # its script has ended, and reported that
        self._reader = reader
        self._writer = writer
        self._on_failure = on_failure
        self._inbox: asyncio.Queue[Line] = asyncio.Queue()
        self._unread: GradpostError | None = None  # a failure that was not received yet
        self._listening = asyncio.create_task(self._listen(), name=f"process {process}")

    def __repr__(self) -> str:
        return f"<Peer [process {self.process} | {self._inbox.qsize()} messages | silent {self.silent_periods}]>"

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message, unless the process has gone. Does not wait."""
        if not self._writer.is_closing():
            self._writer.write(encode(kind, **facts))

    async def receive(self, kind: str) -> Line:
        """Receive its next message, which must be of this kind. Raises its reported failure, Ended, BadModel.

        A cancelled wait leaves the message in the inbox.
        """
        line = await self._inbox.get()
        if line["kind"] == "failure":
            self._unread = None
            raise error_from_problem(line["problem"])
        if line["kind"] == "left":
            self._inbox.put_nowait(line)
            raise self.left_early_error()
        if line["kind"] != kind:
            raise BadModel(
                f"process {self.process} of this host has called another method of its optimizer than this one",
                expected=kind,
                actual=line["kind"],
            )
        return line

    def left_early_error(self) -> Ended:
        """Return the error for a process that still needs this one."""
        return Ended(f"process {self.process} of this host was done before the others", code="host_broken")

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the latter: not JSON, or far too long
            while text := await self._reader.readline():
                self.silent_periods = 0
                self._receive(json.loads(text))
        if not self.left.is_set():
            error = Ended(f"process {self.process} of this host has ended", code="host_broken")
            self._on_failure(error)
            self._inbox.put_nowait({"kind": "failure", "problem": error.to_problem()})

    def _receive(self, line: Line) -> None:
        if line["kind"] == "alive":
            return
        if line["kind"] == "left":
            self.left.set()
            if line["outcome"] != "done":
                error = Ended(f"process {self.process} of this host has failed: {line['reason']}", code="host_broken")
                self._on_failure(self._unread or error)
        if line["kind"] == "failure":
            self._unread = error_from_problem(line["problem"])
            if isinstance(self._unread, Ended):
                self._on_failure(self._unread)
        self._inbox.put_nowait(line)

    async def close(self) -> None:
        """Send the rest, and close the connection."""
        self._listening.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def encode(kind: str, **facts: Any) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps({"kind": kind, **facts}, default=str).encode() + b"\n"
