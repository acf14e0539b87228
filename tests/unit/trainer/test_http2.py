"""The trainer's HTTP/2: against servers made of h2, which do as they like, and against our own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from h2.events import ConnectionTerminated, DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes
from hpack import Encoder

from ps_config.certificates import TlsFiles, server_context
from ps_http2 import client as http2
from ps_http2 import frames
from ps_http2.asgi import receive_into, send_from
from ps_http2.client import BODY_EXTENSION, SINK_EXTENSION, Http2Transport
from ps_http2.frames import Code, pack
from services.runtime.app import add_raw_route

from ..http2.sockets import Talker, serving
from ..http2.support import Collector
from ..protocol.test_certificates import Authority
from ..runtime.support import Sample, running

pytestmark = pytest.mark.asyncio

OK = [(b":status", b"200")]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=Http2Transport(), trust_env=False) as http:
        yield http


def answering(number_of: int = 1, headers: Any = OK, body: bytes = b"fine") -> Callable[[Talker], Awaitable[None]]:
    """Each request with the same, when it is here."""

    async def serve(talker: Talker) -> None:
        answered: set[int] = set()
        while await talker.hear():
            for event in talker.of(StreamEnded):
                if event.stream_id not in answered:
                    answered.add(event.stream_id)
                    talker.h2.send_headers(event.stream_id, headers)
                    talker.h2.send_data(event.stream_id, body, end_stream=True)
            talker.flush()

    return serve


def ending(talker: Talker) -> dict[int, bytes]:
    """The bodies that are here."""
    return {
        end.stream_id: b"".join(event.data for event in talker.of(DataReceived, end.stream_id))
        for end in talker.of(StreamEnded)
    }


# ---------------------------------------------------------------------- what is asked, and answered


async def test_a_request_as_h2_sees_it(client: httpx.AsyncClient) -> None:
    seen: list[Any] = []

    async def serve(talker: Talker) -> None:
        await talker.until(StreamEnded)
        seen.extend([talker.of(RequestReceived)[0].headers, ending(talker)])
        await answering()(talker)

    async with serving(serve) as address:
        response = await asyncio.wait_for(_post_twice(client, address), 5)
    assert (response.status_code, response.content, response.extensions["http_version"]) == (200, b"fine", b"HTTP/2")
    headers, bodies = seen
    assert headers[:4] == [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":authority", address.removeprefix("http://").encode()),
        (b":path", b"/a?b=c"),
    ]
    assert (b"content-length", b"5") in headers
    assert (b"x-upper", b"Case") in headers
    assert not {name for name, _ in headers} & {b"host", b"connection", b"transfer-encoding"}
    assert bodies == {1: b"12345"}


async def _post_twice(client: httpx.AsyncClient, address: str) -> httpx.Response:
    """The server looks at the first, and answers when the second comes."""
    headers = {"X-Upper": "Case"}
    first = asyncio.create_task(client.post(f"{address}/a?b=c", content=b"12345", headers=headers))
    await asyncio.sleep(0.05)
    await client.get(address)
    return await first


@pytest.mark.parametrize("num_bytes", [0, 1, 65_535, 65_536, 3_000_000])
async def test_bodies_both_ways(num_bytes: int, client: httpx.AsyncClient) -> None:
    body = bytes(range(250)) * (num_bytes // 250) + b"x" * (num_bytes % 250)

    async def echo(talker: Talker) -> None:
        await talker.until(StreamEnded)
        rest = ending(talker)[1]
        talker.h2.send_headers(1, OK)
        while rest:
            count = min(len(rest), talker.h2.local_flow_control_window(1), talker.h2.max_outbound_frame_size)
            talker.h2.send_data(1, rest[:count])
            rest = rest[count:]
        talker.h2.end_stream(1)
        talker.flush()
        await talker.hear()

    sink = Collector(num_bytes)
    async with serving(echo) as address:
        lent = {BODY_EXTENSION: (memoryview(body),), SINK_EXTENSION: sink}
        response = await asyncio.wait_for(client.post(address, extensions=lent), 10)
    assert response.content == b""
    assert sink.body == body


async def test_an_answer_that_is_not_good_does_not_go_to_the_sink(client: httpx.AsyncClient) -> None:
    sink = Collector(100)
    async with serving(answering(headers=[(b":status", b"409")], body=b"problem")) as address:
        response = await client.get(address, extensions={SINK_EXTENSION: sink})
    assert (response.status_code, response.content, sink.body) == (409, b"problem", b"")


async def test_what_comes_before_the_answer(client: httpx.AsyncClient) -> None:
    async def serve(talker: Talker) -> None:
        await talker.until(StreamEnded)
        for status in (b"100", b"103"):
            talker.h2.send_headers(1, [(b":status", status), (b"link", b"x")])
        talker.flush()
        await asyncio.sleep(0.02)
        talker.h2.send_headers(1, OK)
        talker.h2.send_data(1, b"fine")
        talker.h2.send_headers(1, [(b"x-trailer", b"1")], end_stream=True)
        talker.flush()
        await talker.hear()

    async with serving(serve) as address:
        response = await asyncio.wait_for(client.get(address), 5)
    assert (response.status_code, response.content) == (200, b"fine")
    assert "link" not in response.headers


async def test_an_answer_before_the_body_is_sent(client: httpx.AsyncClient) -> None:
    async def serve(talker: Talker) -> None:
        talker.acknowledges = False
        await talker.until(RequestReceived)
        talker.h2.send_headers(1, [(b":status", b"413")])
        talker.h2.send_data(1, b"too much", end_stream=True)
        talker.h2.reset_stream(1, Code.NO_ERROR)
        talker.flush()
        await answering()(talker)

    async with serving(serve) as address:
        body = bytearray(10_000_000)
        response = await asyncio.wait_for(client.post(address, extensions={BODY_EXTENSION: (memoryview(body),)}), 5)
        assert (response.status_code, response.content) == (413, b"too much")


async def test_more_requests_than_the_server_takes_at_once(client: httpx.AsyncClient) -> None:
    most = 0

    async def serve(talker: Talker) -> None:
        nonlocal most
        answered = 0
        while await talker.hear():
            ended = talker.of(StreamEnded)
            most = max(most, len(ended) - answered)
            await asyncio.sleep(0.01)
            for event in ended[answered:]:
                talker.h2.send_headers(event.stream_id, OK, end_stream=True)
            answered = len(ended)
            talker.flush()

    async with serving(serve, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 2}) as address:
        await client.get(address)  # and its settings are known
        responses = await asyncio.wait_for(asyncio.gather(*(client.get(address) for _ in range(11))), 5)
    assert [response.status_code for response in responses] == [200] * 11
    assert most == 2


# ---------------------------------------------------------------------- answers that are none


async def raw(talker: Talker, *said: bytes) -> None:
    await talker.until(RequestReceived)
    talker.writer.write(b"".join(said))
    await talker.hear()


def heads(headers: list[tuple[bytes, bytes]], *, is_last: bool = False) -> bytes:
    flags = frames.END_HEADERS | (frames.END_STREAM if is_last else 0)
    return pack(frames.HEADERS, flags, 1, Encoder().encode(headers))


def data(body: bytes) -> bytes:
    return pack(frames.DATA, frames.END_STREAM, 1, body)


BROKEN = {
    "no status": [heads([(b"x-a", b"b")])],
    "two statuses": [heads(OK + OK)],
    "a status that is none": [heads([(b":status", b"2x0")])],
    "1xx that is all": [heads([(b":status", b"103")], is_last=True)],
    "data first": [data(b"x")],
    "a stream of its own": [pack(frames.HEADERS, frames.END_HEADERS, 2, Encoder().encode(OK))],
    "too short": [heads([*OK, (b"content-length", b"10")]), data(b"x")],
    "too long": [heads([*OK, (b"content-length", b"1")]), data(b"12")],
    "nothing of what was promised": [heads([*OK, (b"content-length", b"1")]), data(b"")],
    "a length that is none": [heads([*OK, (b"content-length", b"x")]), data(b"12")],
    "HTTP/1.1": [b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"],
    "reset": [pack(frames.RST_STREAM, 0, 1, bytes([0, 0, 0, 2]))],
    "reset in the middle": [heads(OK), pack(frames.DATA, 0, 1, b"x"), pack(frames.RST_STREAM, 0, 1, bytes(4))],
    "end": [],
    "end in the middle": [heads(OK), pack(frames.DATA, 0, 1, b"x")],
    "goaway in the middle": [heads(OK), frames.pack_goaway(0, Code.NO_ERROR, "")],
}


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("said", BROKEN.values(), ids=BROKEN)
async def test_answers_that_are_none(said: list[bytes], with_sink: bool, client: httpx.AsyncClient) -> None:
    async def serve(talker: Talker) -> None:
        await talker.until(RequestReceived)
        talker.writer.write(b"".join(said))

    extensions = {SINK_EXTENSION: Collector(100)} if with_sink else {}
    async with serving(serve) as address:
        with pytest.raises(httpx.TransportError) as raised:
            await asyncio.wait_for(client.get(address, extensions=extensions), 5)
        assert raised.value.request.url == f"{address}/" or raised.value.request.url == address


async def test_lengths_of_what_has_no_body(client: httpx.AsyncClient) -> None:
    async with serving(lambda talker: raw(talker, heads([*OK, (b"content-length", b"7")], is_last=True))) as address:
        assert (await client.head(address)).headers["content-length"] == "7"
    status = [(b":status", b"304"), (b"content-length", b"7")]
    async with serving(lambda talker: raw(talker, heads(status, is_last=True))) as address:
        assert (await client.get(address)).status_code == 304


async def test_refused_and_not_looked_at_may_be_tried_again(client: httpx.AsyncClient) -> None:
    """They are ConnectErrors: nothing has been done of what was asked."""
    for said in (
        pack(frames.RST_STREAM, 0, 1, bytes([0, 0, 0, Code.REFUSED_STREAM])),
        frames.pack_goaway(0, Code.NO_ERROR, ""),
    ):
        async with serving(lambda talker, said=said: raw(talker, said)) as address:  # type: ignore[misc]
            with pytest.raises(httpx.ConnectError):
                await asyncio.wait_for(client.get(address), 5)


async def test_what_a_server_that_goes_away_has_looked_at_is_answered(client: httpx.AsyncClient) -> None:
    num_connections = 0

    async def serve(talker: Talker) -> None:
        nonlocal num_connections
        num_connections += 1
        if num_connections == 2:
            return await answering()(talker)
        await talker.until(RequestReceived, 3)
        talker.writer.write(frames.pack_goaway(1, Code.NO_ERROR, "") + heads(OK))
        await asyncio.sleep(0.1)
        talker.writer.write(data(b"the last"))
        return None

    async with serving(serve) as address:
        first = asyncio.create_task(client.get(address))
        second = asyncio.create_task(client.get(address))
        with pytest.raises(httpx.ConnectError):
            await asyncio.wait_for(second, 5)
        assert (await client.get(address)).content == b"fine"  # over a new one
        assert (await asyncio.wait_for(first, 5)).content == b"the last"
    assert num_connections == 2


async def test_nobody_listens(client: httpx.AsyncClient) -> None:
    async with serving(answering()) as address:
        pass
    with pytest.raises(httpx.ConnectError) as raised:
        await client.get(address)
    assert raised.value.request.url.host == "127.0.0.1"
    with pytest.raises(httpx.ConnectError):
        await client.get("http://no-such-host.invalid/")


class Hanging:
    """A host whose connections are never made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self.is_called = asyncio.Event()
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", self._connect)

    async def _connect(self, *_: Any, **__: Any) -> Any:
        self.num_calls += 1
        self.is_called.set()
        await asyncio.sleep(60)


async def test_all_requests_wait_for_one_connection_that_is_not_made(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "CONNECT_SECONDS", 0.05)
    host = Hanging(monkeypatch)
    asked = [client.get("http://127.0.0.1:1/") for _ in range(5)]
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(error) for error in errors} == {httpx.ConnectTimeout}
    assert len({id(error) for error in errors}) == 5, "one that is shared would hold the bodies of all"
    assert host.num_calls == 1
    with pytest.raises(httpx.ConnectTimeout):
        await client.get("http://127.0.0.1:1/")
    assert host.num_calls == 2


async def test_who_does_not_wait_any_more_ends_nobody_elses_connection(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(answering(2)) as address:
        begun = asyncio.Event()
        may_connect = asyncio.Event()
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def connect_later(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            await may_connect.wait()
            return await connect(*args, **kwargs)

        monkeypatch.setattr(loop, "create_connection", connect_later)
        impatient, patient = (asyncio.create_task(client.get(address)) for _ in range(2))
        await begun.wait()
        impatient.cancel()
        await asyncio.wait([impatient])
        may_connect.set()
        assert (await patient).text == "fine"


async def test_closing_ends_a_connection_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Http2Transport()
    host = Hanging(monkeypatch)
    asked = asyncio.create_task(transport.handle_async_request(httpx.Request("GET", "http://127.0.0.1:1/")))
    await host.is_called.wait()
    await transport.aclose()
    with pytest.raises(httpx.ConnectError, match="closed"):
        await asyncio.wait_for(asked, 5)


@pytest.mark.parametrize("in_body", [False, True])
async def test_a_server_that_shows_no_sign_of_life(
    in_body: bool, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "PING_SECONDS", 0.05)

    async def serve(talker: Talker) -> None:
        await talker.until(RequestReceived)
        if in_body:
            talker.writer.write(heads(OK) + pack(frames.DATA, 0, 1, b"x"))
        await asyncio.sleep(5)

    async with serving(serve) as address:
        with pytest.raises(httpx.ReadError, match="sign of life"):
            await asyncio.wait_for(client.get(address), 2)


async def test_a_server_that_takes_its_time_and_answers_pings(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "PING_SECONDS", 0.03)

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
        assert (await asyncio.wait_for(client.get(address), 5)).status_code == 200


# ---------------------------------------------------------------------- who gives up


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_request_that_is_cancelled_gives_everything_back(is_answered: bool, client: httpx.AsyncClient) -> None:
    begun = asyncio.Event()
    reset: list[Any] = []

    async def serve(talker: Talker) -> None:
        talker.acknowledges = False
        await talker.until(DataReceived, 1)
        if is_answered:
            talker.writer.write(heads(OK) + pack(frames.DATA, 0, 1, b"x" * 50))
        begun.set()
        reset.append(await talker.until(StreamReset, 1))
        late = b"" if is_answered else heads(OK)
        talker.writer.write(late + pack(frames.DATA, 0, 1, b"y" * 50))  # was on its way
        await talker.until(StreamEnded, 3)
        talker.h2.send_headers(3, OK, end_stream=True)
        talker.flush()
        await talker.hear()

    async with serving(serve) as address:
        body, sink = bytearray(10_000_000), Collector(100)
        lent = {BODY_EXTENSION: (memoryview(body),), SINK_EXTENSION: sink}
        asking = asyncio.create_task(client.post(address, extensions=lent))
        await begun.wait()
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        lent.clear()
        assert (await client.get(address)).status_code == 200  # over the same connection
        assert bytes(sink.memory) == (b"x" * 50 if is_answered else bytes(50)) + bytes(50)
        assert reset[0].error_code == Code.CANCEL


async def test_an_answer_that_is_closed_gives_the_sink_back(client: httpx.AsyncClient) -> None:
    closed = asyncio.Event()

    async def serve(talker: Talker) -> None:
        await talker.until(RequestReceived)
        talker.writer.write(heads(OK) + pack(frames.DATA, 0, 1, b"x" * 50))
        await closed.wait()
        talker.writer.write(pack(frames.DATA, 0, 1, b"y" * 50))
        await talker.until(StreamReset, 1)
        await answering()(talker)

    async with serving(serve) as address:
        sink = Collector(100)
        async with client.stream("GET", address, extensions={SINK_EXTENSION: sink}):
            await asyncio.sleep(0.05)
        closed.set()
        await asyncio.sleep(0.05)
        assert bytes(sink.memory) == b"x" * 50 + bytes(50)


async def test_what_a_sink_refuses_is_raised_as_it_is(client: httpx.AsyncClient) -> None:
    class RefusalError(Exception):
        pass

    class Refusing(Collector):
        def feed(self, data: memoryview) -> None:
            raise RefusalError("not this")

    async with serving(answering()) as address:
        with pytest.raises(RefusalError, match="not this"):
            await client.get(address, extensions={SINK_EXTENSION: Refusing()})
        assert (await client.get(address)).content == b"fine"


async def test_closing_ends_what_is_under_way() -> None:
    async def silent(talker: Talker) -> None:
        await talker.until(RequestReceived)
        await talker.hear()

    async with serving(silent) as address:
        transport = Http2Transport()
        asking = asyncio.create_task(transport.handle_async_request(httpx.Request("GET", address)))
        await asyncio.sleep(0.05)
        await transport.aclose()
        with pytest.raises(httpx.ReadError, match="lost"):
            await asyncio.wait_for(asking, 5)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---------------------------------------------------------------------- TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def secure(files: TlsFiles, *protocols: str) -> ssl.SSLContext:
    context = server_context(TlsFiles(None, files.cert, files.key))
    context.set_alpn_protocols(protocols)
    return context


async def test_tls(authority: Authority) -> None:
    files = authority.issue("service")
    transport = Http2Transport(TlsFiles(files.ca))
    async with (
        httpx.AsyncClient(transport=transport) as client,
        serving(answering(), tls=secure(files, "h2")) as address,
    ):
        body = memoryview(bytes(1_000_000))
        assert (await client.post(address, extensions={BODY_EXTENSION: (body,)})).content == b"fine"
    async with (
        httpx.AsyncClient(transport=Http2Transport()) as client,
        serving(answering(), tls=secure(files)) as address,
    ):
        with pytest.raises(httpx.ConnectError):  # by an authority that it does not know
            await client.get(address)


@pytest.mark.parametrize("protocols", [["http/1.1"], []])
async def test_a_server_that_does_not_speak_it(protocols: list[str], authority: Authority) -> None:
    files = authority.issue("service")

    async def silent(talker: Talker) -> None:
        await talker.reader.read()

    transport = Http2Transport(TlsFiles(files.ca))
    async with (
        httpx.AsyncClient(transport=transport) as client,
        serving(silent, tls=secure(files, *protocols)) as address,
    ):
        with pytest.raises(httpx.ConnectError, match="does not speak"):
            await client.get(address)


async def test_renewed_files(authority: Authority) -> None:
    """A new connection; what is on its way ends on the old one, and halves of a renewal are passed over."""
    files = authority.issue("service")
    mine = authority.issue("client")
    connections: list[Talker] = []

    async def serve(talker: Talker) -> None:
        connections.append(talker)
        await answering()(talker)

    transport = Http2Transport(mine)
    async with httpx.AsyncClient(transport=transport) as client, serving(serve, tls=secure(files, "h2")) as address:
        for step in range(4):
            if step == 1:
                authority.issue("client", only_cert=True)  # its key is not there yet
            if step == 2:
                authority.issue("client")
            assert (await client.get(address)).content == b"fine"
            [origin] = transport._origins.values()
            assert origin._connection is not None
            origin._connection.looks_again = True
        assert len(connections) == 3
        await connections[0].until(ConnectionTerminated)


# ---------------------------------------------------------------------- our own server


async def test_large_bodies_over_tls(authority: Authority) -> None:
    files = authority.issue("service")
    body = bytes(range(250)) * 80_000
    app = Sample().make_app()

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        buffer, filled, more = memoryview(bytearray(len(body))), 0, True
        while more:
            num_bytes, more = await receive_into(buffer[filled:], scope, receive)
            filled += num_bytes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send_from(buffer, scope, send, more_body=False)

    add_raw_route(app, "/echo", echo, methods=["POST"], summary="The same again")
    sink = Collector(len(body))
    async with (
        running(app, tls_cert=files.cert, tls_key=files.key) as service,
        httpx.AsyncClient(transport=Http2Transport(TlsFiles(files.ca))) as client,
    ):
        lent = {BODY_EXTENSION: (memoryview(body),), SINK_EXTENSION: sink}
        response = await asyncio.wait_for(client.post(f"{service.address}/echo", extensions=lent), 10)
    assert response.status_code == 200
    assert bytes(sink.memory) == body


async def test_our_own_server(client: httpx.AsyncClient) -> None:
    async with running(Sample().make_app()) as service:
        for num_bytes in (0, 5, 10_000_000):
            body = memoryview(bytes(num_bytes))
            response = await client.post(f"{service.address}/raw/fine", extensions={BODY_EXTENSION: (body,)})
            assert response.text == f"{num_bytes} HTTP/2\n"
        with pytest.raises(httpx.ReadError):
            await client.post(f"{service.address}/raw/cut")
        many = [client.get(f"{service.address}/stale") for _ in range(300)]
        assert {response.status_code for response in await asyncio.gather(*many)} == {409}
