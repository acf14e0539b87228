"""Requests of trainers over both transports: tokens, bodies, errors, connections, and renewed certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from h2.events import DataReceived, RequestReceived, StreamReset

from ps_config.certificates import TlsFiles
from ps_config.control_client import make_control_client
from ps_config.environment import SettingsError
from ps_config.tokens import TokenPair
from ps_http2.client import BODY_EXTENSION
from ps_protocol.errors import Unreachable
from services.runtime import server as server_module
from services.runtime.app import add_raw_route
from trainer_client.client.coordinator_client import CoordinatorClient
from trainer_client.client.settings import read_settings
from trainer_client.transport.exchange import CHUNK_BYTES, Exchange, make_bulk_client

from ..http2.sockets import Talker, serving
from ..protocol.test_certificates import Authority
from ..protocol.test_tokens import NEW, OLD, put
from ..runtime.support import Running, Sample, running


class Service:
    """A service that accepts one token, and answers when the headers are received, as services do."""

    def __init__(self, valid: str) -> None:
        self.valid = valid
        self.seen: list[str] = []
        self.talker: Talker

    def answer(self, authorization: str) -> int:
        self.seen.append(authorization)
        return 200 if authorization == f"Bearer {self.valid}" else 401

    async def serve(self, talker: Talker) -> None:
        self.talker = talker
        talker.acknowledges = False  # the body of a refused request is not read
        num_before = len(self.seen)
        while await talker.hear():
            for event in talker.of(RequestReceived)[len(self.seen) - num_before :]:
                assert event.headers is not None
                status = self.answer(dict(event.headers).get(b"authorization", b"").decode())
                talker.h2.send_headers(event.stream_id, [(b":status", b"%d" % status)])
                talker.h2.send_data(event.stream_id, b"fine" if status == 200 else b"who?", end_stream=True)
            talker.flush()

    @asynccontextmanager
    async def exchanging(self, file: Path) -> AsyncIterator[tuple[Exchange, str]]:
        async with serving(self.serve) as address:
            exchange = Exchange(TlsFiles(), TokenPair(file), http2=True)
            try:
                yield exchange, address
            finally:
                await exchange.aclose()


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("valid", "previous", "status", "sent"),
    [
        (NEW, OLD, 200, [NEW]),
        (OLD, OLD, 200, [NEW, OLD]),  # the service does not know the new one yet
        (OLD, None, 401, [NEW]),
        ("neither", OLD, 401, [NEW, OLD]),
    ],
)
async def test_the_previous_token_is_sent_if_the_new_one_is_refused(
    valid: str, previous: str | None, status: int, sent: list[str], tmp_path: Path
) -> None:
    put(tmp_path / "train", NEW)
    if previous:
        put(tmp_path / "train.previous", previous)
    service = Service(valid)
    async with service.exchanging(tmp_path / "train") as (exchange, url):
        response, content = await exchange.send("GET", url, {"x-a": "b"})
    assert (response.status_code, content) == (status, b"fine" if status == 200 else b"who?")
    if status != 200:
        assert (response.request.url, response.request.headers["x-a"]) == (url, "b")
    assert service.seen == [f"Bearer {token}" for token in sent]


async def test_the_refused_request_is_reset_so_that_its_body_may_change(tmp_path: Path) -> None:
    put(tmp_path / "train", NEW)
    put(tmp_path / "train.previous", OLD)
    service = Service(OLD)
    async with service.exchanging(tmp_path / "train") as (exchange, url):
        body = bytearray(200_000)
        _, content = await asyncio.wait_for(exchange.send("POST", url, {}, body=(memoryview(body),)), 5)
        assert content == b"fine"
        body[:] = b"x" * len(body)
        talker = service.talker
        talker.h2.increment_flow_control_window(1_000_000)
        talker.flush()
        for number in (1, 3):
            async with asyncio.timeout(5):
                while not talker.of(StreamReset, number):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert not any(b"x" in event.data for event in talker.of(DataReceived))


async def test_without_a_token_file_nothing_is_sent(tmp_path: Path) -> None:
    service = Service(NEW)
    async with service.exchanging(tmp_path / "train") as (exchange, url):
        with pytest.raises(SettingsError, match="there is no token file"):
            await exchange.send("GET", url, {})
    assert service.seen == []


# ---------------------------------------------------------------- HTTP/1.1


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": memoryview(body)})


@asynccontextmanager
async def exchanging(tokens: TokenPair | None = None, **settings: Any) -> AsyncIterator[tuple[Exchange, str]]:
    app = Sample().make_app()
    add_raw_route(app, "/echo", echo, methods=["POST"], summary="Echo the body")
    exchange = Exchange(TlsFiles(), tokens, http2=False)
    async with running(app, **settings) as service:
        try:
            yield exchange, service.address
        finally:
            await exchange.aclose()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, CHUNK_BYTES, 3 * CHUNK_BYTES + 7)])
async def test_a_body_is_sent_and_received_in_portions(sizes: tuple[int, ...]) -> None:
    parts = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]
    async with exchanging() as (exchange, url):
        response = await exchange.begin_request("POST", f"{url}/echo", {"x-a": "b"}, body=parts)
        portions = [portion async for portion in response.aiter_raw()]
        await response.aclose()
    assert (response.status_code, response.http_version) == (200, "HTTP/1.1")
    assert b"".join(portions) == b"".join(parts)
    assert len(portions) > 1 or sum(sizes) < CHUNK_BYTES


async def test_the_previous_token_is_sent_with_the_whole_body_again(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    put(tmp_path / "tokens" / "admin", OLD)
    put(tmp_path / "admin", NEW)
    put(tmp_path / "admin.previous", OLD)
    async with exchanging(TokenPair(tmp_path / "admin"), tokens_dir=tmp_path / "tokens") as (exchange, url):
        response, content = await exchange.send("POST", f"{url}/echo", {}, body=(memoryview(b"12"), memoryview(b"345")))
    assert (response.status_code, content) == (200, b"12345")


# ---------------------------------------------------------------- certificates


def serve(authority: Authority) -> AbstractAsyncContextManager[Running]:
    files = authority.issue("service")
    return running(Sample().make_app(), tls_client_ca=files.ca, tls_cert=files.cert, tls_key=files.key)


@pytest.mark.parametrize("http2", [True, False])
async def test_a_replaced_authority_is_read_from_its_files(
    http2: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_http2.client.PING_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "GRACE_SECONDS", 0.2)  # idle clients keep their connections open
    client = authority.issue("client")
    body = {BODY_EXTENSION: (memoryview(b"12345"),)}
    async with (
        make_control_client(client, None) as control,
        make_bulk_client(client, None, http2=http2) as bulk,
    ):
        async with serve(authority) as service:
            url = f"{service.address}/raw/fine"
            assert (await bulk.post(url, extensions=body)).text == f"5 HTTP/{'2' if http2 else '1.1'}\n"
            assert (await control.post(url, content=b"12345")).text == "5 HTTP/1.1\n"
            authority.issue("client", only_cert=True)  # its key is not there yet
            await asyncio.sleep(0.1)
            assert (await bulk.post(url, extensions=body)).status_code == 200
        authority.authority = trustme.CA()
        authority.__post_init__()
        authority.issue("client")
        async with serve(authority) as service:
            url = f"{service.address}/raw/fine"
            assert (await bulk.post(url, extensions=body)).status_code == 200
            assert (await control.post(url, content=b"12345")).status_code == 200


async def test_a_coordinator_with_an_untrusted_certificate_is_given_up_at_once(
    authority: Authority, tmp_path: Path
) -> None:
    issued, other = authority.issue("service"), Authority(tmp_path / "other")
    async with (
        running(Sample().make_app(), tls_cert=issued.cert, tls_key=issued.key) as service,
        make_control_client(TlsFiles(other.ca), None) as control,
        asyncio.timeout(30),
    ):
        client = CoordinatorClient(read_settings(coordinator=service.address, retry_seconds=600), control)
        with pytest.raises(Unreachable, match=r"is not trusted .*unable to get local issuer.* set GRADPOST_TLS_CA"):
            await client.join(None)
