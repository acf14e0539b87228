"""Requests straight to a transport: the token that is sent, the one that it replaced, and what is left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from h2.events import DataReceived, RequestReceived, StreamReset

from ps_config.certificates import TlsFiles
from ps_config.environment import SettingsError
from ps_config.tokens import TokenPair
from trainer_client.transport.exchange import Exchange

from ..http2.sockets import Talker, serving
from ..http2.support import Collector
from ..protocol.test_tokens import NEW, OLD, put

pytestmark = pytest.mark.asyncio


class Service:
    """Goes by one token; answers as soon as headers are here, as services do."""

    def __init__(self, valid: str) -> None:
        self.valid = valid
        self.seen: list[str] = []
        self.talker: Talker

    async def serve(self, talker: Talker) -> None:
        self.talker = talker
        talker.acknowledges = False  # a body that is not wanted is not taken
        while await talker.hear():
            for event in talker.of(RequestReceived)[len(self.seen) :]:
                assert event.headers is not None
                self.seen.append(dict(event.headers).get(b"authorization", b"").decode())
                is_known = self.seen[-1] in (f"Bearer {self.valid}", "")
                talker.h2.send_headers(event.stream_id, [(b":status", b"200" if is_known else b"401")])
                talker.h2.send_data(event.stream_id, b"fine" if is_known else b"who?", end_stream=True)
            talker.flush()


@asynccontextmanager
async def exchanging(file: Path | None, service: Service) -> AsyncIterator[tuple[Exchange, httpx.URL]]:
    async with serving(service.serve) as address:
        exchange = Exchange(TlsFiles(), TokenPair(file) if file else None, http2=True)
        try:
            yield exchange, httpx.URL(address)
        finally:
            await exchange.aclose()


async def test_the_newest_token_is_sent(tmp_path: Path) -> None:
    put(tmp_path / "train", NEW)
    put(tmp_path / "train.previous", OLD)
    service = Service(NEW)
    async with exchanging(tmp_path / "train", service) as (exchange, url):
        response = await exchange.send("GET", url, {"x-a": "b"})
    assert (response.status_code, response.content, service.seen) == (200, b"fine", [f"Bearer {NEW}"])
    assert (response.request.url, response.request.headers["x-a"]) == (url, "b")


async def test_and_the_one_that_it_replaced_if_that_is_not_known_yet(tmp_path: Path) -> None:
    put(tmp_path / "train", NEW)
    put(tmp_path / "train.previous", OLD)
    service = Service(OLD)
    async with exchanging(tmp_path / "train", service) as (exchange, url):
        response = await exchange.send("GET", url, {})
        assert (response.status_code, service.seen) == (200, [f"Bearer {NEW}", f"Bearer {OLD}"])
        service.valid = "neither"
        response = await exchange.send("GET", url, {})
        assert (response.status_code, response.content) == (401, b"who?")


async def test_the_refused_request_is_given_up(tmp_path: Path) -> None:
    """It would go on to read the body, which may change once the other one has been answered."""
    put(tmp_path / "train", NEW)
    put(tmp_path / "train.previous", OLD)
    service = Service(OLD)
    async with exchanging(tmp_path / "train", service) as (exchange, url):
        body = bytearray(200_000)
        response = await asyncio.wait_for(exchange.send("POST", url, {}, body=(memoryview(body),)), 5)
        assert response.content == b"fine"
        body[:] = b"x" * len(body)
        talker = service.talker
        talker.h2.increment_flow_control_window(1_000_000)
        talker.flush()
        for number in (1, 3):
            async with asyncio.timeout(5):
                while not talker.of(StreamReset, number):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert not any(b"x" in event.data for event in talker.of(DataReceived))


async def test_without_tokens_none_is_sent() -> None:
    service = Service(NEW)
    async with exchanging(None, service) as (exchange, url):
        assert (await exchange.send("GET", url, {})).status_code == 200
    assert service.seen == [""]


async def test_without_a_token_nothing_is_sent(tmp_path: Path) -> None:
    service = Service(NEW)
    async with exchanging(tmp_path / "train", service) as (exchange, url):
        with pytest.raises(SettingsError, match="there is no token file"):
            await exchange.send("GET", url, {})
    assert service.seen == []


async def test_a_body_that_is_still_to_come() -> None:
    service = Service(NEW)
    sink: Any = Collector(4)
    async with exchanging(None, service) as (exchange, url):
        response = await exchange.begin("GET", url, {}, sink=sink)
        try:
            assert await response.aread() == b""
        finally:
            await response.aclose()
    assert sink.body == b"fine"
