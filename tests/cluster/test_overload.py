"""When a pserver takes in no more, trainers come back later, and the round is completed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from ps_config.certificates import TlsFiles
from ps_protocol.errors import PROBLEM_CONTENT_TYPE
from ps_protocol.optimizers import check_optimizer
from ps_protocol.routes import METRICS, SEND
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import ParameterClient
from trainer_client.testing import LocalCluster
from trainer_client.transport.exchange import make_bulk_transport

from .conftest import Carrier
from .wire import WireTrainer, completion, encode_blocks

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.asyncio]

SGD = check_optimizer("SGD", [{"nesterov": False, "maximize": False}])
NUMBERS = [{"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}]
SPECS = [ParameterSpec("w", (1000,))]


async def count_refused(address: str) -> float:
    async with httpx.AsyncClient() as http:
        text = (await http.get(address + METRICS)).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == "gradpost_http_requests_total" and sample.labels["route"] == SEND
        and sample.labels["code"] == "5xx"
    )  # fmt: skip


async def crawl(begun: asyncio.Event, may_end: asyncio.Event, body: bytes) -> AsyncIterator[bytes]:
    """All but the last byte of a body, and that when it may come."""
    yield body[:-1]
    begun.set()
    await may_end.wait()
    yield body[-1:]


async def train(address: str, rank: int, share_is_taken: bool) -> dict[str, torch.Tensor]:
    async with ParameterClient(coordinator=address, rank=rank) as client, httpx.AsyncClient() as other:
        await client.declare(SPECS, SGD)
        if client.joined.rank == client.uploader:
            await client.send_initial({spec.name: torch.zeros(spec.shape) for spec in SPECS})
        await client.get(0)
        pserver = client.pservers[0]
        begun, may_end = asyncio.Event(), asyncio.Event()
        if share_is_taken:
            headers = {**pserver.connection.fence.at_round(1).to_headers(), "content-length": "100"}
            body = crawl(begun, may_end, bytes(100))
            taking = asyncio.create_task(
                other.post(pserver.connection.info.address + SEND, headers=headers, content=body)
            )
            await begun.wait()
        gradients = {spec.name: torch.full(spec.shape, rank + 1.0) for spec in SPECS}
        sending = asyncio.create_task(client.send(1, gradients, NUMBERS))
        if share_is_taken:
            while not await count_refused(pserver.connection.info.address):
                assert not sending.done()
                await asyncio.sleep(0.01)
            may_end.set()
            assert (await taking).status_code == 400
        await sending
        await client.batch_barrier(1)
        return {name: value.clone() for name, value in (await client.get(1)).items()}


@pytest.mark.parametrize("http2", [True, False])
async def test_a_refused_push_comes_again_and_the_round_is_completed(http2: bool, carrier: Carrier) -> None:
    """One body of a trainer fits, and another request sends one; the other trainer does not notice."""
    with LocalCluster(pservers=1, trainers=2, **carrier, http2=http2, max_inflight_bytes=1) as cluster:
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(train(cluster.address, rank, rank == 0) for rank in range(2)))
    for result in results:
        assert all(torch.equal(value, torch.full_like(value, -1.5)) for value in result.values())


async def test_it_is_decided_before_the_body_is_sent(carrier: Carrier) -> None:
    """A body that was announced and is on its way takes up the trainer's share."""
    with LocalCluster(pservers=1, trainers=1, **carrier, max_inflight_bytes=1, lease_seconds=60) as cluster:
        async with httpx.AsyncClient(timeout=30) as http:
            trainer = WireTrainer(http, cluster.address)
            await trainer.join("a", 0)
            await trainer.declare()
            await trainer.wait_for_plan()
            await trainer.upload_initial()
            await trainer.get(0)
            body = encode_blocks(trainer.plan, trainer.plan.shards[0], completion(len(trainer.plan.shards[0])))
            send = trainer.ready.pservers[0].address + SEND
            begun, may_end = asyncio.Event(), asyncio.Event()

            headers = {**trainer.fence(1), "content-length": str(len(body))}
            first = asyncio.create_task(http.post(send, headers=headers, content=crawl(begun, may_end, body)))
            await begun.wait()
            for transport in (httpx.AsyncHTTPTransport(), make_bulk_transport(TlsFiles(), http2=True)):
                async with httpx.AsyncClient(transport=transport, timeout=30) as other:
                    response = await other.post(send, headers=trainer.fence(1), content=body)
                    assert (response.status_code, response.json()["code"]) == (503, "overloaded")
                    assert response.headers["content-type"] == PROBLEM_CONTENT_TYPE
                    assert response.headers["retry-after"] == "1"
            may_end.set()
            assert (await first).json()["complete"] is True
