"""A bad request gets one shape of answer, with a stable code, and changes nothing; nor does one too many."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio

from ps_http2.client import Http2Transport
from ps_protocol.errors import ERRORS, PROBLEM_CONTENT_TYPE, PROBLEM_TYPE_PREFIX, error_from_problem
from ps_protocol.routes import SEND
from trainer_client.testing import LocalCluster

from .bad_requests import CASES, LIMITS, MIB, Bad
from .wire import World

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        cluster = LocalCluster(
            pservers=2, trainers=2, local_transport=False, lease_seconds=120, on_trainer_loss="fail", **LIMITS
        )
        stack.enter_context(cluster)
        http = httpx.AsyncClient(trust_env=False, timeout=30)
        await stack.enter_async_context(http)
        bulk = httpx.AsyncClient(transport=Http2Transport(), timeout=None)
        await stack.enter_async_context(bulk)
        yield World(cluster, http, bulk)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name[:80]) for case in CASES])
async def test_bad_input_gets_a_problem_document_and_changes_nothing(world: World, case: Bad) -> None:
    await world.enter(case.phase)
    for via in case.via:
        await send_bad_input(world, case, world.bulk if via == "bulk" else world.http)
        assert await world.look() == world.before


async def send_bad_input(world: World, case: Bad, client: httpx.AsyncClient) -> None:
    request = case.make(world)
    address = world.cluster.address if request.to is None else world.addresses[request.to]
    response = await client.request(
        request.method, address + request.path, headers=request.headers, content=request.content
    )

    error = ERRORS[case.error]
    problem = response.json()
    assert (response.status_code, problem["code"]) == (error.status, error.code), problem
    assert response.headers["content-type"] == PROBLEM_CONTENT_TYPE
    expected = {
        "type": PROBLEM_TYPE_PREFIX + error.code,
        "title": error.code.replace("_", " "),
        "status": error.status,
        "code": error.code,
        "may_be_retried": error.may_be_retried,
    }
    assert {key: problem[key] for key in expected} == expected
    assert isinstance(problem["detail"], str)
    assert problem["detail"]
    assert len(response.content) < 5000  # what a stranger sent is not sent back in full
    rebuilt = error_from_problem(problem)
    assert (type(rebuilt), rebuilt.code, rebuilt.detail) == (error.family, error.code, problem["detail"])


def head(w: World, num_bytes: int, rank: int = 1) -> bytes:
    """Return the headers of a push over HTTP/1.1 that announces a body."""
    lines = {**w.trainers[rank].fence(2), "host": "localhost", "content-length": str(num_bytes)}
    return "\r\n".join([f"POST {SEND} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items()), "", ""]).encode()


async def open_socket(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(address)
    return await asyncio.open_connection(url.hostname, url.port)


async def test_announcements_of_large_bodies_take_no_memory(world: World) -> None:
    await world.enter("training")
    address, num_bytes = world.addresses[0], LIMITS["max_header_bytes"]
    resident = await world.metric(address, "process_resident_memory_bytes")
    used = await world.metric(address, "gradpost_staged_bytes")
    writers = []
    try:
        for _ in range(30):
            for size in (num_bytes, 10**12):  # the second is refused
                _, writer = await open_socket(address)
                writers.append(writer)
                writer.write(head(world, size) + bytes(1000))
        await world.wait_for_used_bytes(used + 30 * num_bytes)
        grown = await world.metric(address, "process_resident_memory_bytes") - resident
        assert grown < 100 * MIB, f"{grown / MIB:.0f} MiB for {30 * num_bytes / MIB:.0f} MiB that were only announced"
    finally:
        for writer in writers:
            writer.close()
    await world.wait_for_used_bytes(used)
    assert await world.look() == world.before


async def test_non_finite_gradients_are_applied_if_that_is_the_policy(world: World) -> None:
    await world.enter("training with NaN", nonfinite="allow")
    await world.trainers[1].push(2, float("nan"), float("nan"))
    for trainer in world.trainers:
        await trainer.barrier(2)
    for body in await world.trainers[0].get(2):
        assert b'"round":"2"' in body
        assert struct.pack("<f", float("nan"))[-2:] in body
    assert [state["round"] for state in (await world.look())[1]] == [2, 2]


async def test_a_gradient_that_its_client_has_not_checked_fails_the_run_on_all_pservers(world: World) -> None:
    await world.enter("training with NaN that no verdict names")
    await world.trainers[1].push(2, 1.0, float("nan"))
    for trainer in world.trainers:
        await trainer.barrier(2)
    async with asyncio.timeout(30):
        while (failure := world.cluster.status().failure) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert failure["code"] == "non_finite_update"
    for trainer in world.trainers:
        with pytest.raises(httpx.HTTPStatusError, match="410 Gone"):
            await trainer.push(3)


async def test_an_honest_request_is_let_in(world: World) -> None:
    """The other tests would pass on a pserver that refuses everything."""
    await world.enter("training, once more")
    await world.trainers[1].push(2)
    for trainer in world.trainers:
        await trainer.barrier(2)
    assert await world.trainers[0].get(2) == await world.trainers[1].get(2)
