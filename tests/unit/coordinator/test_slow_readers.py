"""Those who ask for a parameter and take their time: few at once, and what they have not taken is not here."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp, Message

from ps_protocol.frames import LENGTH_BYTES, FrameLimits, encode_header, parse_header
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.coordinator.app import make_coordinator_app
from services.coordinator.coordinator import Coordinator
from services.coordinator.inspection import arriving
from services.coordinator.inspection.parameters import open_parameter
from services.coordinator.settings import CoordinatorSettings
from services.runtime import large_replies
from services.runtime.large_replies import MAX_AT_ONCE, PART_BYTES
from services.runtime.metrics import ServiceMetrics

from .asgi_client import AsgiClient
from .coordinating import eventually
from .support import registration

pytestmark = pytest.mark.asyncio

NUM_PARTS = 50
NUM_ELEMENTS = NUM_PARTS * PART_BYTES // 2 + 1  # of bfloat16, in parts that begin in the middle of one
ONE = (0x3F80).to_bytes(2, "little")


class Reader(AsgiClient):
    """It takes the next part when it is told to."""

    def __init__(self) -> None:
        super().__init__("/v1/parameters/w", b"format=npy")
        self.may_read = asyncio.Event()
        self.has_headers = asyncio.Event()
        self.start: dict[str, Any] = {}
        self.parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = dict(message)
            self.has_headers.set()
            return
        await self.may_read.wait()
        self.parts.append(message["body"])


class Pservers(httpx.AsyncBaseTransport):
    """Answer one parameter, in as many blocks as there are of them, part by part as they are taken."""

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
async def coordinating(pservers: Pservers) -> AsyncIterator[Coordinator]:
    async with httpx.AsyncClient(transport=pservers) as http:
        number = len(pservers.num_taken)
        coordinator = Coordinator(CoordinatorSettings(num_pservers=number), http)
        for index in range(number):
            coordinator.cluster.register_pserver(registration(str(index), index=index), coordinator.now())
        coordinator.cluster.run.plan = pservers.plan
        yield coordinator


def ask(app: ASGIApp, tasks: asyncio.TaskGroup) -> tuple[Reader, asyncio.Task[None]]:
    reader = Reader()
    return reader, tasks.create_task(reader.ask(app))


async def test_few_at_once_and_nothing_of_what_they_have_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_replies, "PATIENCE_SECONDS", 0.1)
    pservers = Pservers()
    async with coordinating(pservers) as coordinator, asyncio.TaskGroup() as tasks:
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        slow = [ask(app, tasks) for _ in range(MAX_AT_ONCE)]
        for reader, _ in slow:
            await reader.has_headers.wait()
        late, refused = ask(app, tasks)
        late.may_read.set()
        await refused
        assert (late.start["status"], json.loads(b"".join(late.parts))["code"]) == (503, "overloaded")
        assert pservers.num_taken[0] <= 3 * MAX_AT_ONCE
        for reader, answered in slow:
            reader.may_read.set()
            await answered
            headers = dict(reader.start["headers"])
            assert headers[b"gradpost-round"] == b"7"
            assert headers[b"etag"] == b'"r.0.7"'  # of what was read, not of the run as it is now
            body = b"".join(reader.parts)
            assert len(body) == int(headers[b"content-length"])
            values = np.load(io.BytesIO(body))
            assert (values.dtype, values.shape) == (np.float32, (NUM_ELEMENTS,))
            assert (values == 1).all()


async def test_for_one_who_has_left_nothing_more_is_read() -> None:
    """A server takes what nobody takes any more as fast as it comes."""
    pservers = Pservers()
    async with coordinating(pservers) as coordinator, asyncio.TaskGroup() as tasks:
        reader, answered = ask(make_coordinator_app(coordinator, ServiceMetrics("coordinator")), tasks)
        await reader.has_headers.wait()
        reader.leaves.set()
        await asyncio.sleep(0)
        reader.may_read.set()
        await answered
        assert pservers.num_taken[0] <= 5


async def test_who_reads_gets_what_was_being_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "STILL_SECONDS", 0.0)
    is_asked, goes_on = asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        is_asked.set()
        await goes_on.wait()
        yield b"last"

    header = encode_header([("w.block0", "F32", (1,))])[LENGTH_BYTES:]
    frame = arriving.ArrivingFrame(parse_header(header, FrameLimits()), parts(), b"")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(frame.keep_moving())
        await is_asked.wait()
        reading = tasks.create_task(anext(frame.read(4)))
        await asyncio.sleep(0)
        goes_on.set()
        assert await reading == b"last"


async def test_what_comes_later_keeps_moving_while_a_reader_takes_his_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its pserver would take the coordinator for one that has stopped reading, and cut it off."""
    monkeypatch.setattr(arriving, "STILL_SECONDS", 0.02)
    pservers = Pservers(2)
    async with coordinating(pservers) as coordinator, open_parameter(coordinator, "w", "safetensors") as stream:
        parts = [await anext(stream.parts), await anext(stream.parts)]
        await eventually(lambda: pservers.num_taken[1] > 10)
        parts += [part async for part in stream.parts]
        assert len(b"".join(parts)) == stream.num_bytes
        assert b"".join(parts).endswith(ONE * NUM_ELEMENTS)
