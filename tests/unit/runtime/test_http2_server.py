"""HTTP/2 of a service under uvicorn: what it answers, and what clients that mean no good get."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from h2.events import DataReceived, InformationalResponseReceived, PingReceived, ResponseReceived, StreamReset
from h2.settings import SettingCodes
from hpack import Encoder
from starlette.types import Receive, Scope, Send

from ps_http2 import asgi, frames
from ps_http2 import server as http2_server
from ps_http2.asgi import receive_into, send_from
from ps_http2.connection import MAX_UNPRODUCTIVE_FRAMES
from ps_http2.frames import PREFACE, ErrorCode, pack, pack_number, pack_settings
from ps_http2.server import MAX_RESETS, MAX_STREAMS, ServerConnection
from services.runtime import http1
from services.runtime.app import add_raw_route
from services.runtime.settings import RequestLimits

from ..http2.sockets import GET, Caller, connect, get, post
from .support import Running, Sample, running

pytestmark = pytest.mark.asyncio

SETTINGS = pack_settings({})
WHOLE = frames.END_HEADERS
LARGE = 64 * 1024 * 1024


def block(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Without a table, so that it can be said again."""
    encoder = Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(headers))


@dataclass
class Served:
    """A service, what it has been asked, and its connections."""

    running: Running
    sample: Sample
    connections: list[ServerConnection]
    sent_bytes: int = 0
    num_asked: int = 0
    is_taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: list[str] = field(default_factory=list)

    async def connect(self, **options: Any) -> Caller:
        return await connect(self.running.address, **options)

    async def large(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Much, from one piece of memory."""
        self.num_asked += 1
        piece = memoryview(bytearray(1 << 20))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(LARGE >> 20):
                await send_from(piece, scope, send, more_body=True)
                if not self.connections[0]._transport.is_closing():
                    self.sent_bytes += len(piece)
            await send({"type": "http.response.body"})
        finally:
            self.ended.append("large")

    async def count(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Into memory of its own: ten bytes of it."""
        buffer, filled, more = bytearray(10), 0, True
        try:
            while more:
                num_bytes, more = await receive_into(memoryview(buffer)[filled:], scope, receive)
                filled += num_bytes
            body = bytes(buffer[:filled])
        except ValueError:
            body = b"too long"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def linger(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and wait until the client goes, before or after that."""
        if scope["query_string"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})
        messages = [(await receive())["type"] for _ in range(2)]
        self.ended.append(messages[-1])


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, limits: RequestLimits | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """A service; at the end it still answers, and nothing is left behind of any connection."""
    connections: list[ServerConnection] = []

    class Remembered(ServerConnection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            connections.append(self)

    monkeypatch.setattr(http1, "ServerConnection", Remembered)
    sample = Sample()
    app = sample.make_app(limits)
    service = Served(None, sample, connections)  # type: ignore[arg-type]
    for name, methods in (("large", ["GET"]), ("count", ["GET"]), ("upload", ["POST"]), ("linger", ["GET"])):
        add_raw_route(app, f"/{name}", getattr(service, name), methods=methods, summary=name)
    async with running(app, **settings) as service.running:
        before = asyncio.all_tasks()
        yield service
        async with await service.connect() as other:
            assert await other.status() == 200
        sample.slow_ends.set()
        await until(lambda: not asyncio.all_tasks() - before)
    for connection in connections:
        assert connection.streams == {}
        assert connection._num_running == 0
        assert connection._timer is None or connection._timer.cancelled()


# ---------------------------------------------------------------------- what it answers


async def test_both_versions_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, httpx.AsyncClient() as old, await service.connect() as caller:
        for _ in range(2):
            assert (await old.post(f"{service.running.address}/raw/fine", content=b"12345")).text == "5 HTTP/1.1\n"
            assert await caller.status(post(b"/raw/fine"), b"12345") == 200
        assert await caller.body(3) == b"5 HTTP/2\n"


@pytest.mark.parametrize("size", [1, 10, 24])
async def test_a_preface_in_portions(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect(greets=False) as caller:
        said = PREFACE + SETTINGS + pack(frames.HEADERS, WHOLE | frames.END_STREAM, 1, block(GET))
        for at in range(0, len(said), size):
            caller.writer.write(said[at : at + size])
            await asyncio.sleep(0)
        assert b"ok" in (await asyncio.wait_for(caller.reader.readuntil(b"}"), 5))


@pytest.mark.parametrize("said", [b"PRI * HTTP/2.0\r\n\r\nSX\r\n\r\n", b"PRI \r\n\r\n"])
async def test_a_preface_that_is_none(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect(greets=False) as caller:
        caller.writer.write(said)
        assert (await asyncio.wait_for(caller.reader.readline(), 5)).startswith(b"HTTP/1.1 4")
        assert service.connections == []


async def test_every_kind_of_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        assert await caller.status(get(b"/nowhere")) == 404
        assert await caller.status(get(b"/stale")) == 409
        assert await caller.status(get(b"/bug")) == 500
        head = [(b":method", b"HEAD"), *GET[1:]]
        assert await caller.status(head) in (200, 405)
        number = caller.ask(post(b"/raw/cut"))
        assert await caller.reset_of(number) == ErrorCode.INTERNAL_ERROR
        assert await caller.status(get(b"/large")) == 200
        assert sum(len(event.data) for event in caller.of(DataReceived)) > LARGE


async def test_an_answer_before_the_body_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole, and the client is told that the rest is not wanted."""
    monkeypatch.setattr(asgi, "DISCARD_SECONDS", 0.1)
    async with served(monkeypatch) as service, await service.connect() as caller:
        number = caller.ask(post(b"/raw-refusal"), end_stream=False)
        caller.h2.send_data(number, b"12345")
        caller.flush()
        assert b"stale_round" in await caller.body(number)
        assert await caller.reset_of(number) == ErrorCode.NO_ERROR
        assert await caller.status() == 200


async def test_the_rest_of_a_refused_body_is_read_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients such as curl lose an answer that is followed by a reset."""
    async with served(monkeypatch) as service, await service.connect() as caller:
        number = caller.ask(post(b"/raw-refusal"), end_stream=False)
        left = 1 << 20
        assert b"stale_round" in await caller.body(number)
        while left:
            while not (room := min(left, caller.h2.local_flow_control_window(number), 16_000)):
                await asyncio.wait_for(caller.hear(), 5)
            left -= room
            caller.h2.send_data(number, bytes(room), end_stream=not left)
            caller.flush()
        assert await caller.status() == 200
        assert caller.of(StreamReset) == []


async def test_clients_that_drop_the_rest_of_a_refused_body_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        for _ in range(MAX_RESETS + 20):
            number = caller.ask(post(b"/raw-refusal"), end_stream=False)
            await caller.body(number)
            caller.h2.reset_stream(number, ErrorCode.CANCEL)
            caller.flush()
        assert await caller.status() == 200


async def test_a_request_is_answered_whole_although_the_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service:
        caller = await service.connect()
        number = caller.ask(get(b"/slow"))
        await asyncio.wait_for(service.sample.slow_begun.wait(), 5)
        service.running.stop.set()
        await until(lambda: service.connections[0].is_closing)
        service.sample.slow_ends.set()
        data = b""
        async with asyncio.timeout(5):
            while part := await caller.reader.read(1 << 16):  # h2 itself hears nothing behind a GOAWAY
                data += part
        assert data.count(b'"slow"') == 1
        assert pack(frames.DATA, 0, number, b'"slow"')[:9][:3] in data
        caller.writer.close()
        monkeypatch.setattr(Served, "connect", _nobody)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _nobody(*_: Any, **__: Any) -> Any:
    @asynccontextmanager
    async def answered() -> AsyncIterator[Any]:
        yield type("Caller", (), {"status": staticmethod(lambda: asyncio.sleep(0, 200))})

    return answered()


@pytest.mark.parametrize("is_answered", [False, True])
async def test_an_application_hears_that_its_client_has_gone(
    is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(monkeypatch) as service:
        async with await service.connect() as caller:
            number = caller.ask(get(b"/linger?x" if is_answered else b"/linger"))
            if is_answered:
                assert await caller.body(number) == b"x"
            else:
                await asyncio.sleep(0.05)
        await until(lambda: service.ended)
        assert service.ended == ["http.disconnect"]


# ---------------------------------------------------------------------- bodies into memory


@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("parts", [[b"1234567890"], [b"123", b"", b"4567890"], [b"123"], [b""]])
async def test_a_body_into_memory(parts: list[bytes], says_length: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "READ_SECONDS", 0.02)
    async with served(monkeypatch) as service, await service.connect() as caller:
        length = [(b"content-length", b"%d" % sum(map(len, parts)))] if says_length else []
        number = caller.ask(post(b"/upload", *length), end_stream=False)
        for part in parts:
            caller.h2.send_data(number, part)
            caller.flush()
            await asyncio.sleep(0.03)
        caller.h2.end_stream(number)
        caller.flush()
        assert await caller.body(number) == b"".join(parts)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_body_that_is_larger_than_its_memory(
    ends: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        number = caller.ask(post(b"/upload"), end_stream=False)
        for part in [b"1234567890!"] if at_once else [b"1234567890", b"!"]:
            caller.h2.send_data(number, part, end_stream=ends and part.endswith(b"!"))
            caller.flush()
            await asyncio.sleep(0.03)
        assert await caller.body(number) == b"too long"


@pytest.mark.parametrize(("length", "sent"), [(10, 11), (10, 9), (0, 1), (1, 0)])
async def test_a_body_that_is_not_as_long_as_it_says(length: int, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        said = block(post(b"/upload", (b"content-length", b"%d" % length)))
        caller.say(pack(frames.HEADERS, WHOLE, 1, said) + pack(frames.DATA, frames.END_STREAM, 1, bytes(sent)))
        caller.forget(1)
        assert await caller.reset_of(1) == ErrorCode.PROTOCOL_ERROR
        caller.say(pack(frames.HEADERS, WHOLE | frames.END_STREAM, 3, block(GET)))
        caller.forget(3)
        assert b"ok" in await caller.body(3)


async def test_a_slow_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "READ_SECONDS", 0.02)
    limits = RequestLimits(body_timeout_seconds=0.2)
    async with served(monkeypatch, limits) as service, await service.connect() as caller:
        number = caller.ask(post(b"/upload"), end_stream=False)
        other = caller.ask(post(b"/raw/fine"), end_stream=False)
        for _ in range(6):
            caller.h2.send_data(number, b"x")
            caller.h2.send_data(other, bytes(2000))
            caller.flush()
            await asyncio.sleep(0.05)
        assert b"slow_body" in await caller.body(number)
        caller.h2.end_stream(other)
        caller.flush()
        assert await caller.body(other) == b"12000 HTTP/2\n"


# ---------------------------------------------------------------------- requests that are none

NOT_REQUESTS = {
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
    "a path that is none": [*GET[:3], (b":path", b"healthz")],
    "a method that is none": [(b":method", b"GE T"), *GET[1:]],
    "two methods": [GET[0], *GET],
    "two paths": [*GET, GET[3]],
    "an unknown pseudo header": [*GET, (b":what", b"x")],
    "a status": [*GET, (b":status", b"200")],
    "a pseudo header behind others": [*GET[:3], (b"x-a", b"b"), GET[3]],
    "no length": [*GET, (b"content-length", b"x")],
    "a negative length": [*GET, (b"content-length", b"-1")],
    "two lengths": [*GET, (b"content-length", b"0"), (b"content-length", b"1")],
    "an endless length": [*GET, (b"content-length", b"9" * 30)],
    "two hosts": [*GET, (b"host", b"localhost"), (b"host", b"localhost")],
    "a host that is not the authority": [*GET, (b"host", b"other")],
    "nothing": [],
}


async def test_requests_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service:
        for name, headers in NOT_REQUESTS.items():
            async with await service.connect() as caller:
                for number, said in ((1, headers), (3, GET)):
                    caller.say(pack(frames.HEADERS, WHOLE | frames.END_STREAM, number, block(said)))
                    caller.forget(number)
                assert await caller.reset_of(1) == ErrorCode.PROTOCOL_ERROR, name
                assert caller.of(ResponseReceived, 1) == [], name
                assert b"ok" in await caller.body(3), name


@pytest.mark.parametrize("method", [b"M-SEARCH", b"VERSION-CONTROL", b"get"])
async def test_a_method_that_no_route_has(method: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        assert await caller.status([(b":method", method), *GET[1:]]) == 405


@pytest.mark.parametrize(
    "breach",
    [
        pack(frames.HEADERS, WHOLE | frames.END_STREAM, 3, block(GET)),
        pack(frames.DATA, 0, 2, b"x"),
        pack_number(frames.WINDOW_UPDATE, 2, 1),
        pack_number(frames.RST_STREAM, 2, ErrorCode.CANCEL),
    ],
    ids=["HEADERS of a stream that was skipped", "DATA", "WINDOW_UPDATE", "RST_STREAM"],
)
async def test_streams_below_the_newest_that_were_never_opened(breach: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        await caller.status()
        caller.say(pack(frames.HEADERS, WHOLE | frames.END_STREAM, 5, block(get(b"/slow"))))
        await asyncio.wait_for(service.sample.slow_begun.wait(), 5)
        caller.say(breach)
        assert await caller.end() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("name", [b":path", b"X-A", b""])
async def test_trailers_with_a_malformed_name(name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        number = caller.ask(post(b"/raw/fine"), end_stream=False)
        caller.say(pack(frames.HEADERS, WHOLE | frames.END_STREAM, number, block([(name, b"x")])))
        assert await caller.reset_of(number) == ErrorCode.PROTOCOL_ERROR
        assert caller.of(ResponseReceived, number) == []


async def test_a_client_that_expects_to_be_told_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        number = caller.ask(post(b"/raw/fine", (b"expect", b"100-continue")), end_stream=False)
        await caller.until(InformationalResponseReceived, number)
        caller.h2.send_data(number, b"12345", end_stream=True)
        caller.flush()
        assert await caller.body(number) == b"5 HTTP/2\n"


@pytest.mark.parametrize("number", [2, 0, 100])
async def test_streams_that_only_servers_open(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        caller.say(pack(frames.HEADERS, WHOLE | frames.END_STREAM, number, block(GET)))
        assert await caller.end() == ErrorCode.PROTOCOL_ERROR


# ---------------------------------------------------------------------- who does nothing


@pytest.mark.parametrize("said", [b"", SETTINGS, SETTINGS + pack(frames.PING, 0, 0, bytes(8))])
async def test_a_client_that_asks_for_nothing(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        served(monkeypatch, header_timeout_seconds=0.2) as service,
        await service.connect(greets=False) as caller,
    ):
        caller.writer.write(PREFACE + said)
        await asyncio.wait_for(caller.reader.read(), 5)


@pytest.mark.parametrize(
    "begin",
    [
        frames.pack_frame_header(200, frames.HEADERS, WHOLE, 3),
        pack(frames.HEADERS, 0, 3, block(GET)) + frames.pack_frame_header(200, frames.CONTINUATION, WHOLE, 3),
        frames.pack_frame_header(600, frames.SETTINGS, 0, 0),
    ],
    ids=["HEADERS", "CONTINUATION", "SETTINGS"],
)
async def test_a_frame_that_dribbles(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, header_timeout_seconds=0.2) as service, await service.connect() as caller:
        await caller.status()
        caller.say(begin)
        ending = asyncio.create_task(caller.end())
        async with asyncio.timeout(5):
            while not ending.done():
                caller.writer.write(b"\0")
                await asyncio.sleep(0.01)
        assert await ending == ErrorCode.ENHANCE_YOUR_CALM


async def test_whoever_is_within_no_frame_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between requests, and in a body."""
    async with served(monkeypatch, header_timeout_seconds=0.2) as service, await service.connect() as caller:
        await caller.status()
        await asyncio.sleep(0.5)
        number = caller.ask(post(b"/raw/fine"), end_stream=False)
        caller.say(frames.pack_frame_header(5, frames.DATA, frames.END_STREAM, number) + b"123")
        await asyncio.sleep(0.5)
        caller.say(b"45")
        assert await caller.body(number) == b"5 HTTP/2\n"


async def test_headers_that_are_never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, header_timeout_seconds=0.2) as service, await service.connect() as caller:
        await caller.status()
        caller.say(pack(frames.HEADERS, 0, 3, block(GET)))
        assert await caller.end() == ErrorCode.ENHANCE_YOUR_CALM


async def test_an_idle_connection_stays_and_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "PING_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(http2_server, "PING_TIMEOUT_SECONDS", 0.3)
    async with served(monkeypatch, header_timeout_seconds=0.2) as service, await service.connect() as caller:
        assert await caller.status() == 200
        for _ in range(2):
            caller.events.clear()
            await caller.until(PingReceived)  # which h2 answers
        assert await caller.status() == 200
        with pytest.raises(TimeoutError):  # now it does not
            async with asyncio.timeout(0.15):
                await caller.reader.read(0) or await asyncio.sleep(5)
        await asyncio.sleep(1)
        assert service.connections[0]._transport.is_closing()


# ---------------------------------------------------------------------- who takes nothing


@pytest.mark.parametrize("how", ["no window", "a window of one byte", "a byte at a time", "does not read"])
async def test_a_reply_that_nobody_takes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window = {"no window": 0, "a window of one byte": 1, "a byte at a time": 0}.get(how, frames.MAX_WINDOW)
    async with served(monkeypatch, body_timeout_seconds=0.4) as service:  # noqa: SIM117 - the client goes first
        async with await service.connect(settings={SettingCodes.INITIAL_WINDOW_SIZE: window}) as caller:
            if how == "does not read":
                caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(5):
                caller.ask(get(b"/large"))
            async with asyncio.timeout(10):
                while len(service.ended) < 5:
                    if how == "a byte at a time" and not caller.writer.is_closing():
                        caller.say(pack_number(frames.WINDOW_UPDATE, 1, 1))
                    await asyncio.sleep(0.01)
            assert service.num_asked == 5
            assert service.sent_bytes < LARGE / 2, "it is kept somewhere"
            assert service.connections[0]._transport.is_closing()


async def test_a_stream_without_a_window_is_reset_although_its_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch, body_timeout_seconds=1) as service:  # noqa: SIM117 - the client goes first
        async with await service.connect(settings={SettingCodes.INITIAL_WINDOW_SIZE: 0}) as caller:
            numbers = [caller.ask(get(b"/large")) for _ in range(4)]
            other = caller.ask(get(b"/large"))
            async with asyncio.timeout(10):
                while len(service.ended) < 4:
                    caller.h2.increment_flow_control_window(8000, other)
                    caller.flush()
                    await asyncio.sleep(0.01)
            assert not service.connections[0]._transport.is_closing()
            for number in numbers:
                assert await caller.reset_of(number) == ErrorCode.CANCEL
            caller.h2.reset_stream(other)
            caller.flush()
            await until(lambda: len(service.ended) == 5)


async def test_streams_with_tiny_windows_are_reset_although_an_earlier_one_takes_all_that_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A helper keeps the connection's window empty, so that the others have windows of a byte and send nothing."""
    async with served(monkeypatch, body_timeout_seconds=1) as service:  # noqa: SIM117 - the client goes first
        async with await service.connect(settings={SettingCodes.INITIAL_WINDOW_SIZE: 1}, widens=False) as caller:
            helper = caller.ask(get(b"/large"))
            caller.h2.increment_flow_control_window(LARGE, helper)
            caller.flush()
            await until(lambda: service.connections and service.connections[0].sent_bytes == frames.DEFAULT_WINDOW)
            numbers = [caller.ask(get(b"/large")) for _ in range(4)]
            async with asyncio.timeout(10):
                while len(service.ended) < 4:
                    caller.h2.increment_flow_control_window(1000)
                    caller.flush()
                    await asyncio.sleep(0.01)
            assert not service.connections[0]._transport.is_closing()
            for number in numbers:
                assert await caller.reset_of(number) == ErrorCode.CANCEL
            caller.h2.reset_stream(helper)
            caller.flush()
            await until(lambda: len(service.ended) == 5)


async def test_an_answer_that_is_not_taken_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, RequestLimits(max_requests=4)) as service, await service.connect() as other:  # noqa: SIM117
        async with await service.connect(settings={SettingCodes.INITIAL_WINDOW_SIZE: 0}) as caller:
            numbers = [caller.ask(get(b"/nothing")) for _ in range(4)]
            for number in numbers:
                await caller.until(ResponseReceived, number)
            assert await other.status() == 200
            for number in numbers:
                caller.h2.increment_flow_control_window(1000, number)
            caller.flush()
            for number in numbers:
                assert b"not_found" in await caller.body(number)


async def test_a_slow_reader_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, body_timeout_seconds=0.2) as service:  # noqa: SIM117
        async with await service.connect(settings={SettingCodes.INITIAL_WINDOW_SIZE: 0}) as caller:
            number = caller.ask(get(b"/large"))
            for _ in range(40):
                caller.h2.increment_flow_control_window(2000, number)
                caller.flush()
                await asyncio.sleep(0.02)
            assert not service.connections[0]._transport.is_closing()
            caller.h2.reset_stream(number)
            caller.flush()
            await until(lambda: service.ended)


@pytest.mark.parametrize("is_abrupt", [False, True])
async def test_a_client_that_goes_while_it_is_answered(is_abrupt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service:
        async with await service.connect() as caller:
            number = caller.ask(get(b"/large"))
            await caller.until(DataReceived, number)
            if is_abrupt:
                caller.writer.transport.abort()
            else:
                caller.h2.reset_stream(number)
                caller.flush()
                assert await caller.status() == 200
        await until(lambda: service.ended)
        assert not service.connections[0]._writer.is_in_frame


# ---------------------------------------------------------------------- who asks for too much


async def test_too_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        for number in range(1, 2 * MAX_STREAMS + 3, 2):
            caller.h2.send_headers(number, get(b"/slow"), end_stream=True)
        caller.flush()
        assert await caller.reset_of(2 * MAX_STREAMS + 1) == ErrorCode.REFUSED_STREAM
        service.sample.slow_ends.set()
        assert await caller.body(2 * MAX_STREAMS - 1) == b'"slow"'
        assert len(caller.of(StreamReset)) == 1
        assert await caller.status() == 200


REQUEST = pack(frames.HEADERS, WHOLE | frames.END_STREAM, 0x11223344, block(get(b"/count")))
BREACHES = {
    "reset": pack_number(frames.RST_STREAM, 0x11223344, ErrorCode.CANCEL),
    "reset without an error": pack_number(frames.RST_STREAM, 0x11223344, ErrorCode.NO_ERROR),
    "window too large": pack_number(frames.WINDOW_UPDATE, 0x11223344, frames.MAX_WINDOW),
    "window of nothing": pack_number(frames.WINDOW_UPDATE, 0x11223344, 0),
    "data behind the end": pack(frames.DATA, 0, 0x11223344, b"x"),
    "headers behind the end": pack(frames.HEADERS, WHOLE, 0x11223344, block(GET)),
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES)
async def test_streams_that_are_begun_and_given_up(breach: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is the server that is made to give them up."""
    async with served(monkeypatch) as service, await service.connect() as caller:
        for number in range(1, 100_000, 2):
            caller.say((REQUEST + breach).replace(b"\x11\x22\x33\x44", number.to_bytes(4, "big")))
            if number % 50 == 1:
                await asyncio.sleep(0.001)
            if service.connections[0]._transport.is_closing():
                break
        assert number < 2 * MAX_RESETS + 200
        assert await caller.raw_end() in (ErrorCode.ENHANCE_YOUR_CALM, None)
        assert service.connections[0]._num_running <= MAX_STREAMS


async def test_streams_that_are_refused_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_http2.connection.MAX_UNPRODUCTIVE_FRAMES", 200)
    async with served(monkeypatch) as service, await service.connect() as caller:
        asked = block(get(b"/slow"))
        for number in range(1, 1000, 2):
            caller.say(pack(frames.HEADERS, WHOLE | frames.END_STREAM, number, asked))
        assert await caller.raw_end() in (ErrorCode.ENHANCE_YOUR_CALM, None)
        assert service.connections[0].highest_stream == 2 * (MAX_STREAMS + 201) - 1


async def test_requests_that_are_none_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        said = b"".join(pack(frames.HEADERS, WHOLE, number, block(GET[1:])) for number in range(1, 1000, 2))
        caller.say(said)
        assert await caller.raw_end() in (ErrorCode.ENHANCE_YOUR_CALM, None)


async def test_requests_that_are_given_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads as many replies may continue without a limit."""
    async with served(monkeypatch) as service, await service.connect() as caller:
        for _ in range(MAX_RESETS + 20):
            number = caller.ask(get(b"/slow"))
            caller.h2.reset_stream(number, ErrorCode.CANCEL)
            service.sample.slow_ends.set()
            assert await caller.status() == 200
        assert not service.connections[0]._transport.is_closing()


FLOODS = {
    "PING": pack(frames.PING, 0, 0, bytes(8)),
    "SETTINGS": SETTINGS,
    "SETTINGS of windows": pack_settings({4: 1000}) + pack_settings({4: 1001}),
    "PRIORITY": pack(frames.PRIORITY, 0, 3, bytes(5)),
    "WINDOW_UPDATE": pack_number(frames.WINDOW_UPDATE, 3, 1),
    "empty DATA": pack(frames.DATA, 0, 3),
    "padded DATA": pack(frames.DATA, frames.PADDED, 3, b"\0"),
    "late HEADERS": pack(frames.HEADERS, WHOLE | frames.END_STREAM, 1, block(GET)),
    "unknown": pack(0x99, 0, 0, b"x"),
}


@pytest.mark.parametrize("frame", FLOODS.values(), ids=FLOODS)
async def test_floods(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read of what is answered, and others are served meanwhile."""
    async with served(monkeypatch) as service, await service.connect() as caller, await service.connect() as other:
        await caller.status()
        caller.ask(post(b"/raw/fine"), end_stream=False)
        num_sent = 0
        queued = 0
        connection = service.connections[0]
        while not connection._transport.is_closing() and num_sent < 3 * MAX_UNPRODUCTIVE_FRAMES:
            caller.say(frame * 500)
            num_sent += 500
            queued = max(queued, connection._writer.num_queued)
            await asyncio.sleep(0)
            if num_sent % 5000 == 0:
                assert await asyncio.wait_for(other.status(), 5) == 200
        assert num_sent < 3 * MAX_UNPRODUCTIVE_FRAMES
        assert queued < 300_000
        assert await caller.end() in (ErrorCode.ENHANCE_YOUR_CALM, None)


async def test_headers_that_are_larger_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as service, await service.connect() as caller:
        await caller.status()
        bomb = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 60_000  # 240 MB of headers
        caller.say(pack(frames.HEADERS, WHOLE, 3, bomb))
        assert await caller.end() == ErrorCode.COMPRESSION_ERROR


async def test_connections_that_are_closed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_http2.connection.CLOSE_SECONDS", 0.05)
    async with served(monkeypatch) as service:
        for said in (b"", pack(frames.PING, 0, 1, bytes(8)), pack(frames.HEADERS, WHOLE, 3, b"\xff\xff")):
            async with await service.connect() as caller:
                await caller.status()
                caller.say(said)
                if said:
                    await caller.end()
        connections = [weakref.ref(each) for each in service.connections]
        service.connections.clear()
        await asyncio.sleep(0.2)
        gc.collect()
        assert [each() for each in connections] == [None] * 3
