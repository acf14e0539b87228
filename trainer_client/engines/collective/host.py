"""Engines of a host with several processes: process 0 leads, and the mean of all gradients is its contribution.

    step t:  bucket by bucket, last layers first ──► sum of all processes', in process 0 ──► mean ──► its engine's step
             and then the parameters, to the other processes

The step of process 0 is that of any trainer, whatever the strategy and the mode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ps_protocol.plan import make_ring_plan

from ...client.pserver_group import DeclaredRun
from ...client.round_results import Outcomes
from ...session.host import Host
from ...session.session import Session
from ..engine import StepEngine, StepGradients, StepProgress
from ..local_steps import LocalSteps
from ..model_tensors import TrainedModel
from .buffers import BroadcastBuffer, FlatBucket, FlatGradients


class HostLeader:
    """The engine of process 0: it sums the gradients of its host, and steps with another engine."""

    def __init__(
        self, session: Session, host: Host, model: TrainedModel, device: torch.device, engine: StepEngine
    ) -> None:
        """Send the values that the run begins with to the host's other processes. Blocks for them."""
        self.progress = engine.progress
        self._host = host
        self._client = session.client
        self._engine = engine
        self._names = list(model.parameters)
        self._num_handed_on = 0  # buckets of the next step, whose mean is on its way already
        bucket_bytes = self._client.settings.chosen_bucket_bytes
        host.send(
            "started",
            round=self.progress.version,
            nonfinite=self._client.run.nonfinite,
            bucket_bytes=bucket_bytes,
            outcomes=self._client.results.outcomes,
            grad_norm=None,
        )
        host.open_group(device)
        self._send_values(BroadcastBuffer({**model.pulled, **model.stored}, device))
        self._values = BroadcastBuffer(model.pulled, device)
        self._gradients = FlatGradients(
            model.parameters, bucket_bytes, device, lambda bucket: host.collectives.reduce(bucket.flat)
        )

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`."""
        self._engine.follow_parameters()

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The values of this process count for the host."""
        self._engine.replace_values(names)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Implement `StepEngine.add_gradient`. Buckets that all processes have reduced are passed on to the run."""
        self._gradients.add(name, gradient)
        while self._host.collectives.has_ended(self._num_handed_on):
            bucket = self._gradients.buckets[self._num_handed_on]
            self._num_handed_on += 1
            for filled, mean in self._mean_of(bucket).items():
                if filled in bucket.filled:
                    self._engine.add_gradient(filled, mean)

    def _mean_of(self, bucket: FlatBucket) -> dict[str, Tensor]:
        bucket.flat.mul_(1 / self._host.place.num_processes)
        return bucket.parts

    def discard_gradients(self) -> None:
        """Implement `StepEngine.discard_gradients`."""
        self._gradients.discard()
        self._engine.discard_gradients()

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Blocks for the other processes, which receive parameters or the error."""
        with self._host.reporting_failure():
            try:
                of_host = self._sum_up(contribution)
            finally:
                self._gradients.clear()
                self._num_handed_on = 0
            self._engine.step(of_host)
            self._send_result()

    def _sum_up(self, contribution: StepGradients) -> StepGradients:
        """Return the contribution of the host.

        A parameter has no gradient if no process has one. If the gradients of a process have overflowed, the host
        contributes none.
        """
        gradients = contribution.gradients
        self._gradients.check(gradients)
        self._gradients.send_rest(gradients)
        lines = self._host.receive("step", self._client.joined.round_timeout_seconds)
        self._host.finish()
        means: dict[str, Tensor] = {}
        for index, bucket in enumerate(self._gradients.buckets):
            means.update(bucket.parts if index < self._num_handed_on else self._mean_of(bucket))
        if not (contribution.is_finite and all(line["is_finite"] for line in lines)):
            return contribution._replace(gradients={}, is_finite=False)
        absent = {*self._names} - gradients.keys()
        for line in lines:
            absent.intersection_update(self._names[index] for index in line["absent"])
        return contribution._replace(gradients={name: means[name] for name in self._names if name not in absent})

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. Without `max_delay` there is nothing to wait for."""
        if not self._client.joined.consistency.max_delay:
            return False
        with self._host.reporting_failure():
            self._host.receive("synchronize", self._client.joined.round_timeout_seconds)
            is_written = self._engine.synchronize()
            self._send_result()
        return is_written

    def _send_result(self) -> None:
        self._host.send(
            "result",
            round=self.progress.version,
            begun=self.progress.begun,
            grad_norm=self._client.results.grad_norm,
            outcomes=self._client.results.outcomes,
        )
        self._send_values(self._values)

    def _send_values(self, values: BroadcastBuffer) -> None:
        values.begin_broadcast(self._host.collectives, 0, sends=True)
        self._host.finish()


class HostFollower:
    """The engine of the other processes: gradients go to process 0, and parameters come from there."""

    def __init__(
        self,
        session: Session,
        host: Host,
        model: TrainedModel,
        digests: Mapping[str, str],
        device: torch.device,
        local: LocalSteps | None,
    ) -> None:
        """Write the values that the run begins with to the parameters. Blocks until process 0 has them.

        `digests` of the model must be the same in all processes.
        """
        self._host = host
        self._client = session.client
        self._names = list(model.parameters)
        self._local = local
        self._averages = model.averages
        self.progress = StepProgress()
        host.send("model", model=digests)
        [started] = host.receive("started")
        # Only process 0 has a plan.
        self._client.begin_run(DeclaredRun(make_ring_plan([]), nonfinite=started["nonfinite"]))
        host.open_group(device)
        self._gradients = FlatGradients(
            model.parameters, started["bucket_bytes"], device, lambda bucket: host.collectives.reduce(bucket.flat)
        )
        self._receive_values(BroadcastBuffer({**model.pulled, **model.stored}, device), started)
        self.progress.begun = self.progress.version
        self._values = BroadcastBuffer(model.pulled, device)

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`. Values are copied to the parameters' current memory."""

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The values of process 0 count, and come with the next step."""
        if self._local is not None:
            self._local.begin_count()

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Implement `StepEngine.add_gradient`."""
        self._gradients.add(name, gradient)

    def discard_gradients(self) -> None:
        """Implement `StepEngine.discard_gradients`."""
        self._gradients.discard()

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Process 0 decides the hyperparameters. Raises the errors of process 0, too."""
        gradients = contribution.gradients
        self._gradients.check(gradients)
        self._gradients.send_rest(gradients)
        absent = [index for index, name in enumerate(self._names) if name not in gradients]
        self._host.send("step", absent=absent, is_finite=contribution.is_finite)
        self._host.finish_with_leader()
        self._gradients.clear()
        self.progress.begun += 1
        self._receive_result()

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. Without `max_delay` there is nothing to wait for."""
        if not self._client.joined.consistency.max_delay:
            return False
        self._host.send("synchronize")
        self._receive_result()
        return True

    def _receive_result(self) -> None:
        try:
            [result] = self._host.receive("result")
        except BaseException:
            self.progress.begun = self.progress.version  # as in process 0: the steps after a failed step fail with it
            raise
        self.progress.num_rollbacks += result["begun"] < self.progress.begun
        self.progress.begun = result["begun"]
        self._receive_values(self._values, result)

    def _receive_values(self, values: BroadcastBuffer, results: Mapping[str, Any]) -> None:
        values.begin_broadcast(self._host.collectives, 0, sends=False)
        self._host.finish()
        values.write_back()
        self._averages.write_back()
        self.progress.version = results["round"]
        self._client.adopt_results(results["round"], Outcomes(*results["outcomes"]), results["grad_norm"])
        if self._local is not None:
            self._local.begin_count()
