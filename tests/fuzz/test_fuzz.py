"""Requests that no client would send: none is an internal error, none changes anything or takes memory."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from ps_protocol.errors import ERRORS, PROBLEM_CONTENT_TYPE
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.routes import (
    DECLARE_MODEL,
    EVENT_STREAM,
    EVICT,
    JOIN_TRAINER,
    PAUSE,
    RATE,
    RESUME,
    ROLL_BACK,
    WAIT_HEADER,
)
from trainer_client.testing import LocalCluster

from ..cluster.bad_requests import LIMITS, MIB
from ..cluster.wire import World
from ..soaking import examples
from .recorded import Recorder, Sent, send_raw, spoil, spoil_bytes

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.hypothesis]

Answers = Counter[str]

HAS_EFFECT = {RATE, ROLL_BACK}  # a good one; there may be a checkpoint of round 0
NOT_TRIED = {EVENT_STREAM, PAUSE, RESUME, EVICT}  # without an end, or with an effect that they are for


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
        done = [s for s in self._recorder.sent if ("gradpost-round", "2") not in s.headers or "/send" in s.url]
        paths = (JOIN_TRAINER, DECLARE_MODEL.format(rank=0), DECLARE_MODEL.format(rank=1))
        self.recorded = [s for s in done if "gradpost-round" in dict(s.headers) or s.url.endswith(paths)]
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
        return [self._runner.run(self._world.metric(address, name)) for address in addresses]

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


def send_spoilt_bytes(fuzzed: Fuzzed, url: str, data: bytes) -> None:
    """Not even HTTP any more, perhaps."""
    answer = send_raw(url, data)
    for status in re.findall(rb"^HTTP/1\.[01] (\d+)", answer, re.MULTILINE):
        assert status != b"500", (data, answer)
        fuzzed.answers[status.decode()] += 1
    if not answer:
        fuzzed.answers["closed"] += 1


@pytest.mark.timeout(1500)
def test_fuzzed_requests_change_nothing(fuzzed: Fuzzed) -> None:
    num = examples(500)
    fuzzed.answers.clear()
    # A request whose bytes are spoilt keeps no identity that lives: these are of round 1, which is over.
    over = [s for s in fuzzed.recorded if ("gradpost-round", "1") in s.headers]
    send_described(fuzzed, num * 4 // 10)
    fuzz(
        st.sampled_from(over).flatmap(lambda s: st.tuples(st.just(s.url), spoil_bytes(s.to_bytes()))),
        num * 2 // 10,
        lambda raw: send_spoilt_bytes(fuzzed, *raw),
    )
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
