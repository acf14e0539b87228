"""The coordinator of a trainer without a cluster (`strategy="local"`): this process answers itself."""

from __future__ import annotations

import time
from typing import Any

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict
from ps_protocol.messages import DeclareModel, PlanReady, RunSummary, TrainerJoined
from ps_protocol.plan import make_ring_plan
from ps_protocol.vocabulary import ParameterSpec

from .coordinator_client import CoordinatorClient, make_log

RUN = "local"
# Between the processes of a host, which are one trainer.
LEASE_SECONDS = 10.0
ROUND_TIMEOUT_SECONDS = 600.0


class LocalCoordinator(CoordinatorClient):
    """The answers of a coordinator to the only trainer of a run, without requests."""

    def join(self, metrics_address: str | None) -> TrainerJoined:
        """Return rank 0 of a run with the mode that the script expects. Raises Conflict for several trainers."""
        num_trainers = self._settings.world_size or 1
        if num_trainers > 1:
            text = "strategy local trains in one process, without a cluster; start one process, or use a cluster"
            raise Conflict(text, code="mode_mismatch", expected="world size 1", actual=num_trainers)
        expected: dict[str, Any] = {name: value for name, value in self._settings.expect.items() if name != "strategy"}
        self.joined = TrainerJoined(
            run=RUN,
            rank=0,
            world_size=1,
            incarnation=1,
            consistency=Consistency(**expected),
            lease_seconds=LEASE_SECONDS,
            round_timeout_seconds=ROUND_TIMEOUT_SECONDS,
        )
        self.log = make_log(run=RUN, trainer=0)
        self._began = time.monotonic()
        return self.joined

    def declare(self, message: DeclareModel) -> PlanReady:
        """Return a plan without pservers."""
        plan = make_ring_plan([ParameterSpec(*fields) for fields in message.parameters], message.buffers)
        return PlanReady(
            run=RUN,
            attempt=0,
            plan=plan,
            digest=plan.digest,
            pservers=(),
            uploader=0,
            nonfinite=message.nonfinite or "reject",
            max_grad_norm=message.max_grad_norm,
        )

    def summary(self) -> RunSummary:
        """Return the run as this trainer has seen it."""
        return RunSummary(
            run=RUN,
            state="training",
            mode=self.joined.consistency.mode,
            transport=RUN,
            num_trainers=1,
            rounds=self.round,
            seconds=time.monotonic() - self._began,
            shards=(),
            results=dict(self.results),
        )
