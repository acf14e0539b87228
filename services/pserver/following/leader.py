"""The requests of a standby to the pserver that it follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import torch

from ps_config.control_client import may_be_problem, raise_for_problem, send_message
from ps_http2.client import BODY_READER_EXTENSION, ResponseBody
from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, StalePserver
from ps_protocol.standbys import HeldUpdates, ServedRun, ShardDigests
from ps_protocol.vocabulary import Incarnation

from ..durable.record_stream import Received, RecordParser
from .replica import Replica

SILENCE_SECONDS = 0.5  # the leader sends a record ten times a second
RUN_SECONDS = 2.0
OPEN_SECONDS = 1.0  # until the headers of a stream arrive
CONFIRM_SECONDS = 2.0
DIGEST_SECONDS = 10.0
REPLY_SECONDS = 60.0  # for replies that the leader computes from its whole shard, after those of others
CONNECT_SECONDS = 5.0
DIRECT_BYTES = 64 * 1024  # of a record, from which on it is received without a copy


class Leader:
    """The pserver at an address. Methods raise the error that it answers, httpx.TransportError and ValueError."""

    def __init__(self, address: str, http: httpx.AsyncClient, open_updates: Callable[[], httpx.AsyncClient]) -> None:
        """`open_updates` makes a client for one stream of updates, which may use an `Http2Transport`."""
        self._address = address
        self._http = http
        self._open_updates = open_updates

    async def read_run(self) -> ServedRun:
        """Return the run that the pserver serves."""
        return ServedRun.from_answer(await self._get(routes.RUN, RUN_SECONDS))

    async def read_digests(self, replica: Replica) -> ShardDigests:
        """Return the digests of the pserver's blocks after its newest round."""
        return ShardDigests.from_answer(await self._get(routes.SHARD_DIGESTS, DIGEST_SECONDS, **_identify(replica)))

    async def confirm_updates(self, held: HeldUpdates) -> None:
        """Report the updates that this process holds."""
        await send_message(self._http, "POST", self._address + routes.HELD_UPDATES, held, timeout=CONFIRM_SECONDS)

    async def _get(self, path: str, seconds: float, **query: Any) -> bytes:
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        response = await self._http.get(self._address + path, params=query, timeout=timeout)
        raise_for_problem(response)
        return response.content

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

    async def read_updates(
        self, replica: Replica, instance: str, incarnation: Incarnation
    ) -> AsyncGenerator[Iterator[Received], None]:
        """Yield the updates behind those of a replica, whenever bytes arrive, to the standby `instance`.

        `incarnation` is that of the leader. An update is valid until the second one after it is read. Raises BadInput
        for a damaged stream. httpx.ReadTimeout is a leader that hangs.
        """
        query: dict[str, Any] = {**_identify(replica), "after": replica.round, "standby": instance}
        if replica.chain is not None:
            query["digest"] = replica.chain
        parser = RecordParser(replica.max_record_bytes, replica.chain)
        url, timeout = self._address + routes.UPDATES, httpx.Timeout(SILENCE_SECONDS)
        try:
            async with self._open_updates() as updates:  # an earlier connection may be broken
                request = updates.build_request("GET", url, params=query, timeout=timeout)
                async with asyncio.timeout(OPEN_SECONDS):
                    response = await updates.send(request, stream=True)
                    await _raise_for_answer(response)
                _check_incarnation(response, incarnation)
                async for received in _receive(response, parser):
                    yield received
        except TimeoutError:
            raise httpx.ReadTimeout("the pserver is silent") from None


async def _receive(response: httpx.Response, parser: RecordParser) -> AsyncGenerator[Iterator[Received], None]:
    """Yield records as their bytes arrive. Over HTTP/2 the next ones are sent once these have been taken."""
    body: ResponseBody | None = response.extensions.get(BODY_READER_EXTENSION)
    if body is None:
        async for part in response.aiter_raw():
            yield parser.feed(part)
        return
    has_more = True
    while has_more:
        async with asyncio.timeout(SILENCE_SECONDS):
            if len(room := parser.room) < DIRECT_BYTES:
                data, has_more = await body.read()
                received = parser.feed(data)
            else:
                num_bytes, has_more = await body.read_into(room, SILENCE_SECONDS / 5)
                received = parser.fill(num_bytes)
        yield received


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
