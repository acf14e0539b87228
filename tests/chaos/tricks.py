"""Requests that a correct client never sends, sent by a trainer in addition to its own: twice, late, or truncated.

They have the fence and the bytes of correct ones. The diary records wrong answers of the pserver.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from ps_protocol.fence import Fence
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.requests import BARRIER_HEADER, Pull, Pulled
from ps_protocol.routes import BARRIER, SEND
from trainer_client.client.buckets import FrameParts
from trainer_client.client.pserver_client import PserverClient
from trainer_client.transport.work import Work, pause, together

from .diary import Diary

_push, _get, _check_version = PserverClient.push, PserverClient.get, PserverClient._check_version


class Tricks:
    """A wrapper of the requests of this process's pserver clients. `ordered` has the numbers of outstanding tricks."""

    def __init__(self, diary: Diary, chance: random.Random) -> None:
        self.ordered: Counter[str] = Counter()
        self.versions: dict[int, dict[int, int]] = {}  # of each pserver: the version that it gave for a round
        self._diary = diary
        self._chance = chance

    def play(self) -> None:
        """Start to wrap requests."""
        tricks = self

        def push(self: PserverClient, round_: int, body: FrameParts, *, initial: bool = False) -> Work[None]:
            if not initial:
                copy = b"".join(body)
                if tricks._is_due("truncated"):
                    yield from tricks._send_truncated(self, round_, copy)
                if tricks._is_due("late"):
                    self.connection.io.start(
                        tricks._send_late(self, self.connection.fence._replace(round=round_), copy)
                    )
                if tricks._is_due("twice"):
                    yield from together([_push(self, round_, body), _push(self, round_, body)])
                    return
            yield from _push(self, round_, body, initial=initial)

        def get(
            self: PserverClient, pull: Pull, destination: Any, on_block: Any, pushed: FrameParts = ()
        ) -> Work[Pulled]:
            if pushed and any(tricks.ordered.values()):  # the same frame in a request of its own, before that
                yield from push(self, pull.round, pushed)
            if pull.barrier is not None and not pushed and tricks._is_due("twice"):
                fence = self.connection.fence._replace(round=pull.round)
                yield from tricks._post(self, BARRIER, fence, b"", pull.barrier.to_headers())
            return (yield from _get(self, pull, destination, on_block, pushed))

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

    def _send_truncated(self, client: PserverClient, round_: int, body: bytes) -> Work[None]:
        cut = body[: self._chance.randrange(1, len(body))]
        status = yield from self._post(client, SEND, client.connection.fence._replace(round=round_), cut)
        if status is not None and status < 400:
            self._diary.write("wrong answer", text=f"a body of {len(cut)} of {len(body)} bytes was taken: {status}")

    def _send_late(self, client: PserverClient, fence: Fence, body: bytes) -> Work[None]:
        yield from pause(self._chance.choice((0.05, 0.3, 1.0)))
        try:
            yield from self._post(client, SEND, fence, body)
            yield from self._post(client, SEND, fence._replace(round=max(1, fence.round - 2)), body)
            yield from self._post(client, BARRIER, fence, b"", {BARRIER_HEADER: "batch"})
        except Exception as error:
            self._diary.write("wrong answer", text=f"a late request failed: {error!r}")

    def _post(
        self, client: PserverClient, path: str, fence: Fence, body: bytes, more: Mapping[str, str] | None = None
    ) -> Work[int | None]:
        connection = client.connection
        headers = {**fence.to_headers(), "content-type": CONTENT_TYPE, **(more or {})}
        try:
            response = yield from connection.io.send(
                "POST", connection.info.address + path, headers, body=(memoryview(body),), http2=connection.info.http2
            )
        except httpx.TransportError:
            return None  # the pserver has just died, or its answer was lost
        if response.headers.get("content-type") == "text/html":
            return None  # a proxy has answered with a page
        if response.status_code >= 500 and response.status_code != 503:
            text = f"{path} answered {response.status_code}: {response.content[:300]!r}"
            self._diary.write("wrong answer", text=text)
        return response.status_code
