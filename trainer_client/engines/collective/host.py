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

from ps_protocol.errors import BadModel
from ps_protocol.plan import make_ring_plan

from ...client.pserver_group import DeclaredRun
from ...session.host import Host
from ...session.session import Session
from ..engine import StepEngine, StepGradients, StepProgress
from ..local_steps import LocalSteps
from ..model_tensors import TrainedModel
from .buffers import BroadcastBuffer, FlatBucket, FlatGradients
from .tally import Tally, TallyVector


class HostExchange:
    """The exchange of a step, in each process of a host: gradients go to process 0, and values come from there."""

    def __init__(self, host: Host, model: TrainedModel, device: torch.device, bucket_bytes: int) -> None:
        """Broadcast the values that the run begins with. `device` has the same type in all processes."""
        host.connect_tensors(device)
        place = host.place
        self.gradients = FlatGradients(
            model.parameters, bucket_bytes, device, lambda bucket: host.tensors.reduce(bucket.flat)
        )
        self._host = host
        self._tally = TallyVector(list(model.parameters), place.process, place.num_processes, torch.device("cpu"))
        self._values = BroadcastBuffer(model.pulled, device)
        self.broadcast(BroadcastBuffer({**model.pulled, **model.stored}, device))

    def sum_up(self, contribution: StepGradients) -> Tally:
        """Sum the gradients of all processes in process 0, and return what they have."""
        self.gradients.check(contribution.gradients)
        self.gradients.send_rest(contribution.gradients)
        tally = self.agree("step()", contribution)
        self._host.tensors.finish()
        return tally

    def agree(self, call: str, contribution: StepGradients) -> Tally:
        """Return the gradients that the processes have. Raises BadModel if another one does not make the same call."""
        self._tally.fill(contribution.gradients.keys(), is_finite=contribution.is_finite, terms=call)
        self._host.control.all_reduce(self._tally.vector)
        self._host.control.finish()
        tally = self._tally.read()
        if not tally.has_same_terms:
            self._host.tensors.close()
            raise BadModel(
                f"another process of this host has not called {call} of its optimizer, but another method. All "
                "processes make the same calls in the same order"
            )
        return tally

    def broadcast(self, values: BroadcastBuffer | None = None) -> None:
        """Replace the pulled values of this process, or these, by those of process 0."""
        values, sends = values or self._values, self._host.is_leader
        values.begin_broadcast(self._host.tensors, 0, sends=sends)
        self._host.tensors.finish()
        if not sends:
            values.write_back()


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
        self._num_handed_on = 0  # buckets of the next step, whose mean is on its way already
        bucket_bytes = self._client.settings.chosen_bucket_bytes
        host.send(nonfinite=self._client.run.nonfinite, bucket_bytes=bucket_bytes, **self._result())
        self._exchange = HostExchange(host, model, device, bucket_bytes)

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`."""
        self._engine.follow_parameters()

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The values of this process count for the host."""
        self._engine.replace_values(names)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Implement `StepEngine.add_gradient`. Buckets that all processes have reduced are passed on to the run."""
        gradients = self._exchange.gradients
        gradients.add(name, gradient)
        while self._host.tensors.has_ended(self._num_handed_on):
            bucket = gradients.buckets[self._num_handed_on]
            self._num_handed_on += 1
            for filled, mean in self._mean_of(bucket).items():
                if filled in bucket.filled:
                    self._engine.add_gradient(filled, mean)

    def _mean_of(self, bucket: FlatBucket) -> dict[str, Tensor]:
        bucket.flat.mul_(1 / self._host.place.num_processes)
        return bucket.parts

    def discard_gradients(self) -> None:
        """Implement `StepEngine.discard_gradients`."""
        self._exchange.gradients.discard()
        self._engine.discard_gradients()

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Blocks for the other processes, which receive parameters or the error."""
        try:
            of_host = self._sum_up(contribution)
        finally:
            self._exchange.gradients.clear()
            self._num_handed_on = 0
        with self._host.reporting_failure():
            self._engine.step(of_host)
        self._send_result()

    def _sum_up(self, contribution: StepGradients) -> StepGradients:
        """Return the contribution of the host.

        A parameter has no gradient if no process has one. If the gradients of a process have overflowed, the host
        contributes none.
        """
        tally = self._exchange.sum_up(contribution)
        means: dict[str, Tensor] = {}
        for index, bucket in enumerate(self._exchange.gradients.buckets):
            means.update(bucket.parts if index < self._num_handed_on else self._mean_of(bucket))
        if tally.nonfinite:
            return contribution._replace(gradients={}, is_finite=False)
        return contribution._replace(gradients={name: means[name] for name in tally.present})

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. Without `max_delay` there is nothing to wait for."""
        if not self._client.joined.consistency.max_delay:
            return False
        self._exchange.agree("synchronize()", StepGradients({}))
        with self._host.reporting_failure():
            is_written = self._engine.synchronize()
        self._send_result()
        return is_written

    def _send_result(self) -> None:
        self._host.send(**self._result())
        self._exchange.broadcast()

    def _result(self) -> dict[str, Any]:
        results = self._client.results
        return {
            "round": self.progress.version,
            "begun": self.progress.begun,
            "grad_norm": results.grad_norm,
            "skipped": [*results.skipped],
        }


class HostFollower:
    """The engine of the other processes: gradients go to process 0, and parameters come from there."""

    def __init__(
        self, session: Session, host: Host, model: TrainedModel, device: torch.device, local: LocalSteps | None
    ) -> None:
        """Write the values that the run begins with to the parameters. Blocks until process 0 has them."""
        self._host = host
        self._client = session.client
        self._local = local
        self._averages = model.averages
        started = host.receive()
        self.progress = StepProgress(begun=started["begun"])
        # Only process 0 has a plan.
        self._client.begin_run(DeclaredRun(make_ring_plan([]), nonfinite=started["nonfinite"]))
        self._exchange = HostExchange(host, model, device, started["bucket_bytes"])
        self._adopt(started)

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`. Values are copied to the parameters' current memory."""

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The values of process 0 count, and come with the next step."""
        if self._local is not None:
            self._local.begin_count()

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Implement `StepEngine.add_gradient`."""
        self._exchange.gradients.add(name, gradient)

    def discard_gradients(self) -> None:
        """Implement `StepEngine.discard_gradients`."""
        self._exchange.gradients.discard()

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Process 0 decides the hyperparameters. Raises the errors of process 0, too."""
        try:
            self._exchange.sum_up(contribution)
        finally:
            self._exchange.gradients.clear()
        self.progress.begun += 1
        self._receive_result()

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. Without `max_delay` there is nothing to wait for."""
        if not self._client.joined.consistency.max_delay:
            return False
        self._exchange.agree("synchronize()", StepGradients({}))
        self._receive_result()
        return True

    def _receive_result(self) -> None:
        try:
            result = self._host.receive()
        except BaseException:
            self.progress.begun = self.progress.version  # as in process 0: the steps after a failed step fail with it
            raise
        self.progress.num_rollbacks += result["begun"] < self.progress.begun
        self.progress.begun = result["begun"]
        self._exchange.broadcast()
        self._adopt(result)

    def _adopt(self, result: Mapping[str, Any]) -> None:
        self._averages.write_back()
        self.progress.version = result["round"]
        self._client.adopt_results(result["round"], result["skipped"], result["grad_norm"])
        if self._local is not None:
            self._local.begin_count()
