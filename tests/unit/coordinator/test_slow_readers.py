"""Those who ask for a parameter and take their time: few at once, and what they have not taken is not here."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import Message

from ps_protocol.frames import encode_header
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.coordinator.app import make_coordinator_app
from services.coordinator.coordinator import Coordinator
from services.coordinator.settings import CoordinatorSettings
from services.runtime import large_replies
from services.runtime.large_replies import MAX_AT_ONCE, PART_BYTES
from services.runtime.metrics import ServiceMetrics

from .support import registration

pytestmark = pytest.mark.asyncio

NUM_PARTS = 50
NUM_ELEMENTS = NUM_PARTS * PART_BYTES // 2 + 1  # of bfloat16, in parts that begin in the middle of one
ONE = (0x3F80).to_bytes(2, "little")


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


class Pserver(httpx.AsyncBaseTransport):
    """Answers one parameter, part by part as they are taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        facts = {"run": "r", "attempt": "0", "round": "7"}
        header = encode_header([("w.block0", "BF16", (NUM_ELEMENTS,))], facts)

        async def parts() -> AsyncIterator[bytes]:
            yield header
            for begin in range(0, 2 * NUM_ELEMENTS, PART_BYTES - 1):
                self.num_taken += 1
                yield (ONE * (PART_BYTES // 2 + 1))[begin % 2 :][: min(PART_BYTES - 1, 2 * NUM_ELEMENTS - begin)]

        return httpx.Response(200, content=parts())


async def test_few_at_once_and_nothing_of_what_they_have_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_replies, "PATIENCE_SECONDS", 0.1)
    pserver = Pserver()
    async with httpx.AsyncClient(transport=pserver) as http, asyncio.TaskGroup() as tasks:
        coordinator = Coordinator(CoordinatorSettings(), http)
        coordinator.cluster.register_pserver(registration("0", index=0), coordinator.now())
        coordinator.cluster.run.plan = make_plan([ParameterSpec("w", (NUM_ELEMENTS,), "BF16")], 1)
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))

        def ask() -> tuple[Reader, asyncio.Task[None]]:
            reader = Reader()
            scope = {
                "type": "http", "method": "GET", "path": "/v1/parameters/w", "query_string": b"format=npy",
                "http_version": "2", "headers": [(b"host", b"localhost")],
            }  # fmt: skip
            return reader, tasks.create_task(app(scope, reader.receive, reader.send))

        slow = [ask() for _ in range(MAX_AT_ONCE)]
        for reader, _ in slow:
            await reader.has_headers.wait()
        late, refused = ask()
        late.may_read.set()
        await refused
        assert (late.start["status"], json.loads(b"".join(late.parts))["code"]) == (503, "overloaded")
        assert pserver.num_taken <= 3 * MAX_AT_ONCE
        for reader, answered in slow:
            reader.may_read.set()
            await answered
            headers = dict(reader.start["headers"])
            assert headers[b"gradpost-round"] == b"7"
            assert headers[b"etag"] == b'"r.0.7"'  # of what was read, not of the run as it is now
            body = b"".join(reader.parts)
            assert len(body) == int(headers[b"content-length"])
            values = np.load(io.BytesIO(body))
            assert values.dtype == np.float32
            assert values.shape == (NUM_ELEMENTS,)
            assert (values == 1).all()
