"""A step that fails has let go of everything by the time that it says so."""

from __future__ import annotations

import asyncio
from signal import SIGCONT, SIGSTOP

import pytest
import torch

from ps_protocol.errors import NonFiniteGradient
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import Carrier

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

NUM_ELEMENTS = 5_000_000  # so large that a pserver that does not read keeps a push from ending


def pushes_under_way(session: Session) -> list[asyncio.Task[object]]:
    async def look() -> list[asyncio.Task[object]]:
        return [task for task in asyncio.all_tasks() if "_push" in repr(task.get_coro())]

    return session.io.run(look())


def test_no_gradient_is_read_after_its_step_has_failed(carrier: Carrier) -> None:
    """One pserver refuses its part while the other reads nothing: the script may change its gradients afterwards."""
    with (
        LocalCluster(pservers=2, trainers=1, lease_seconds=60, slice_parameters=False, **carrier) as cluster,
        Session(coordinator=cluster.address, rank=0, world_size=1) as session,
    ):
        parameters = {name: torch.nn.Parameter(torch.zeros(NUM_ELEMENTS)) for name in ("a", "b")}
        optimizer = RemoteOptimizer(torch.optim.SGD(parameters.items(), lr=1.0), session=session)
        [silent] = {block.name for block in session.client.plan.shards[0]} & {"a.block0", "b.block0"}
        refused = {"a.block0": "b", "b.block0": "a"}[silent]
        for parameter in parameters.values():
            parameter.grad = torch.ones(NUM_ELEMENTS)
        parameters[refused].grad[3] = float("nan")
        cluster.pservers[0].signal(SIGSTOP)
        try:
            with pytest.raises(NonFiniteGradient):
                optimizer.step()
            assert pushes_under_way(session) == []
        finally:
            cluster.pservers[0].signal(SIGCONT)
        for parameter in parameters.values():
            parameter.grad = torch.full((NUM_ELEMENTS,), 2.0)  # nothing of the other was staged where nobody read
        optimizer.step()
        assert all(bool((parameter == -2.0).all()) for parameter in parameters.values())
