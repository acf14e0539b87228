"""Requests that a correct client never sends, sent by a trainer in addition to its own: twice, late, or truncated.

They have the fence and the bytes of correct ones. The diary records wrong answers of the pserver.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from ps_protocol.fence import Fence
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.requests import BARRIER_HEADER, Pull, PushAnswer
from ps_protocol.routes import BARRIER, SEND
from trainer_client.client.buckets import FrameParts
from trainer_client.client.pserver_client import PserverClient

from .diary import Diary

_push, _get, _check_version = PserverClient.push, PserverClient.get, PserverClient._check_version


class Tricks:
    """A wrapper of the requests of this process's pserver clients. `ordered` has the numbers of outstanding tricks."""

    def __init__(self, diary: Diary, chance: random.Random) -> None:
        self.ordered: Counter[str] = Counter()
        self.versions: dict[int, dict[int, int]] = {}  # of each pserver: the version that it gave for a round
        self._diary = diary
        self._chance = chance
        self._late: set[asyncio.Task[None]] = set()

    def play(self) -> None:
        """Start to wrap requests."""
        tricks = self

        async def push(self: PserverClient, round_: int, body: FrameParts, *, initial: bool = False) -> PushAnswer:
            if initial:
                return await _push(self, round_, body, initial=True)
            if tricks._is_due("truncated"):
                await tricks._send_truncated(self, round_, b"".join(body))
            if tricks._is_due("late"):
                late = tricks._send_late(self, self.connection.fence._replace(round=round_), b"".join(body))
                tricks._late.add(task := asyncio.create_task(late))
                task.add_done_callback(tricks._end_late)
            if tricks._is_due("twice"):
                return (await asyncio.gather(_push(self, round_, body), _push(self, round_, body)))[0]
            return await _push(self, round_, body)

        async def get(self: PserverClient, pull: Pull, destination: Any, on_block: Any, pushed: FrameParts = ()) -> Any:
            if pull.barrier is not None and not pushed and tricks._is_due("twice"):
                await self.barrier(pull.round, pull.barrier)
            return await _get(self, pull, destination, on_block, pushed)

        def check_version(self: PserverClient, metadata: Mapping[str, str], round_: int) -> int:
            version = tricks.versions.setdefault(self.index, {})[round_] = _check_version(self, metadata, round_)
            return version

        PserverClient.push, PserverClient.get = push, get  # type: ignore[method-assign]
        PserverClient._check_version = check_version  # type: ignore[method-assign]

    def _is_due(self, name: str) -> bool:
        if not self.ordered[name]:
            return False
        self.ordered[name] -= 1
        return True

    async def _send_truncated(self, client: PserverClient, round_: int, body: bytes) -> None:
        cut = body[: self._chance.randrange(1, len(body))]
        status = await self._post(client, SEND, client.connection.fence._replace(round=round_), cut)
        if status is not None and status < 400:
            self._diary.write("wrong answer", text=f"a body of {len(cut)} of {len(body)} bytes was taken: {status}")

    async def _send_late(self, client: PserverClient, fence: Fence, body: bytes) -> None:
        await asyncio.sleep(self._chance.choice((0.05, 0.3, 1.0)))
        await self._post(client, SEND, fence, body)
        await self._post(client, SEND, fence._replace(round=max(1, fence.round - 2)), body)
        await self._post(client, BARRIER, fence, b"", {BARRIER_HEADER: "batch"})

    def _end_late(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._diary.write("wrong answer", text=f"a late request failed: {error!r}")

    async def _post(
        self, client: PserverClient, path: str, fence: Fence, body: bytes, more: Mapping[str, str] | None = None
    ) -> int | None:
        headers = {**fence.to_headers(), "content-type": CONTENT_TYPE, **(more or {})}
        try:
            response, content = await client.connection.exchange.send(
                "POST", client.connection.url(path), headers, body=(memoryview(body),)
            )
        except httpx.TransportError:
            return None  # the pserver has just died, or its answer was lost
        if response.status_code >= 500 and response.status_code != 503:
            self._diary.write("wrong answer", text=f"{path} answered {response.status_code}: {content[:300]!r}")
        return response.status_code
