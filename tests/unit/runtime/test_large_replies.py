"""Large replies: few at once, in parts, and errors as everywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response

from ps_protocol.errors import StaleRound
from services.runtime import large_replies
from services.runtime.large_replies import PART_BYTES, LargeReplies, LargeReply, send_parts

from .support import Sample, running

pytestmark = pytest.mark.asyncio


def make_app(may_end: asyncio.Event) -> FastAPI:
    app = Sample().make_app()
    large = LargeReplies(max_at_once=2)

    async def make() -> list[bytes]:
        await may_end.wait()
        return [bytes(PART_BYTES + 1), b"end"]

    async def fail() -> list[bytes]:
        raise StaleRound("round 3 is over")

    @app.get("/large")
    async def read() -> Response:
        return LargeReply(large, make, "application/octet-stream")

    @app.get("/fails")
    async def read_in_vain() -> Response:
        return LargeReply(large, fail, "application/octet-stream")

    return app


async def test_a_place_for_each_and_patience_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_replies, "PATIENCE_SECONDS", 0.1)
    may_end = asyncio.Event()
    async with running(make_app(may_end)) as server, httpx.AsyncClient(base_url=server.address) as client:
        begun = [asyncio.create_task(client.get("/large")) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = await client.get("/large")
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        may_end.set()
        for task in begun:
            assert (await task).content == bytes(PART_BYTES + 1) + b"end"
        for _ in range(3):  # an error gives its place back
            assert (await client.get("/fails")).json()["code"] == "stale_round"
        assert len((await client.get("/large")).content) == PART_BYTES + 4


async def test_who_left_while_waiting_for_a_place_is_not_served() -> None:
    may_end = asyncio.Event()
    num_made = 0
    large = LargeReplies(max_at_once=1)

    async def make() -> list[bytes]:
        nonlocal num_made
        num_made += 1
        await may_end.wait()
        return [b"end"]

    app = Sample().make_app()

    @app.get("/large")
    async def read() -> Response:
        return LargeReply(large, make, "application/octet-stream")

    async with running(app) as served, httpx.AsyncClient(base_url=served.address) as client:
        first = asyncio.create_task(client.get("/large"))
        await asyncio.sleep(0.1)
        for _ in range(5):
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/large", timeout=httpx.Timeout(5, read=0.05))
        await asyncio.sleep(0.1)
        may_end.set()
        assert (await first).content == b"end"
        assert (await client.get("/large")).content == b"end"
    assert num_made == 2


async def test_parts() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_parts(send, [bytes(2 * PART_BYTES + 1), b"end", b""], "text/plain")
    assert dict(sent[0]["headers"])[b"content-length"] == str(2 * PART_BYTES + 4).encode()
    assert [len(message["body"]) for message in sent[1:]] == [PART_BYTES, PART_BYTES, 1, 3, 0]
    assert [message.get("more_body", False) for message in sent[1:]] == [True, True, True, True, False]
