"""The public asynchronous client: whole parameters by name, on top of the client of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES
from ps_protocol.errors import GradpostError
from ps_protocol.optimizers import HyperParameters
from ps_protocol.requests import Barrier, Completion
from ps_protocol.vocabulary import Round

from ..transport.destinations import make_shard_destinations
from ..transport.tensors import flatten_checked, writable_bytes
from .arguments import TrainerArguments
from .buckets import describe_push, make_buckets
from .run_client import RunClient
from .settings import show_arguments


class ParameterClient(RunClient):
    """Joins a run and exchanges whole parameters with its pservers, by name.

    For use in `async` code that wants the parameter server without `RemoteOptimizer`; every method runs on the loop
    that `join` was awaited on. Tensors are copied on the way out, so the caller keeps its own. A round is

        await client.send(r, gradients, hyper_parameters)  # blocks of every gradient, to their pservers
        await client.batch_barrier(r)                      # after every pserver acknowledged every push
        values = await client.get(r)                       # waits until the gradients of all trainers are applied
        await client.fetch_barrier(r)

    Every method raises the error that ended the run (`TrainerLost`, `RoundTimeout`, …) instead of waiting forever.
    """

    @show_arguments
    def __init__(self, coordinator: str | None = None, **arguments: Unpack[TrainerArguments]) -> None:
        """Read the settings: `arguments` are fields of `TrainerSettings`; for None, `GRADPOST_*` is read."""
        super().__init__(coordinator, **arguments)
        self._is_finite = True  # the gradient that was sent last

    async def __aenter__(self) -> ParameterClient:
        await self.join()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        code = error.code if isinstance(error, GradpostError) else None
        await self.leave("done" if error is None else "failed", "" if error is None else repr(error), code)

    async def send_initial(self, values: Mapping[str, Tensor]) -> None:
        """Upload the initial values of all parameters and buffers; only the elected uploader may."""
        await self.pservers.send_initial(values, self.settings.chosen_bucket_bytes)

    async def send(
        self, round_: Round, gradients: Mapping[str, Tensor], hyper_parameters: list[HyperParameters]
    ) -> None:
        """Push the gradients of one round (parameter name -> tensor of its shape and dtype), block by block.

        A parameter that is left out has no gradient in this round. Returns when every pserver has acknowledged every
        push; the batch barrier may follow. In asynchronous modes that completes the step.
        """
        pservers, plan = self.pservers, self.run.plan
        flat = flatten_checked(plan, gradients)
        pservers.begin_pushes(round_)
        is_async = self.joined.consistency.is_async
        completion = Completion(0, hyper_parameters, self.coordinator.round if is_async else None)
        frames = []
        size = self.settings.chosen_bucket_bytes
        for shard in make_buckets(plan, bucket_bytes=size, feedback=pservers.feedback):
            for bucket in shard:
                bucket.fill(flat)
            last = shard[-1].frame(describe_push(shard, completion))
            frames.append([bucket.frame() for bucket in shard[:-1] if bucket.present] + [last])
        self.coordinator.counted_round = round_
        self._is_finite = await pservers.push_all(round_, frames)
        if is_async:
            self.coordinator.counted_round = 0

    async def batch_barrier(self, round_: Round) -> None:
        """Report to every pserver that this trainer's contribution is complete. Asynchronous modes have no barrier."""
        if not self.joined.consistency.is_async:
            barrier = Barrier("batch", self._is_finite)
            await self.pservers.ask_all(lambda pserver: pserver.barrier(round_, barrier))

    async def get(self, round_: Round, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Wait for version `round_` and return parameters by name, newly allocated; all of them without `names`."""
        plan = self.run.plan
        specs = [plan.parameter[name] for name in (plan.parameter if names is None else names)]
        values = {
            spec.name: torch.empty(spec.shape, dtype=TORCH_DTYPES[plan.pulled(spec.name)], device="cpu")
            for spec in specs
        }
        memory = {name: writable_bytes(tensor) for name, tensor in values.items()}
        await self.pservers.pull(round_, make_shard_destinations(plan, memory), is_partial=names is not None)
        return {spec.name: values[spec.name].to(TORCH_DTYPES[spec.dtype]) for spec in specs}

    async def fetch_barrier(self, round_: Round) -> None:
        """Report to every pserver that this version was read; any message for a later round implies it.

        Asynchronous modes have no barrier.
        """
        if not self.joined.consistency.is_async:
            await self.pservers.ask_all(lambda pserver: pserver.barrier(round_, Barrier("fetch")))
            self.coordinator.note_pulled(round_)
