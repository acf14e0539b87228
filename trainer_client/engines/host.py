"""The engine of a host with several processes: process 0 leads, and the mean of all gradients is its contribution.

    step t:  bucket by bucket, last layers first ──► sum of all processes', in process 0 ──► mean ──► its engine's step
             and then its result and the parameters, to the other processes

The step of process 0 is that of any trainer, whatever the strategy and the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

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

TakenRows: TypeAlias = dict[str, tuple[Tensor, Tensor]]


class HostEngine:
    """The engine of each process: process 0 steps with another engine, whose parameters the other processes receive."""

    def __init__(
        self,
        session: Session,
        host: Host,
        model: TrainedModel,
        device: torch.device,
        engine: StepEngine | None,
        local: LocalSteps | None,
        take_rows: Callable[[], TakenRows | None] = lambda: None,
    ) -> None:
        """Write the values that the run begins with in the processes that have no `engine`: all but process 0.

        `take_rows`: see `PserverEngine.take_rows`; by default any row may have changed.

        Blocks for all processes. `device` has the same type in all of them.
        """
        self.progress = StepProgress() if engine is None else engine.progress
        self._host = host
        self._client = session.client
        self._engine = engine
        self._local = local
        self._averages = model.averages
        facts: dict[str, Any] = {}
        if engine is not None:
            facts["nonfinite"] = self._client.run.nonfinite
            facts["bucket_bytes"] = self._client.settings.chosen_bucket_bytes
        started = self._share_result(**facts)
        if engine is None:  # only process 0 has a plan
            self._client.begin_run(DeclaredRun(make_ring_plan([]), nonfinite=started["nonfinite"]))
        host.connect_tensors(device)
        place, host_memory = host.place, torch.device("cpu")
        dense = {name: each for name, each in model.parameters.items() if name not in model.sparse}
        self._sparse = {name: model.parameters[name] for name in model.sparse}
        self._buckets = cut_buckets(dense, started["bucket_bytes"], device)
        self._tally = TallyVector(list(model.parameters), place.process, place.num_processes, host_memory)
        self._take_rows = take_rows
        self._has_written = False  # the script has, in this process
        self._values = BroadcastBuffer({**dense, **model.averages.means}, device)
        self._all_values = BroadcastBuffer(model.pulled, device) if model.sparse else self._values
        self._broadcast(BroadcastBuffer({**model.pulled, **model.stored}, device), started)

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`. Values are copied to the parameters' current memory."""
        if self._engine is not None:
            self._engine.follow_parameters()

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The values of process 0 count, and come with the next step."""
        if self._engine is not None:
            self._engine.replace_values(names)
        elif self._local is not None:
            self._local.begin_count()
        self._has_written = True

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Blocks for all processes, which raise the errors of process 0.

        Process 0 decides the hyperparameters. A parameter has no gradient if no process has one. If the gradients of a
        process have overflowed, the host contributes none.
        """
        tally, rows = self._sum_up(contribution)
        if self._engine is not None:
            gradients = {} if tally.nonfinite else self._take_means(tally, rows)
            with self._host.reporting_failure():
                self._engine.step(contribution._replace(gradients=gradients, is_finite=not tally.nonfinite))
        taken = self._take_rows() if tally.source is None else None  # then any value of the others may differ
        result = self._share_result(
            rows=None if taken is None else {name: len(its) for name, (its, _) in taken.items()}
        )
        if self._engine is None:
            self.progress.num_rollbacks += result["round"] <= self.progress.version
        if result["rows"] is not None:
            self._broadcast_rows(result["rows"], taken or {})
        self._broadcast(self._all_values if result["rows"] is None else self._values, result)

    def _broadcast_rows(self, counts: Mapping[str, int], taken: TakenRows) -> None:
        """Replace rows of the other processes by those that process 0 has taken."""
        received: TakenRows = {}
        for name, count in counts.items():
            dtype, (_, *width) = self._sparse[name].dtype, self._sparse[name].shape
            room = torch.empty(count, dtype=torch.int64), torch.empty((count, *width), dtype=dtype)
            indices, values = taken.get(name, room)
            received[name] = indices, values.to(dtype)
            for tensor in received[name]:
                self._host.control.broadcast(tensor)
        self._host.control.finish()
        for name, (indices, values) in received.items() if self._engine is None else ():
            parameter = self._sparse[name].detach()
            parameter.index_copy_(0, indices.to(parameter.device), values.to(parameter.device))

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. No step is ever on its way."""
        return False

    def _sum_up(self, contribution: StepGradients) -> tuple[Tally, dict[str, Tensor]]:
        """Sum the gradients of all processes in process 0; return what they have, and the sums of sparse ones."""
        for bucket in self._buckets:
            bucket.fill(contribution.gradients)
            self._host.tensors.reduce(bucket.flat)
        rows = {name: _copy_rows(contribution.gradients.get(name), its) for name, its in sorted(self._sparse.items())}
        for gradient in rows.values():
            self._host.control.all_reduce(gradient)
        has_written, self._has_written = self._has_written, False
        names, is_finite = contribution.gradients.keys(), contribution.is_finite
        self._tally.fill(names, is_finite=is_finite, has_written=has_written)
        self._host.control.all_reduce(self._tally.vector)
        self._host.control.finish()
        self._host.tensors.finish()
        return self._tally.read(), rows

    def _take_means(self, tally: Tally, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of the gradients that were summed, in process 0."""
        for bucket in self._buckets:
            bucket.flat.mul_(1 / self._host.place.num_processes)
        means = {name: part for bucket in self._buckets for name, part in bucket.parts.items()}
        means |= {
            name: _divide_rows(sums, self._host.place.num_processes, self._sparse[name]) for name, sums in rows.items()
        }
        return {name: means[name] for name in tally.present}

    def _share_result(self, **facts: Any) -> Mapping[str, Any]:
        """Return the result of the newest step in process 0, and the facts that it adds. Raises its failure."""
        if self._engine is None:
            received: Mapping[str, Any] = self._host.receive()
            return received
        results = self._client.results
        facts |= {"round": self.progress.version, "grad_norm": results.grad_norm, "skipped": [*results.skipped]}
        self._host.send(**facts)
        return facts

    def _broadcast(self, values: BroadcastBuffer, result: Mapping[str, Any]) -> None:
        """Replace these values of the other processes by those of process 0, and let them adopt its result."""
        values.broadcast(self._host.tensors, 0, sends=self._engine is not None)
        if self._engine is not None:
            return
        values.write_back()
        self._averages.write_back()
        self.progress.begun = self.progress.version = result["round"]
        self._client.adopt_results(result["round"], result["skipped"], result["grad_norm"])
        if self._local is not None:
            self._local.begin_count()


def _copy_rows(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """Return a float32 copy of a sparse gradient in host memory, without rows if there is none."""
    if gradient is not None:
        return gradient.to(torch.float32, copy=True)
    rows = torch.empty((0, *parameter.shape[1:]), dtype=torch.float32)
    indices = torch.empty((1, 0), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, rows, parameter.shape, is_coalesced=True, check_invariants=False)


def _divide_rows(sums: Tensor, number: int, parameter: Tensor) -> Tensor:
    """Return sparse sums, divided by a number, as a coalesced gradient of the parameter."""
    return (sums / number).to(parameter.dtype).coalesce()
