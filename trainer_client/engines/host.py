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

from ..client.pserver_group import DeclaredRun
from ..session.collectives import BroadcastBuffer, Tally, TallyVector, cut_buckets
from ..session.host import Host
from ..session.session import Session
from .engine import StepEngine, StepGradients, StepProgress
from .model_tensors import TrainedModel
from .script_optimizers import LocalSteps


class HostExchange:
    """The exchange of a step, in each process of a host: gradients go to process 0, and values come from there."""

    def __init__(self, host: Host, model: TrainedModel, device: torch.device, bucket_bytes: int) -> None:
        """Broadcast the values that the run begins with. `device` has the same type in all processes."""
        host.connect_tensors(device)
        place = host.place
        self._host = host
        self._buckets = cut_buckets(model.parameters, bucket_bytes, device)
        self._tally = TallyVector(list(model.parameters), place.process, place.num_processes, torch.device("cpu"))
        self._values = BroadcastBuffer(model.pulled, device)
        self.broadcast(BroadcastBuffer({**model.pulled, **model.stored}, device))

    def sum_up(self, contribution: StepGradients) -> Tally:
        """Sum the gradients of all processes in process 0, and return what they have. Blocks for all processes."""
        for bucket in self._buckets:
            bucket.fill(contribution.gradients)
            self._host.tensors.reduce(bucket.flat)
        self._tally.fill(contribution.gradients.keys(), is_finite=contribution.is_finite)
        self._host.control.all_reduce(self._tally.vector)
        self._host.control.finish()
        self._host.tensors.finish()
        return self._tally.read()

    def means(self) -> dict[str, Tensor]:
        """Return the means of the gradients that were summed, in process 0."""
        for bucket in self._buckets:
            bucket.flat.mul_(1 / self._host.place.num_processes)
        return {name: part for bucket in self._buckets for name, part in bucket.parts.items()}

    def broadcast(self, values: BroadcastBuffer | None = None) -> None:
        """Replace the pulled values of this process, or these, by those of process 0."""
        values, sends = values or self._values, self._host.is_leader
        values.broadcast(self._host.tensors, 0, sends=sends)
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
        bucket_bytes = self._client.settings.chosen_bucket_bytes
        host.send(nonfinite=self._client.run.nonfinite, bucket_bytes=bucket_bytes, **self._result())
        self._exchange = HostExchange(host, model, device, bucket_bytes)

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`."""
        self._engine.follow_parameters()

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The values of this process count for the host."""
        self._engine.replace_values(names)

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Blocks for the other processes, which receive parameters or the error.

        A parameter has no gradient if no process has one. If the gradients of a process have overflowed, the host
        contributes none.
        """
        tally = self._exchange.sum_up(contribution)
        means = self._exchange.means()
        gradients = {} if tally.nonfinite else {name: means[name] for name in tally.present}
        with self._host.reporting_failure():
            self._engine.step(contribution._replace(gradients=gradients, is_finite=not tally.nonfinite))
        self._host.send(**self._result())
        self._exchange.broadcast()

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. No step is ever on its way."""
        return False

    def _result(self) -> dict[str, Any]:
        results = self._client.results
        return {
            "round": self.progress.version,
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
        self.progress = StepProgress()
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

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Process 0 decides the hyperparameters. Raises the errors of process 0, too."""
        self._exchange.sum_up(contribution)
        result = self._host.receive()
        self.progress.num_rollbacks += result["round"] <= self.progress.version
        self._exchange.broadcast()
        self._adopt(result)

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. No step is ever on its way."""
        return False

    def _adopt(self, result: Mapping[str, Any]) -> None:
        self._averages.write_back()
        self.progress.begun = self.progress.version = result["round"]
        self._client.adopt_results(result["round"], result["skipped"], result["grad_norm"])
        if self._local is not None:
            self._local.begin_count()
