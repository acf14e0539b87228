"""The server's end under uvicorn: responses, request bodies in the application's memory, and malformed requests."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from h2.events import DataReceived, InformationalResponseReceived, ResponseReceived, StreamReset

from ps_http2 import asgi, frames
from ps_http2 import server as http2_server
from ps_http2.asgi import read_scope
from ps_http2.frames import PREFACE, ErrorCode, pack, pack_number, pack_settings
from ps_http2.local_sockets import connect_locally, enlarge_buffer, local_name
from ps_http2.stream import Headers, content_length

from .conftest import BUFFER_BYTES, LARGE, Served
from .sockets import GET, Caller, data_frame, get, headers_frame, post, until

MIB = 1024 * 1024


# ---------------------------------------------------------------------- connections


async def test_both_versions_are_served_on_one_port(service: Served, caller: Caller) -> None:
    async with httpx.AsyncClient() as old:
        for number in (1, 3):
            assert (await old.post(f"{service.address}/raw/fine", content=b"12345")).text == "5 HTTP/1.1\n"
            assert await caller.status(post(b"/raw/fine"), b"12345") == 200
            assert await caller.body(number) == b"5 HTTP/2\n"


async def test_the_preface_may_come_in_portions(service: Served) -> None:
    async with await service.connect(greets=False) as caller:
        sent = PREFACE + pack_settings({}) + headers_frame(GET, end_stream=True)
        for at in range(0, len(sent), 10):
            caller.writer.write(sent[at : at + 10])
            await asyncio.sleep(0)
        assert b"ok" in (await asyncio.wait_for(caller.reader.readuntil(b"}"), 5))


@pytest.mark.parametrize("sent", [b"PRI * HTTP/2.0\r\n\r\nSX\r\n\r\n", b"PRI \r\n\r\n"])
async def test_an_invalid_preface_is_an_invalid_request_of_http1(sent: bytes, service: Served) -> None:
    async with await service.connect(greets=False) as caller:
        caller.writer.write(sent)
        assert (await asyncio.wait_for(caller.reader.readline(), 5)).startswith(b"HTTP/1.1 4")
        assert service.connections == []


async def test_both_versions_are_served_on_a_unix_socket(service: Served) -> None:
    assert service.local is not None
    name = local_name(service.local)
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=f"\0{name}")) as old:
        assert (await old.get(f"{service.address}/look")).status_code == 200
    async with await service.connect(is_local=True) as local:
        assert await local.status(get(b"/look")) == 200
        with socket.socket(socket.AF_UNIX) as plain:
            enlarge_buffer(plain)
            expected = plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        accepted = service.connections[0]._transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == expected
    found = [(scope["http_version"], scope["client"], scope["server"], scope["scheme"]) for scope in service.scopes]
    assert found == [("1.1", None, None, "http"), ("2", None, None, "http")]
    service.stop.set()
    await until(service.connections[0]._transport.is_closing)
    with pytest.raises(ConnectionRefusedError):  # it ends with the service
        connect_locally(name)


# ---------------------------------------------------------------------- responses


async def test_every_kind_of_response(caller: Caller) -> None:
    for path, status in ((b"/nowhere", 404), (b"/stale", 409), (b"/bug", 500)):
        assert await caller.status(get(path)) == status
    assert await caller.status([(b":method", b"HEAD"), *GET[1:]]) == 200
    for method in (b"M-SEARCH", b"VERSION-CONTROL", b"get"):
        assert await caller.status([(b":method", method), *GET[1:]]) == 405
    assert await caller.reset_of(caller.ask(post(b"/raw/cut"))) == ErrorCode.INTERNAL_ERROR
    assert await caller.status(get(b"/large")) == 200
    assert sum(len(event.data) for event in caller.of(DataReceived)) > LARGE


async def test_a_response_may_end_before_the_body(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DISCARD_SECONDS", 0.1)
    number = caller.ask(post(b"/raw-refusal"), end_stream=False)
    caller.send(number, b"12345")
    assert b"stale_round" in await caller.body(number)
    assert await caller.reset_of(number) == ErrorCode.NO_ERROR
    assert await caller.status() == 200


async def test_the_rest_of_a_refused_body_is_discarded(caller: Caller) -> None:
    """Clients such as curl lose a response that is followed by a reset."""
    number = caller.ask(post(b"/raw-refusal"), end_stream=False)
    left = MIB
    assert b"stale_round" in await caller.body(number)
    while left:
        while not (room := min(left, caller.h2.local_flow_control_window(number), 16_000)):
            await asyncio.wait_for(caller.hear(), 5)
        left -= room
        caller.send(number, bytes(room), end_stream=not left)
    assert await caller.status() == 200
    assert caller.of(StreamReset) == []


async def test_a_request_in_flight_is_answered_when_the_service_stops(service: Served) -> None:
    caller = await service.connect()
    caller.ask(get(b"/slow"))
    await asyncio.wait_for(service.sample.slow_begun.wait(), 5)
    service.stop.set()
    await until(lambda: service.connections[0].is_closing)
    service.sample.slow_ends.set()
    data = await asyncio.wait_for(caller.reader.read(-1), 5)  # h2 parses nothing after a GOAWAY
    assert data.count(b'"slow"') == 1
    caller.writer.close()


@pytest.mark.parametrize("path", [b"/linger?x", b"/linger"])
async def test_the_application_receives_the_disconnect_of_its_client(path: bytes, service: Served) -> None:
    async with await service.connect() as caller:
        number = caller.ask(get(path))
        if b"?" in path:
            assert await caller.body(number) == b"x"
        else:
            await asyncio.sleep(0.05)
    await until(lambda: service.ended)
    assert service.ended == ["http.disconnect"]


# ---------------------------------------------------------------------- request bodies


@pytest.mark.parametrize(
    ("parts", "announces"),
    [([b"1234567890"], True), ([b"123", b"", b"4567890"], False), ([b"123"], True), ([b""], False)],
)
async def test_a_body_is_received_into_the_applications_memory(
    parts: list[bytes], announces: bool, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "READ_SECONDS", 0.02)
    length = [(b"content-length", b"%d" % sum(map(len, parts)))] if announces else []
    number = caller.ask(post(b"/upload", *length), end_stream=False)
    for part in parts:
        caller.send(number, part)
        await asyncio.sleep(0.03)
    caller.send(number, b"", end_stream=True)
    assert await caller.body(number) == b"".join(parts)


@pytest.mark.parametrize("end_stream", [True, False])
@pytest.mark.parametrize("lengths", [[BUFFER_BYTES // 2, BUFFER_BYTES // 2, 1], [BUFFER_BYTES // 2 + 1] * 2])
async def test_a_body_larger_than_its_memory_is_refused(lengths: list[int], end_stream: bool, caller: Caller) -> None:
    number = caller.ask(post(b"/upload"), end_stream=False)
    for at, length in enumerate(lengths, 1):
        caller.send(number, bytes(length), end_stream=end_stream and at == len(lengths))
        await asyncio.sleep(0.03)
    assert await caller.body(number) == b"too long"


@pytest.mark.parametrize("settings", [{"body_timeout_seconds": 0.2}])
async def test_a_slow_body_is_refused_and_a_steady_one_is_not(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if both are received into the application's memory, of which it hears now and then."""
    monkeypatch.setattr(http2_server, "READ_SECONDS", 0.02)
    slow = caller.ask(post(b"/upload"), end_stream=False)
    steady = caller.ask(post(b"/upload"), end_stream=False)
    for _ in range(8):
        caller.send(slow, b"x")
        caller.send(steady, bytes(2000))
        await asyncio.sleep(0.05)
        if caller.h2.streams[slow].closed:
            break
    assert b"slow_body" in await caller.body(slow)
    caller.send(steady, b"", end_stream=True)
    assert len(await caller.body(steady)) >= 8000


async def test_the_small_parts_of_a_frame_are_read_together(service: Served, caller: Caller) -> None:
    number = caller.ask(post(b"/upload"), end_stream=False)
    frame = data_frame(bytes(BUFFER_BYTES), number, end_stream=True)
    [connection] = service.connections
    caller.write(frame[:1000])
    await until(lambda: connection._reader.num_awaited > 1)
    received = connection.received_bytes
    caller.write(frame[1000:-1])
    await asyncio.sleep(0.1)
    assert connection.received_bytes == received
    caller.write(frame[-1:])
    assert len(await caller.body(number)) == BUFFER_BYTES


@pytest.mark.parametrize("settings", [{"body_timeout_seconds": 0.2}])
async def test_a_frame_that_arrives_steadily_has_not_stalled(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "READ_SECONDS", 0.02)
    number = caller.ask(post(b"/upload"), end_stream=False)
    frame = data_frame(bytes(BUFFER_BYTES), number, end_stream=True)
    for at in range(0, len(frame), 1000):
        caller.write(frame[at : at + 1000])
        await asyncio.sleep(0.03)
    assert len(await caller.body(number)) == BUFFER_BYTES


async def test_a_client_may_expect_100_continue(caller: Caller) -> None:
    number = caller.ask(post(b"/raw/fine", (b"expect", b"100-continue")), end_stream=False)
    await caller.until(InformationalResponseReceived, number)
    caller.send(number, b"12345", end_stream=True)
    assert await caller.body(number) == b"5 HTTP/2\n"


# ---------------------------------------------------------------------- malformed requests

MALFORMED = {
    "uppercase": [*GET, (b"X-A", b"b")],
    "a space in a name": [*GET, (b"x a", b"b")],
    "an empty name": [*GET, (b"", b"b")],
    "NUL in a value": [*GET, (b"x-a", b"b\0c")],
    "newline in a value": [*GET, (b"x-a", b"b\r\nc: d")],
    "a value that begins with a space": [*GET, (b"x-a", b" b")],
    "a value that ends with a tab": [*GET, (b"x-a", b"b\t")],
    "connection": [*GET, (b"connection", b"close")],
    "transfer-encoding": [*GET, (b"transfer-encoding", b"chunked")],
    "upgrade": [*GET, (b"upgrade", b"x")],
    "keep-alive": [*GET, (b"keep-alive", b"x")],
    "te": [*GET, (b"te", b"gzip")],
    "no method": GET[1:],
    "no scheme": [GET[0], *GET[2:]],
    "no path": GET[:3],
    "an empty path": [*GET[:3], (b":path", b"")],
    "a path without a slash": [*GET[:3], (b":path", b"healthz")],
    "a method with a space": [(b":method", b"GE T"), *GET[1:]],
    "two methods": [GET[0], *GET],
    "two paths": [*GET, GET[3]],
    "an unknown pseudo header": [*GET, (b":what", b"x")],
    "a status": [*GET, (b":status", b"200")],
    "a pseudo header after others": [*GET[:3], (b"x-a", b"b"), GET[3]],
    "a length that is no number": [*GET, (b"content-length", b"x")],
    "a negative length": [*GET, (b"content-length", b"-1")],
    "two lengths": [*GET, (b"content-length", b"0"), (b"content-length", b"1")],
    "an endless length": [*GET, (b"content-length", b"9" * 30)],
    "two hosts": [*GET, (b"host", b"localhost"), (b"host", b"localhost")],
    "a host that is not the authority": [*GET, (b"host", b"other")],
    "nothing": [],
}


@pytest.mark.parametrize("headers", MALFORMED.values(), ids=MALFORMED)
def test_malformed_headers_are_refused(headers: Headers) -> None:
    with pytest.raises(ValueError):
        content_length(read_scope(headers)["headers"])


WRONG = {name: MALFORMED[name] for name in ("uppercase", "an endless length", "nothing")}
WRONG["a length without a body"] = [*GET, (b"content-length", b"1")]


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
async def test_a_malformed_request_is_reset_and_no_other(headers: Headers, caller: Caller) -> None:
    caller.write_request(1, headers)
    caller.write_request(3)
    assert await caller.reset_of(1) == ErrorCode.PROTOCOL_ERROR
    assert caller.of(ResponseReceived, 1) == []
    assert b"ok" in await caller.body(3)


@pytest.mark.parametrize(
    "sent",
    [
        *(headers_frame(GET, number, end_stream=True) for number in (3, 2, 0, 100)),
        pack(frames.DATA, 0, 2, b"x"),
        pack_number(frames.WINDOW_UPDATE, 2, 1),
        pack_number(frames.RST_STREAM, 2, ErrorCode.CANCEL),
    ],
    ids=["a skipped stream", "an even one", "stream 0", "a high even one", "DATA", "WINDOW_UPDATE", "RST_STREAM"],
)
async def test_frames_of_streams_that_cannot_be_open_end_the_connection(
    sent: bytes, service: Served, caller: Caller
) -> None:
    await caller.status()
    caller.write(headers_frame(get(b"/slow"), 5, end_stream=True))
    await asyncio.wait_for(service.sample.slow_begun.wait(), 5)
    caller.write(sent)
    assert await caller.end() == ErrorCode.PROTOCOL_ERROR
