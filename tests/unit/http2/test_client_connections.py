"""Connections of the client's end: made, kept alive, replaced, under TLS, and over Unix sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from h2.events import RequestReceived, StreamEnded

from ps_config.certificates import TlsFiles
from ps_http2 import client as asyncio_client
from ps_http2 import client_connection, frames, polled_client
from ps_http2.client import Http2Transport
from ps_http2.client_connection import LOCAL_EXTENSION
from ps_http2.frames import ErrorCode
from ps_http2.local_sockets import bind_locally, connect_locally, local_name

from ..protocol.test_certificates import Authority
from .shells import PolledInThread, Shell
from .sockets import OK, Talker, answering, ask, data_frame, headers_frame, in_turn, secure, serving, until, writing


async def test_a_server_that_goes_away_answers_the_streams_that_it_accepted(client: httpx.AsyncClient) -> None:
    async def go_away(talker: Talker) -> None:
        await talker.until(RequestReceived, 3)
        talker.writer.write(frames.pack_goaway(1, ErrorCode.NO_ERROR, "") + headers_frame(OK))
        await asyncio.sleep(0.1)
        talker.writer.write(data_frame(b"the last", end_stream=True))

    connections = [go_away, answering()]
    async with serving(in_turn(connections)) as address:
        first, second = (asyncio.create_task(ask(client, address)) for _ in range(2))
        with pytest.raises(httpx.ConnectError):
            await second
        assert (await ask(client, address)).content == b"fine"  # over a new connection
        assert (await first).content == b"the last"
    assert not connections


async def test_an_address_without_a_server_is_a_connect_error(client: httpx.AsyncClient) -> None:
    async with serving(answering()) as address:
        pass
    for url in (address, "http://no-such-host.invalid/"):
        with pytest.raises(httpx.ConnectError) as raised:
            await ask(client, url)
        assert raised.value.request.url == url


def shorten(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    for module in (client_connection, asyncio_client, polled_client):
        monkeypatch.setattr(module, name, seconds)


class Delay:
    """A wait of each connection attempt until `may_connect` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self.may_connect = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._connect = loop.create_connection
        monkeypatch.setattr(loop, "create_connection", self._connect_later)

    async def _connect_later(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        await self.may_connect.wait()
        return await self._connect(*args, **kwargs)


@pytest.fixture
def full() -> Iterator[str]:
    """Yield the address of a listener that accepts no more connections: an attempt to connect waits."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"


async def test_an_attempt_to_connect_ends_in_time(
    client: httpx.AsyncClient, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, "CONNECT_SECONDS", 0.1)
    errors = await asyncio.gather(*(ask(client, full) for _ in range(5)), return_exceptions=True)
    assert {type(error) for error in errors} == {httpx.ConnectTimeout}
    assert len({id(error) for error in errors}) == 5, "a shared error would refer to the bodies of all"
    async with serving(answering()) as address:
        assert (await ask(client, address)).content == b"fine"


@pytest.mark.parametrize("shell", [Http2Transport])
async def test_all_requests_wait_for_one_connection(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, "CONNECT_SECONDS", 0.05)
    delay = Delay(monkeypatch)
    errors = await asyncio.gather(*(ask(client, "http://127.0.0.1:1/") for _ in range(5)), return_exceptions=True)
    assert {type(error) for error in errors} == {httpx.ConnectTimeout}
    assert delay.num_calls == 1
    with pytest.raises(httpx.ConnectTimeout):
        await ask(client, "http://127.0.0.1:1/")
    assert delay.num_calls == 2


@pytest.mark.parametrize("answer", [b"", headers_frame(OK) + data_frame(b"x")])
async def test_a_server_that_does_not_answer_pings_is_given_up(
    answer: bytes, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, "PING_SECONDS", 0.05)

    async def serve(talker: Talker) -> None:
        await talker.until(RequestReceived)
        talker.writer.write(answer)
        await asyncio.sleep(5)

    async with serving(serve) as address:
        with pytest.raises(httpx.ReadError, match="sent nothing"):
            await asyncio.wait_for(client.get(address), 2)


async def test_a_slow_server_that_answers_pings_is_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, "PING_SECONDS", 0.03)

    async def serve(talker: Talker) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await talker.until(StreamEnded)
        while loop.time() < begun + 0.4:
            await talker.hear()
        talker.h2.send_headers(1, OK, end_stream=True)
        talker.flush()
        await talker.hear()

    async with serving(serve) as address:
        assert (await ask(client, address)).status_code == 200


@pytest.mark.parametrize(("is_connected", "text"), [(False, "closed"), (True, "lost")])
async def test_closing_the_transport_ends_its_requests(
    is_connected: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(writing()) as address:
        delay = Delay(monkeypatch)
        if is_connected:
            delay.may_connect.set()
        transport = Http2Transport()
        asking = asyncio.create_task(transport.handle_async_request(httpx.Request("GET", address)))
        await until(lambda: delay.num_calls)
        await asyncio.sleep(0.05)
        await transport.aclose()
        with pytest.raises(httpx.TransportError, match=text):
            await asyncio.wait_for(asking, 5)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---------------------------------------------------------------------- TLS


@pytest.mark.parametrize(
    ("protocols", "is_trusted", "error"),
    [(["http/1.1"], True, "does not speak"), ([], True, "does not speak"), (["h2"], False, "certificate")],
)
async def test_a_server_without_http2_or_trust_is_a_connect_error(
    protocols: list[str], is_trusted: bool, error: str, authority: Authority, shell: Shell
) -> None:
    files = authority.issue("service")

    async def silent(talker: Talker) -> None:
        await talker.reader.read()

    transport = shell(TlsFiles(files.ca if is_trusted else None))
    async with (
        httpx.AsyncClient(transport=transport) as client,
        serving(silent, tls=secure(files, *protocols)) as address,
    ):
        with pytest.raises(httpx.ConnectError, match=error):
            await ask(client, address)


# ---------------------------------------------------------------------- Unix sockets

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets need Linux")
LOCAL, TCP = (b"local", True), (b"tcp", False)


class LocalClient(httpx.AsyncClient):
    """A client that tries a Unix socket first."""

    def __init__(self, local: socket.socket, tls: TlsFiles = TlsFiles()) -> None:  # noqa: B008 - frozen
        self.transport = PolledInThread(tls, local_name(local))
        super().__init__(transport=self.transport, trust_env=False)

    async def ask(self, address: str) -> tuple[bytes, bool]:
        response = await ask(self, address)
        return response.content, response.extensions[LOCAL_EXTENSION]


@on_linux
async def test_each_connection_tries_the_unix_socket_before_tcp(local: socket.socket) -> None:
    async def answer_once(talker: Talker) -> None:
        await talker.until(StreamEnded)
        talker.writer.write(headers_frame(OK) + data_frame(b"local", end_stream=True))

    async with LocalClient(local) as client, serving(answering(b"tcp")) as address:
        async with serving(answer_once, local=local):
            for _ in range(3):
                assert await client.ask(address) == LOCAL
                [origin] = client.transport._origins.values()
                await until(lambda: not origin.is_usable(origin._connection))  # noqa: B023 - the loss has been noticed
        assert await client.ask(address) == TCP  # the listener is gone


@on_linux
async def test_a_process_of_another_user_gets_no_request(local: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request would show it a token."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    async with (
        LocalClient(local) as client,
        serving(answering(b"tcp")) as address,
        serving(answering(b"local"), local=local),
    ):
        with pytest.raises(PermissionError, match="another user"):
            connect_locally(local_name(local))
        assert await client.ask(address) == TCP


@on_linux
async def test_tls_never_uses_a_unix_socket(local: socket.socket, authority: Authority) -> None:
    files = authority.issue("service")
    async with (
        LocalClient(local, TlsFiles(files.ca)) as client,
        serving(answering(b"tcp"), tls=secure(files, "h2")) as address,
        serving(answering(b"local"), local=local),
    ):
        assert await client.ask(address) == TCP


@pytest.mark.parametrize("method", ["__init__", "bind"])
def test_a_sandbox_may_forbid_unix_sockets(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("the sandbox forbids it")

    monkeypatch.setattr(socket.socket, method, refuse, raising=False)
    assert bind_locally() is None
