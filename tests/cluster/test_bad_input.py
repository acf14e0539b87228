"""A bad request gets one shape of answer, with a stable code, and changes nothing; nor does one too many."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
import pytest_asyncio

from ps_protocol.errors import ERRORS, PROBLEM_CONTENT_TYPE, PROBLEM_TYPE_PREFIX, error_from_problem
from tests.unit.http2.shells import PolledOnLoop
from trainer_client.testing import LocalCluster

from .bad_requests import CASES, LIMITS, Bad
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
        bulk = httpx.AsyncClient(transport=PolledOnLoop(), timeout=None)
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


async def test_non_finite_gradients_are_applied_if_that_is_the_policy(world: World) -> None:
    await world.enter("training with NaN", nonfinite="allow")
    await world.trainers[1].push(2, float("nan"), float("nan"))
    for trainer in world.trainers:
        await trainer.barrier(2)
    for body in await world.trainers[0].get(2):
        assert b'"round":"2"' in body
        assert struct.pack("<f", float("nan"))[-2:] in body
    assert [state["round"] for state in (await world.look())[1]] == [2, 2]


async def test_an_honest_request_is_let_in(world: World) -> None:
    """The other tests would pass on a pserver that refuses everything."""
    await world.enter("training, once more")
    await world.trainers[1].push(2)
    for trainer in world.trainers:
        await trainer.barrier(2)
    assert await world.trainers[0].get(2) == await world.trainers[1].get(2)
