"""Long responses: parameters that a slow client reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load
from starlette.types import ASGIApp, Message

from ps_protocol.frames import encode_header
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.coordinator import inspection
from services.coordinator.coordinator import Coordinator
from services.coordinator.inspection import open_file
from services.coordinator.process import make_coordinator_app
from services.coordinator.settings import CoordinatorSettings
from services.runtime import app as app_module
from services.runtime.app import MAX_AT_ONCE, PART_BYTES
from services.runtime.metrics import ServiceMetrics

from .coordinating import eventually
from .support import change_record, registration

NUM_PARTS = 50
NUM_ELEMENTS = NUM_PARTS * PART_BYTES // 2 + 1  # of bfloat16, in parts that begin in the middle of an element
ONE = (0x3F80).to_bytes(2, "little")


class ParameterReader:
    """Calls the route of a parameter, reads the parts when `may_read` is set, and disconnects when `leaves` is set."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.may_read = asyncio.Event()
        self.has_headers = asyncio.Event()
        self.start: dict[str, Any] = {}
        self.parts: list[bytes] = []
        self._has_sent = False

    async def call(self, app: ASGIApp) -> None:
        scope = {
            "type": "http", "method": "GET", "path": "/v1/parameters/w", "query_string": b"", "http_version": "2",
            "headers": [(b"host", b"localhost")],
        }  # fmt: skip
        await app(scope, self.receive, self.send)

    async def receive(self) -> Message:
        if self._has_sent:
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        self._has_sent = True
        return {"type": "http.request"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = dict(message)
            self.has_headers.set()
            return
        await self.may_read.wait()
        self.parts.append(message["body"])


class Pservers(httpx.AsyncBaseTransport):
    """Pservers that serve one parameter of a block each, part by part as the parts are read."""

    def __init__(self, number: int = 1) -> None:
        self.plan = make_plan([ParameterSpec("w", (NUM_ELEMENTS,), "BF16")], number)
        self.num_taken = [0] * number

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        [block] = [block for block in self.plan.blocks if block.name == request.url.params["name"]]
        facts = {"run": "r", "attempt": "0", "round": "7"}
        header = encode_header([(block.name, "BF16", (block.num_elements,))], facts)
        num_bytes = 2 * block.num_elements

        async def parts() -> AsyncIterator[bytes]:
            yield header
            for begin in range(0, num_bytes, PART_BYTES - 1):
                self.num_taken[block.pserver] += 1
                yield (ONE * (PART_BYTES // 2 + 1))[begin % 2 :][: min(PART_BYTES - 1, num_bytes - begin)]

        return httpx.Response(200, content=parts())


@asynccontextmanager
async def serving(pservers: Pservers) -> AsyncIterator[Coordinator]:
    async with httpx.AsyncClient(transport=pservers) as http:
        number = len(pservers.num_taken)
        coordinator = Coordinator(CoordinatorSettings(num_pservers=number), http)
        for index in range(number):
            coordinator.cluster.register_pserver(registration(str(index), index=index), coordinator.now())
        change_record(coordinator.cluster, plan=pservers.plan)
        yield coordinator


def read(app: ASGIApp, tasks: asyncio.TaskGroup) -> tuple[ParameterReader, asyncio.Task[None]]:
    reader = ParameterReader()
    return reader, tasks.create_task(reader.call(app))


async def test_slow_readers_are_limited_and_unread_parts_are_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PATIENCE_SECONDS", 0.1)
    pservers = Pservers()
    async with serving(pservers) as coordinator, asyncio.TaskGroup() as tasks:
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        slow = [read(app, tasks) for _ in range(MAX_AT_ONCE)]
        for reader, _ in slow:
            await reader.has_headers.wait()
        late, refused = read(app, tasks)
        late.may_read.set()
        await refused
        assert (late.start["status"], json.loads(b"".join(late.parts))["code"]) == (503, "overloaded")
        assert pservers.num_taken[0] <= 3 * MAX_AT_ONCE
        for reader, answered in slow:
            reader.may_read.set()
            await answered
            headers = dict(reader.start["headers"])
            assert headers[b"gradpost-round"] == b"7"
            body = b"".join(reader.parts)
            assert len(body) == int(headers[b"content-length"])
            values = load(body)["w"]
            assert (values.dtype, values.shape) == (torch.bfloat16, (NUM_ELEMENTS,))
            assert bool((values == 1).all())


async def test_later_blocks_are_received_while_a_slow_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their pserver would close the connection as stalled."""
    monkeypatch.setattr(inspection, "STILL_SECONDS", 0.02)
    pservers = Pservers(2)
    async with serving(pservers) as coordinator, open_file(coordinator, "w") as stream:
        parts = [await anext(stream.parts), await anext(stream.parts)]
        await eventually(lambda: pservers.num_taken[1] > 10)
        parts += [part async for part in stream.parts]
        assert len(b"".join(parts)) == stream.num_bytes
        assert b"".join(parts).endswith(ONE * NUM_ELEMENTS)
