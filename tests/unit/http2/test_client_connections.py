"""Connections of the client's end: made, kept alive, replaced, under TLS, and over Unix sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from h2.events import RequestReceived, StreamEnded

from ps_config.certificates import TlsFiles
from ps_http2 import client_connection, frames, polled_client
from ps_http2.client_connection import LOCAL_EXTENSION
from ps_http2.frames import ErrorCode, pack
from ps_http2.local_sockets import bind_locally, connect_locally, local_name
from ps_http2.polled_client import PolledTransport

from ..protocol.test_access import Authority
from .shells import PolledOnLoop
from .sockets import OK, Talker, answering, ask, data_frame, headers_frame, in_turn, secure, serving
from .support import Collector


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
    for module in (client_connection, polled_client):
        monkeypatch.setattr(module, name, seconds)


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
            await asyncio.wait_for(client.get(address), 4)


async def test_a_slow_server_that_answers_pings_is_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, "PING_SECONDS", 0.2)

    async def serve(talker: Talker) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await talker.until(StreamEnded)
        while loop.time() < begun + 1:
            await talker.hear()
        talker.h2.send_headers(1, OK, end_stream=True)
        talker.flush()
        await talker.hear()

    async with serving(serve) as address:
        assert (await ask(client, address)).status_code == 200


async def test_a_server_in_the_middle_of_a_slow_frame_is_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot answer pings there."""
    shorten(monkeypatch, "PING_SECONDS", 0.05)
    async with serving(send_slow_frame) as address:
        assert (await ask(client, address)).content == bytes(60_000)


async def test_parts_of_a_slow_frame_extend_the_read_timeout() -> None:
    async with serving(send_slow_frame) as address:
        with httpx.Client(transport=PolledTransport(), timeout=0.2) as http:
            assert (await asyncio.to_thread(http.get, address)).content == bytes(60_000)


async def send_slow_frame(talker: Talker) -> None:
    await talker.until(StreamEnded)
    talker.h2.send_headers(1, OK)
    frame = data_frame(bytes(60_000), end_stream=True)
    for at in range(0, len(frame), 2000):
        talker.write(frame[at : at + 2000])
        await asyncio.sleep(0.02)
    await talker.hear()


@pytest.mark.parametrize(("is_connected", "text"), [(False, "closed"), (True, "lost")])
async def test_closing_the_transport_ends_its_requests(
    is_connected: bool, text: str, client: httpx.AsyncClient, full: str
) -> None:
    begun = asyncio.Event()

    async def hear(talker: Talker) -> None:
        await talker.until(RequestReceived)
        begun.set()
        await talker.end()

    async with serving(hear) as address:
        asking = asyncio.create_task(client.get(address if is_connected else full))
        await (begun.wait() if is_connected else asyncio.sleep(0.05))
        await client.aclose()
        with pytest.raises(httpx.TransportError, match=text):
            await asyncio.wait_for(asking, 5)


# ---------------------------------------------------------------------- a thread that is away between its calls


def answering_once(body: bytes, has_ended: asyncio.Event) -> Callable[[Talker], Awaitable[None]]:
    """Return a server that closes each connection after an answer and a PING, which come apart."""

    async def serve(talker: Talker) -> None:
        await talker.until(StreamEnded)
        talker.writer.write(headers_frame(OK) + data_frame(body, end_stream=True))
        await asyncio.sleep(0.05)
        talker.writer.write(pack(frames.PING, 0, 0, bytes(8)))
        talker.writer.close()
        await talker.writer.wait_closed()
        has_ended.set()

    return serve


async def test_a_connection_that_ended_meanwhile_is_replaced() -> None:
    has_ended = asyncio.Event()
    async with (
        httpx.AsyncClient(transport=PolledOnLoop()) as client,
        serving(answering_once(b"fine", has_ended)) as address,
    ):
        for _ in range(3):
            assert (await ask(client, address)).content == b"fine"
            await has_ended.wait()
            has_ended.clear()


async def test_an_interrupt_while_bytes_move_loses_the_connection() -> None:
    class Interrupted(Collector):
        def feed(self, data: memoryview) -> None:
            raise KeyboardInterrupt

    shell, connections = PolledOnLoop(), [answering(), answering()]
    async with serving(in_turn(connections)) as address:
        interrupted = shell.polled.begin("GET", address, [], sink=Interrupted())
        with pytest.raises(KeyboardInterrupt):
            await shell.poll_until(interrupted)
        following = shell.polled.begin("GET", address, [])
        await shell.poll_until(following)
        assert following.finish().read() == b"fine"
        await shell.aclose()
    assert not connections


# ---------------------------------------------------------------------- TLS


@pytest.mark.parametrize(
    ("protocols", "is_trusted", "error"),
    [(["http/1.1"], True, "does not speak"), ([], True, "does not speak"), (["h2"], False, "certificate")],
)
async def test_a_server_without_http2_or_trust_is_a_connect_error(
    protocols: list[str], is_trusted: bool, error: str, authority: Authority
) -> None:
    files = authority.issue("service")

    async def silent(talker: Talker) -> None:
        await talker.reader.read()

    transport = PolledOnLoop(TlsFiles(files.ca if is_trusted else None))
    async with (
        httpx.AsyncClient(transport=transport) as client,
        serving(silent, tls=secure(files, *protocols)) as address,
    ):
        with pytest.raises(httpx.ConnectError, match=error):
            await ask(client, address)


async def test_files_of_tls_that_cannot_be_read_are_a_connect_error(tmp_path: Path) -> None:
    transport = PolledOnLoop(TlsFiles(tmp_path / "missing"))
    async with httpx.AsyncClient(transport=transport) as client, serving(answering()) as address:
        with pytest.raises(httpx.ConnectError, match="missing"):
            await ask(client, address.replace("http:", "https:"))


# ---------------------------------------------------------------------- Unix sockets

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets need Linux")
LOCAL, TCP = (b"local", True), (b"tcp", False)


class LocalClient(httpx.AsyncClient):
    """A client that tries a Unix socket first."""

    def __init__(self, local: socket.socket, tls: TlsFiles = TlsFiles()) -> None:  # noqa: B008 - frozen
        super().__init__(transport=PolledOnLoop(tls, local_name(local)), trust_env=False)

    async def ask(self, address: str) -> tuple[bytes, bool]:
        response = await ask(self, address)
        return response.content, response.extensions[LOCAL_EXTENSION]


@on_linux
async def test_each_connection_tries_the_unix_socket_before_tcp(local: socket.socket) -> None:
    has_ended = asyncio.Event()
    async with LocalClient(local) as client, serving(answering(b"tcp")) as address:
        async with serving(answering_once(b"local", has_ended), local=local):
            for _ in range(3):
                assert await client.ask(address) == LOCAL
                await has_ended.wait()
                has_ended.clear()
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
