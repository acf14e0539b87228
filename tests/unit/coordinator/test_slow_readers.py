"""Those who ask for a parameter and take their time: few at once, so that their number costs no memory."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import httpx
import pytest
from starlette.types import Message

from ps_protocol.vocabulary import Round
from services.coordinator.app import make_coordinator_app
from services.coordinator.coordinator import Coordinator
from services.coordinator.inspection import routes
from services.coordinator.inspection.formats import Tensor
from services.coordinator.settings import CoordinatorSettings
from services.runtime import large_replies
from services.runtime.large_replies import MAX_AT_ONCE, PART_BYTES
from services.runtime.metrics import ServiceMetrics

pytestmark = pytest.mark.asyncio

NUM_ELEMENTS = PART_BYTES


class Reader:
    """A client that takes the next part when it is told to."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.has_headers = asyncio.Event()
        self.start: dict[str, Any] = {}
        self.parts: list[bytes] = []
        self._asked = False

    async def receive(self) -> Message:
        if self._asked:
            await asyncio.Event().wait()
        self._asked = True
        return {"type": "http.request"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = dict(message)
            self.has_headers.set()
            return
        await self.may_read.wait()
        self.parts.append(message["body"])


class _Seen(Tensor):
    """One that tells when it is gone."""


read: list[weakref.ref[_Seen]] = []


async def read_parameter(coordinator: Coordinator, name: str, begin: int | None, end: int | None) -> Tensor:
    facts: dict[str, str] = {"run": "r", "attempt": "0", "round": str(Round(7))}
    tensor = _Seen(name, "F32", (NUM_ELEMENTS,), bytes(4 * NUM_ELEMENTS), facts)
    read.append(weakref.ref(tensor))
    return tensor


async def test_one_reader_too_many_waits_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_replies, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(routes, "read_parameter", read_parameter)
    async with httpx.AsyncClient() as http, asyncio.TaskGroup() as tasks:
        app = make_coordinator_app(Coordinator(CoordinatorSettings(), http), ServiceMetrics("coordinator"))

        def ask() -> tuple[Reader, asyncio.Task[None]]:
            reader = Reader()
            scope = {
                "type": "http", "method": "GET", "path": "/v1/parameters/w", "query_string": b"", "http_version": "2",
                "headers": [(b"host", b"localhost")],
            }  # fmt: skip
            return reader, tasks.create_task(app(scope, reader.receive, reader.send))

        slow = [ask() for _ in range(MAX_AT_ONCE)]
        for reader, _ in slow:
            await reader.has_headers.wait()
        gc.collect()
        assert not [one for one in read if one() is not None]  # the reply alone is held
        late, refused = ask()
        late.may_read.set()
        await refused
        assert (late.start["status"], json.loads(b"".join(late.parts))["code"]) == (503, "overloaded")
        for reader, answered in slow:
            reader.may_read.set()
            await answered
            headers = dict(reader.start["headers"])
            assert headers[b"gradpost-round"] == b"7"
            assert headers[b"etag"] == b'"r.0.7"'  # of what was read, not of the run as it is now
            assert sum(map(len, reader.parts)) == int(headers[b"content-length"])
            assert max(map(len, reader.parts)) == PART_BYTES
