"""Requests that no client would send: none is an internal error, none changes anything or takes memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ps_protocol.errors import ERRORS, PROBLEM_CONTENT_TYPE
from ps_protocol.fence import FENCE_HEADER
from ps_protocol.routes import (
    DECLARE_MODEL,
    JOIN_TRAINER,
    METRICS,
)
from trainer_client.testing import LocalCluster

from ..cluster.bad_requests import LIMITS, MIB
from ..cluster.wire import World
from ..soaking import examples

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.hypothesis]


# ---------------------------------------------------------------- recorded requests, and mutations of them


@dataclass(frozen=True)
class Sent:
    """One request, as a client sent it."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    content: bytes

    @property
    def round(self) -> int | None:
        """The round of its fence, if it has one."""
        fence = dict(self.headers).get(FENCE_HEADER)
        return None if fence is None else int(fence.rpartition(" ")[2])


class Recorder:
    """An event hook of an httpx client."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    async def __call__(self, request: httpx.Request) -> None:
        headers = tuple((name, value) for name, value in request.headers.items() if name != "accept-encoding")
        self.sent.append(Sent(request.method, str(request.url), headers, await request.aread()))


def flip_bits(data: bytes, places: list[int]) -> bytes:
    flipped = bytearray(data)
    for place in places:
        if flipped:
            flipped[place // 8 % len(flipped)] ^= 1 << place % 8
    return bytes(flipped)


@st.composite
def spoil_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Never the same bytes again, but for the rare case in which a repetition changes nothing."""
    match draw(st.sampled_from(["cut", "flip", "repeat", "zero", "append", "flip the start"])):
        case "cut":
            return data[: draw(st.integers(0, max(0, len(data) - 1)))]
        case "flip":
            return flip_bits(data, draw(st.lists(st.integers(0, 8 * len(data)), min_size=1, max_size=8, unique=True)))
        case "flip the start":  # where the lengths, names and numbers stand
            return flip_bits(data, draw(st.lists(st.integers(0, 8 * 400), min_size=1, max_size=4, unique=True)))
        case "repeat":
            begin = draw(st.integers(0, len(data)))
            end = draw(st.integers(begin, len(data)))
            return data[:end] + data[begin:end] + data[end:]
        case "zero":
            begin = draw(st.integers(0, len(data)))
            return data[:begin] + bytes(len(data) - begin)
        case _:
            return data + draw(st.binary(min_size=1, max_size=100))


# Nothing of it is a rank, a round or an incarnation that lives.
JUNK = st.sampled_from(["", " ", "-1", "1e3", "0x1", "99", "1" * 19, "nan", "a" * 200, "é".encode().decode("latin-1")])


@st.composite
def spoil(draw: st.DrawFn, requests: list[Sent]) -> Sent:
    """One of these requests with another body, or with a header that is missing, twice there, or junk."""
    request = draw(st.sampled_from(requests))
    headers = [(name, value) for name, value in request.headers if name not in ("content-length", "transfer-encoding")]
    content = request.content
    if content and draw(st.booleans()):
        content = draw(spoil_bytes(content))
    else:
        place = draw(st.integers(0, len(headers) - 1))
        name, _ = headers[place]
        match draw(st.sampled_from(["junk", "missing", "twice"])):
            case "junk":
                headers[place] = (name, draw(JUNK))
            case "missing":
                del headers[place]
            case _:
                headers.append((name, draw(JUNK)))
    return replace(request, headers=tuple(headers), content=content)


# ---------------------------------------------------------------- the cluster


class Fuzzed:
    """A cluster whose trainers are recorded up to the middle of round 2."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._recorder = Recorder()
        hooks = {"request": [self._recorder]}
        self._cluster = LocalCluster(pservers=2, trainers=2, local_transport=False, lease_seconds=3600, **LIMITS)
        http = httpx.AsyncClient(trust_env=False, timeout=30, event_hooks=hooks)
        self._world = World(self._cluster, http, http)
        self.client = httpx.Client(trust_env=False, timeout=30)

    def start(self) -> None:
        self._cluster.start()
        self._runner.run(self._world.enter("training"))
        # Of these any spoilt copy is harmless: what they did is done, and what they name is taken.
        done = [s for s in self._recorder.sent if s.round != 2 or "/send" in s.url]
        paths = (JOIN_TRAINER, DECLARE_MODEL.format(rank=0), DECLARE_MODEL.format(rank=1))
        self.recorded = [s for s in done if s.round is not None or s.url.endswith(paths)]
        assert len(self.recorded) > 10
        self.before = self.look()
        self.memory = self.measure("process_resident_memory_bytes", self.addresses)

    def stop(self) -> None:
        self.client.close()
        self._runner.run(self._world.http.aclose())
        self._runner.close()
        self._cluster.stop()

    @property
    def addresses(self) -> list[str]:
        return [self._cluster.address, *self._world.addresses]

    def look(self) -> Any:
        status, states = self._runner.run(self._world.look())
        return status, [{k: v for k, v in s.items() if k not in ("pushed_bytes", "pulled_bytes")} for s in states]

    def measure(self, name: str, addresses: Sequence[str]) -> list[float]:
        """A metric of each of these."""
        texts = [self._runner.run(self._world.http.get(address + METRICS)).text for address in addresses]
        families = [family for text in texts for family in text_string_to_metric_families(text)]
        return [sample.value for family in families for sample in family.samples if sample.name == name]

    def check(self, response: httpx.Response) -> None:
        """Never an internal error; whatever is refused is refused in the one shape."""
        assert response.status_code != 500, (response.request, response.text)
        if response.is_error:
            assert response.headers["content-type"] == PROBLEM_CONTENT_TYPE, response.text
            problem = response.json()
            assert ERRORS[problem["code"]].status == response.status_code == problem["status"]


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    fuzzed = Fuzzed()
    try:
        fuzzed.start()
        yield fuzzed
    finally:
        fuzzed.stop()


def send_spoilt(fuzzed: Fuzzed, sent: Sent) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in sent.headers]
    request = fuzzed.client.build_request(sent.method, sent.url, headers=headers, content=sent.content)
    with suppress(httpx.ProtocolError):  # httpx sends no characters that no header may have; or the service has closed
        fuzzed.check(fuzzed.client.send(request))


@pytest.mark.timeout(1500)
def test_fuzzed_requests_change_nothing(fuzzed: Fuzzed) -> None:
    @settings(
        max_examples=examples(500), derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(spoil(fuzzed.recorded))
    def send_all(sent: Sent) -> None:
        send_spoilt(fuzzed, sent)

    send_all()
    assert fuzzed.look() == fuzzed.before
    assert fuzzed.measure("gradpost_in_flight_bytes", fuzzed.addresses[1:]) == [0, 0]
    memory = fuzzed.measure("process_resident_memory_bytes", fuzzed.addresses)
    grown = [now - then for now, then in zip(memory, fuzzed.memory, strict=True)]
    assert max(grown) < 64 * MIB, grown


def test_the_recorded_requests_themselves_are_answered(fuzzed: Fuzzed) -> None:
    """Else the other test would spoil what is spoilt already."""
    for sent in fuzzed.recorded:
        send_spoilt(fuzzed, sent)
    assert fuzzed.look() == fuzzed.before
