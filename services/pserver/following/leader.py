"""The requests of a standby to the pserver that it follows."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import torch
from typing_extensions import override

from ps_config.control_client import may_be_problem, raise_for_problem
from ps_http2.client_connection import SINK_EXTENSION
from ps_http2.stream import Sink
from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, StalePserver
from ps_protocol.standbys import ServedRun
from ps_protocol.vocabulary import Incarnation, Round

from ..durable.records import Record, parse_records
from ..durable.update_log import MAX_READ_BYTES
from .replica import Replica

POLL_SECONDS = 0.1  # for which the leader waits for an update before it answers that there is none
SILENCE_SECONDS = 0.5  # of the leader while it owes an answer, or a part of it
RUN_SECONDS = 2.0
REPLY_SECONDS = 60.0  # for replies that the leader computes from its whole shard, after those of others
CONNECT_SECONDS = 5.0
SLACK_BYTES = 1 << 16  # of memory behind a body, whose end may be in another frame


class Leader:
    """The pserver at an address. Methods raise the error that it answers, httpx.TransportError and ValueError."""

    def __init__(self, address: str, http: httpx.AsyncClient, updates: httpx.Client) -> None:
        """`updates` is a client for updates alone, with a `PolledTransport`."""
        self._address = address
        self._http = http
        self._updates = updates
        self._num_bytes = 0  # of the newest answer with updates

    async def read_run(self) -> ServedRun:
        """Return the run that the pserver serves."""
        timeout = httpx.Timeout(RUN_SECONDS, connect=CONNECT_SECONDS)
        response = await self._http.get(self._address + routes.RUN, timeout=timeout)
        raise_for_problem(response)
        return ServedRun.from_answer(response.content)

    async def read_copy(self, run: str, attempt: int) -> memoryview:
        """Return a copy of the shard, in memory that the caller owns."""
        timeout = httpx.Timeout(REPLY_SECONDS, connect=CONNECT_SECONDS)
        query: dict[str, Any] = {"run": run, "attempt": attempt}
        async with self._http.stream(
            "GET", self._address + routes.SHARD_COPY, params=query, timeout=timeout
        ) as response:
            if may_be_problem(response):
                await response.aread()
            raise_for_problem(response)
            body, at = bytearray(int(response.headers.get("content-length", 0))), 0
            async for part in response.aiter_raw():
                body[at : at + len(part)] = part
                at += len(part)
        if at != len(body):
            raise BadInput("the copy is incomplete", code="malformed_frame", expected=len(body), actual=at)
        return memoryview(body)

    async def read_updates(
        self, replica: Replica, instance: str, incarnation: Incarnation
    ) -> tuple[list[Record], Round]:
        """Return the updates behind the newest one that a replica holds, and the newest round of the leader.

        The request confirms what the replica holds, for this standby. A thread waits for the answer, and the updates
        own their memory. Raises httpx.ReadTimeout for a leader that hangs, and BadInput for damaged records.
        `incarnation` is that of the leader.
        """
        query: dict[str, Any] = {
            **_identify(replica), "after": replica.held, "digest": replica.held_chain, "standby": instance,
            "wait_seconds": POLL_SECONDS,
        }  # fmt: skip
        body = Body(self._num_bytes + SLACK_BYTES, replica.max_record_bytes + MAX_READ_BYTES)
        request = self._updates.build_request(
            "GET", self._address + routes.UPDATES, params=query, timeout=SILENCE_SECONDS,
            extensions={SINK_EXTENSION: body},
        )  # fmt: skip
        response = await asyncio.to_thread(self._updates.send, request)
        raise_for_problem(response)
        _check_incarnation(response, incarnation)
        self._num_bytes = len(body.content) or self._num_bytes
        return parse_records(body.content, replica.held_chain), int(response.headers["gradpost-round"])


class Body(Sink):
    """The sink of an answer. Its memory has room for about as many bytes as the answer before, and grows if needed."""

    def __init__(self, room_bytes: int, max_bytes: int) -> None:
        self._memory = np.empty(room_bytes, np.uint8).data
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def content(self) -> memoryview:
        """The bytes that have been received."""
        return self._memory[: self._num_bytes]

    @override
    def get_buffer(self) -> memoryview:
        if self._num_bytes == len(self._memory):
            if self._num_bytes > self._max_bytes:
                text = "the records of the pserver are too large"
                raise BadInput(text, code="malformed_frame", expected=f"<= {self._max_bytes} bytes")
            grown = np.empty(2 * self._num_bytes, np.uint8).data
            grown[: self._num_bytes] = self._memory
            self._memory = grown
        return self._memory[self._num_bytes :]

    @override
    def buffer_updated(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    @override
    def feed(self, data: memoryview) -> None:
        while len(data):
            room = self.get_buffer()[: len(data)]
            room[:] = data[: len(room)]
            self.buffer_updated(len(room))
            data = data[len(room) :]


def _check_incarnation(response: httpx.Response, incarnation: Incarnation) -> None:
    """Raise StalePserver for a pserver that was restarted since its run was read: it may have lost updates."""
    expected, actual = str(incarnation), response.headers.get("gradpost-incarnation")
    if actual != expected:
        raise StalePserver("the pserver has another incarnation now", expected=expected, actual=actual)


def _identify(replica: Replica) -> dict[str, Any]:
    return {"run": replica.installed.run, "attempt": replica.installed.attempt}


def check_software(served: ServedRun) -> None:
    """Raise Conflict (`replica_mismatch`) if this process might compute other bits than the leader."""
    expected = f"torch {served.torch}, {served.cpu}"
    actual = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    if actual != expected:
        text = "this process cannot follow the pserver, because it might compute other bits; use the same torch and CPU"
        raise Conflict(text, code="replica_mismatch", expected=expected, actual=actual)
