"""Requests that no client would send: none is an internal error, none changes anything or takes memory."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from prometheus_client.parser import text_string_to_metric_families

from ps_protocol.errors import ERRORS, PROBLEM_CONTENT_TYPE
from ps_protocol.fence import FENCE_HEADER
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.requests import WAIT_HEADER
from ps_protocol.routes import (
    DECLARE_MODEL,
    EVICT,
    JOIN_TRAINER,
    METRICS,
    PAUSE,
    RATE,
    RESUME,
    ROLL_BACK,
    STOP,
)
from trainer_client.testing import LocalCluster

from ..cluster.bad_requests import LIMITS, MIB
from ..cluster.wire import World
from ..soaking import examples

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.hypothesis]

Answers = Counter[str]

HAS_EFFECT = {RATE, ROLL_BACK}  # a good one; there may be a checkpoint of round 0
NOT_TRIED = {PAUSE, RESUME, EVICT, STOP}  # with an effect that they are for


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
    """A cluster whose trainers are recorded up to the middle of round 2, and the answers to what is sent to it now."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._recorder = Recorder()
        hooks = {"request": [self._recorder]}
        self._cluster = LocalCluster(pservers=2, trainers=2, local_transport=False, lease_seconds=3600, **LIMITS)
        http = httpx.AsyncClient(trust_env=False, timeout=30, event_hooks=hooks)
        self._world = World(self._cluster, http, http)
        self.client = httpx.Client(trust_env=False, timeout=30)
        self.answers: Answers = Counter()

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
        self.answers[str(response.status_code)] += 1


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    fuzzed = Fuzzed()
    try:
        fuzzed.start()
        yield fuzzed
    finally:
        fuzzed.stop()


def fuzz(strategy: st.SearchStrategy[Any], num: int, send: Callable[[Any], None]) -> None:
    """Send so many, the same ones in every run."""

    @settings(max_examples=num, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def send_all(request: Any) -> None:
        send(request)

    with suppress(Unsatisfiable):  # an operation without parameters has no wrong ones
        send_all()


def send_described(fuzzed: Fuzzed, num: int) -> None:
    """Requests that fit the OpenAPI document of a service, and requests that do not."""
    for address in fuzzed.addresses[:2]:
        document = fuzzed.client.get(address + "/openapi.json").text
        # It has to be a type for which schemathesis can make bytes.
        schema = schemathesis.openapi.from_dict(json.loads(document.replace(CONTENT_TYPE, "application/octet-stream")))
        operations = [result.ok() for result in schema.get_all_operations()]
        operations = [operation for operation in operations if operation.path not in NOT_TRIED]
        for operation in operations:
            modes = [] if operation.path in HAS_EFFECT else [schemathesis.GenerationMode.POSITIVE]
            for mode in [*modes, schemathesis.GenerationMode.NEGATIVE]:
                strategy = operation.as_strategy(generation_mode=mode)
                if operation.path in HAS_EFFECT:
                    strategy = strategy.filter(lambda case: not is_good(case.body))
                fuzz(strategy, max(1, num // (4 * len(operations))), lambda case: send_case(fuzzed, address, case))  # noqa: B023


def is_good(body: Any) -> bool:
    """Return whether an operation may take it: what is wrong of a negative case may be its credentials alone."""
    return isinstance(body, dict) and all(type(value) in (int, float) for value in body.values())


def send_case(fuzzed: Fuzzed, address: str, case: Any) -> None:
    kwargs = case.as_transport_kwargs(base_url=address)
    if "wait_seconds" in (kwargs.get("params") or {}):  # it is not waiting that is tried here
        kwargs["params"]["wait_seconds"] = 0
    kwargs["headers"].pop(WAIT_HEADER, None)
    if isinstance(kwargs.get("json"), dict) and kwargs["json"].get("previous"):
        kwargs["json"]["previous"] = 0  # else it may be the claim to follow a pserver that lives, which is believed
    try:
        request = fuzzed.client.build_request(
            kwargs["method"], kwargs["url"], params=kwargs.get("params"), headers=dict(kwargs.get("headers") or {}),
            content=kwargs.get("data") if isinstance(kwargs.get("data"), bytes | str) else None,
            json=kwargs.get("json"),
        )  # fmt: skip
    except (httpx.InvalidURL, ValueError, TypeError):  # not even httpx can say it
        return
    send_request(fuzzed, request)


def send_request(fuzzed: Fuzzed, request: httpx.Request) -> None:
    try:
        fuzzed.check(fuzzed.client.send(request))
    except httpx.LocalProtocolError:  # characters that no header may have: it was not sent, and does not count
        pass
    except httpx.RemoteProtocolError:
        fuzzed.answers["closed"] += 1


def send_spoilt(fuzzed: Fuzzed, sent: Sent) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in sent.headers]
    send_request(fuzzed, fuzzed.client.build_request(sent.method, sent.url, headers=headers, content=sent.content))


@pytest.mark.timeout(1500)
def test_fuzzed_requests_change_nothing(fuzzed: Fuzzed) -> None:
    num = examples(500)
    fuzzed.answers.clear()
    send_described(fuzzed, num * 4 // 10)
    while (missing := num - fuzzed.answers.total()) > 0:
        fuzz(spoil(fuzzed.recorded), missing, lambda sent: send_spoilt(fuzzed, sent))

    assert fuzzed.look() == fuzzed.before
    assert fuzzed.measure("gradpost_in_flight_bytes", fuzzed.addresses[1:]) == [0, 0]
    memory = fuzzed.measure("process_resident_memory_bytes", fuzzed.addresses)
    grown = [now - then for now, then in zip(memory, fuzzed.memory, strict=True)]
    assert max(grown) < 64 * MIB, grown
    print(dict(fuzzed.answers), f"grown by {max(grown) / MIB:.0f} MiB")


def test_the_recorded_requests_themselves_are_answered(fuzzed: Fuzzed) -> None:
    """Else the other test would spoil what is spoilt already."""
    for sent in fuzzed.recorded:
        send_spoilt(fuzzed, sent)
    assert fuzzed.look() == fuzzed.before
