"""Reading parameters: what is odd about some of them."""

from __future__ import annotations

import pytest

from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.coordinator.inspection.parameters import open_parameter, wait_for_newer

from .coordinating import FakePservers, begin, coordinating
from .support import beat

pytestmark = pytest.mark.asyncio


async def test_one_without_elements_is_of_the_round_that_all_have() -> None:
    """No pserver has a block of it; who waits for a newer version of it would ask again and again without a pause."""
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator:
        [first, _] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        coordinator.cluster.run.plan = make_plan([ParameterSpec("none", (0, 7))], 2)
        for index, round_ in ((0, 9), (1, 8)):
            coordinator.cluster.pserver_heartbeat(index, beat(run=first[1], round_=round_), coordinator.now())
        assert not await wait_for_newer(coordinator, "none", 8, 0.01)
        assert await wait_for_newer(coordinator, "none", 7, 0.01)
        async with open_parameter(coordinator, "none", "npy") as stream:
            assert stream.headers["gradpost-round"] == "8"
