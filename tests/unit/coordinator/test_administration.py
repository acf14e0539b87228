"""What an administrator asks for and cannot have leaves the run as it is; what takes its time is no failure."""

from __future__ import annotations

import pytest

from ps_protocol.errors import Conflict
from services.coordinator.administration import Administration

from .coordinating import FakePservers, begin, coordinating
from .support import alive, leaving

pytestmark = pytest.mark.asyncio


async def test_nobody_goes_back_without_those_who_are_done():
    """They would not take their steps again, so that the run would fail: it was not asked for that."""
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, second] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        cluster = coordinator.cluster
        cluster.trainer_heartbeat(1, alive(run=second[1], round_=4), coordinator.now())
        cluster.leave_trainer(1, leaving("done", run=second[1], round=4), coordinator.now())
        cluster.complete_checkpoints[:] = [2]
        with pytest.raises(Conflict, match="trainer 1"):
            await Administration(coordinator).roll_back("me", 2)
        assert cluster.run.state == "training"
        assert cluster.run.rollback_to is None
        assert [entry.outcome for entry in coordinator.audit.entries()] == ["requested", "failed"]
