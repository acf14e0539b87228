"""The requests of a standby to the pserver that it follows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import torch

from ps_config.control_client import may_be_problem, raise_for_problem
from ps_http2.client import BODY_READER_EXTENSION, ResponseBody
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


class Updates(NamedTuple):
    """Some updates in order, and the newest round of the leader."""

    records: Sequence[Record]
    newest: Round


class Leader:
    """The pserver at an address. Methods raise the error that it answers, httpx.TransportError and ValueError."""

    def __init__(self, address: str, http: httpx.AsyncClient, updates: httpx.AsyncClient) -> None:
        """`updates` is a client for updates alone, which may use an `Http2Transport`."""
        self._address = address
        self._http = http
        self._updates = updates
        self._memory = deque([bytearray(), bytearray()])  # of the newest updates first

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
            await _raise_for_answer(response)
            body, at = bytearray(int(response.headers.get("content-length", 0))), 0
            async for part in response.aiter_raw():
                body[at : at + len(part)] = part
                at += len(part)
        if at != len(body):
            raise BadInput("the copy is incomplete", code="malformed_frame", expected=len(body), actual=at)
        return memoryview(body)

    async def ask_for_updates(self, replica: Replica, instance: str, incarnation: Incarnation) -> httpx.Response:
        """Ask for the updates behind the newest one that a replica holds, which confirms that, for this standby.

        Returns the answer, whose body `read_updates` receives, within the silence of the leader: httpx.ReadTimeout is a
        leader that hangs. `incarnation` is that of the leader.
        """
        query: dict[str, Any] = {
            **_identify(replica), "after": replica.held, "digest": replica.held_chain, "standby": instance,
            "wait_seconds": POLL_SECONDS,
        }  # fmt: skip
        timeout = httpx.Timeout(SILENCE_SECONDS)
        request = self._updates.build_request("GET", self._address + routes.UPDATES, params=query, timeout=timeout)
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                response = await self._updates.send(request, stream=True)
                await _raise_for_answer(response)
        except TimeoutError:
            raise httpx.ReadTimeout("the pserver is silent") from None
        _check_incarnation(response, incarnation)
        return response

    async def read_updates(self, response: httpx.Response, replica: Replica) -> Updates:
        """Return the updates in an answer. They are valid until the second call after this one.

        Raises BadInput for damaged records.
        """
        try:
            data = await self._receive(response, replica.max_record_bytes + MAX_READ_BYTES)
        except TimeoutError:
            raise httpx.ReadTimeout("the pserver is silent") from None
        finally:
            await response.aclose()
        return Updates(parse_records(data, replica.held_chain), int(response.headers["gradpost-round"]))

    async def _receive(self, response: httpx.Response, max_bytes: int) -> memoryview:
        """Return a body, in memory that is used again: page faults are half the cost of receiving a large one."""
        num_bytes, at = int(response.headers["content-length"]), 0
        if num_bytes > max_bytes:
            text = "the records of the pserver are too large"
            raise BadInput(text, code="malformed_frame", expected=f"<= {max_bytes} bytes", actual=num_bytes)
        self._memory.rotate()
        if len(self._memory[0]) < num_bytes:
            self._memory[0] = bytearray(num_bytes)
        data = memoryview(self._memory[0])[:num_bytes]
        reader: ResponseBody | None = response.extensions.get(BODY_READER_EXTENSION)
        if reader is None:
            async for part in response.aiter_raw():
                data[at : at + len(part)] = part
                at += len(part)
        has_more = reader is not None
        while reader is not None and has_more:
            async with asyncio.timeout(SILENCE_SECONDS):
                if at < num_bytes:
                    count, has_more = await reader.read_into(data[at:], SILENCE_SECONDS / 5)
                    at += count
                else:
                    _, has_more = await reader.read()
        if at != num_bytes:
            raise BadInput("the records are incomplete", code="malformed_frame", expected=num_bytes, actual=at)
        return data


def _check_incarnation(response: httpx.Response, incarnation: Incarnation) -> None:
    """Raise StalePserver for a pserver that was restarted since its run was read: it may have lost updates."""
    expected, actual = str(incarnation), response.headers.get("gradpost-incarnation")
    if actual != expected:
        raise StalePserver("the pserver has another incarnation now", expected=expected, actual=actual)


def _identify(replica: Replica) -> dict[str, Any]:
    return {"run": replica.installed.run, "attempt": replica.installed.attempt}


async def _raise_for_answer(response: httpx.Response) -> None:
    if may_be_problem(response):
        await response.aread()
        raise_for_problem(response)


def check_software(served: ServedRun) -> None:
    """Raise Conflict (`replica_mismatch`) if this process might compute other bits than the leader."""
    expected = f"torch {served.torch}, {served.cpu}"
    actual = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    if actual != expected:
        text = "this process cannot follow the pserver, because it might compute other bits; use the same torch and CPU"
        raise Conflict(text, code="replica_mismatch", expected=expected, actual=actual)
