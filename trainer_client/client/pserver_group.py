"""The pservers of a planned run: pushes and pulls of whole models, and requests to all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from ps_protocol.frames import encode_header
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import Barrier, Pull, Pulled
from ps_protocol.vocabulary import NonfinitePolicy, PserverIndex, Round

from ..transport.destinations import ShardDestination
from ..transport.tensors import flatten_checked, writable_bytes
from .buckets import FrameParts, make_buckets
from .coordinator_client import CoordinatorClient
from .error_feedback import ErrorFeedback
from .metrics import TrainerMetrics
from .news import Attempt
from .pserver_client import PserverClient
from .round_results import NormAgreement, RoundResults, finish_rounds

T = TypeVar("T")

MAX_CONCURRENT_PUSHES = 4  # per pserver; more would only queue in the connection


@dataclass(frozen=True)
class DeclaredRun:
    """The run that all trainers have declared alike, and its plan."""

    plan: SlicePlan
    start: Round = 1  # the first round that this trainer pushes for
    nonfinite: NonfinitePolicy = "reject"
    max_grad_norm: float | None = None
    rendezvous: str | None = None  # strategy ring: the address of the lowest rank


class PserverGroup:
    """All pservers of a run, as one trainer uses them. All methods but `begin_pushes` run on the I/O loop.

    Waits end with the error that ended the run (`TrainerLost`, `RoundTimeout`, …).
    """

    def __init__(
        self,
        clients: Sequence[PserverClient],
        run: DeclaredRun,
        coordinator: CoordinatorClient,
        results: RoundResults,
        metrics: TrainerMetrics,
    ) -> None:
        """Use a client for each pserver, in the order of their indices. Pulls write to `results`."""
        self.clients = clients
        self.feedback = ErrorFeedback()
        self.pushed_round: Round = 0  # the newest round of which a part may have left
        self._run = run
        self._max_delay = coordinator.joined.consistency.max_delay
        # In asynchronous modes the engine has clipped each gradient before its pushes.
        self._clips_rounds = run.max_grad_norm is not None and not coordinator.joined.consistency.is_async
        self._coordinator = coordinator
        self._results = results
        self._metrics = metrics

    def follow(self, attempt: Attempt) -> None:
        """Forget all pushes, and continue after the version that this attempt of the run began with."""
        for client in self.clients:
            client.follow(attempt)
        self.feedback.reset()
        self.pushed_round = attempt.base_round

    async def ask_all(self, ask: Callable[[PserverClient], Coroutine[Any, Any, T]]) -> list[T]:
        """Call `ask` for all pservers concurrently, and return the results in the order of their indices."""
        return await self._coordinator.guard(_gather(map(ask, self.clients)))

    # ------------------------------------------------------------------ pushes

    @property
    def takes_whole_steps(self) -> bool:
        """True if a pull may carry the contribution. A clipped round needs its norm before the pull."""
        is_async = self._coordinator.joined.consistency.is_async
        return not (is_async or self._max_delay or self._clips_rounds)

    def begin_pushes(self, round_: Round) -> None:
        """Note that parts of this round leave from now on. With `max_delay` earlier pushes count as applied."""
        if self._max_delay:
            self.feedback.resolve(is_applied=True)
        self.pushed_round = round_

    async def push(self, round_: Round, pserver: PserverIndex, frame: FrameParts) -> bool:
        """Push one frame, which must not change until this returns. Return True if the pserver found it finite."""
        return (await self._coordinator.guard(self.clients[pserver].push(round_, frame))).finite

    async def push_all(self, round_: Round, frames: Sequence[Sequence[FrameParts]], *, initial: bool = False) -> bool:
        """Push the frames of each pserver, some of them concurrently. Return True if all were found finite."""

        async def push(client: PserverClient, frame: FrameParts, limit: asyncio.Semaphore) -> bool:
            async with limit:
                return (await client.push(round_, frame, initial=initial)).finite

        limits = [asyncio.Semaphore(MAX_CONCURRENT_PUSHES) for _ in self.clients]
        pushes = (
            push(client, frame, limit)
            for client, shard_frames, limit in zip(self.clients, frames, limits, strict=True)
            for frame in shard_frames
        )
        return all(await self._coordinator.guard(_gather(pushes)))

    async def send_initial(self, values: Mapping[str, Tensor], bucket_bytes: int) -> None:
        """Upload the initial values of all parameters and buffers; only the elected uploader may."""
        plan = self._run.plan
        parameters = flatten_checked(plan, {name: values[name] for name in plan.parameter})
        frames: list[list[FrameParts]] = []
        for shard in make_buckets(plan, bucket_bytes=bucket_bytes):
            for bucket in shard:
                bucket.fill(parameters)
            frames.append([bucket.frame() for bucket in shard])
        for spec in plan.buffers:
            header = encode_header([(spec.name, spec.dtype, spec.shape)])
            data = values[spec.name].detach().to("cpu").contiguous()
            frames[spec.pserver].append((memoryview(header), writable_bytes(data)))
        await self.push_all(0, frames, initial=True)

    # ------------------------------------------------------------------ pulls

    async def pull(
        self,
        round_: Round,
        destinations: Sequence[ShardDestination],
        *,
        barrier: Barrier | None = None,
        is_partial: bool = False,
        on_block: Callable[[str], None] | None = None,
        pushed: Sequence[FrameParts] = (),
    ) -> None:
        """Wait for version `round_` of every shard, and write it to the destinations; a batch barrier may come with it.

        Blocks that have not changed since the base of their destination are left out. If `is_partial`, only blocks
        that have a destination are pulled. Without deltas `on_block` is called with the name of each complete block.
        If the run `takes_whole_steps`, each request may carry a frame of `pushed`: the contribution to its pserver.
        """
        bases = [destination.base for destination in destinations]
        for destination in destinations:
            destination.base = None  # until the pull has succeeded

        async def get(index: int, norm: AgreedNorm | None) -> Pulled:
            destination = destinations[index]
            names = tuple(destination.blocks) if is_partial else ()
            pull = Pull(round_, barrier, names, bases[index], norm)
            return await self.clients[index].get(pull, destination, on_block, pushed[index] if pushed else ())

        indices = [index for index, destination in enumerate(destinations) if destination.blocks or not is_partial]
        if not self._clips_rounds or round_ == 0:
            answers = await self._coordinator.guard(_gather(get(index, None) for index in indices))
        else:
            answers = await self._coordinator.guard(self._pull_clipped(Pull(round_, barrier), indices, get))
        for index, pulled in zip(indices, answers, strict=True):
            destinations[index].base = pulled.version
        self._note_results(round_, answers)
        if not is_partial:
            self._coordinator.note_pulled(round_)

    async def _pull_clipped(
        self,
        pull: Pull,
        indices: Sequence[PserverIndex],
        get: Callable[[PserverIndex, AgreedNorm | None], Coroutine[Any, Any, Pulled]],
    ) -> list[Pulled]:
        """Call `get` for these pservers with the norm of the gradient, which all pservers are asked for first."""

        async def ask() -> list[ShardNorm | None]:
            return await _gather(client.norm(pull) for client in self.clients)

        if pull.round == self._run.start - 1:  # its first pull; all trainers of the rounds before may have left
            await finish_rounds(self.clients, pull.round, self._max_delay)
        agreement = NormAgreement(ask)
        answers = await _gather(agreement.bring(index, partial(get, index)) for index in indices)
        self._results.grad_norm = agreement.norm
        return answers

    def _note_results(self, round_: Round, answers: Sequence[Pulled]) -> None:
        """Note the outcome of the rounds that a pull reports: applied or skipped."""
        skipped = dict(item for pulled in answers for item in pulled.skipped.items())
        if not self._max_delay and round_ >= self.pushed_round:  # else a later push is on its way
            self.feedback.resolve(is_applied=round_ not in skipped)
        if round_ in skipped:
            self._results.grad_norm = None if self._run.max_grad_norm is None else math.nan
        outcomes = self._results.outcomes
        scaler = next((pulled.scaler for pulled in answers if pulled.scaler is not None), None)
        self._results.outcomes = outcomes.advance(skipped, scaler, newest=round_, keep=2 * self._max_delay + 2)
        for skipped_round in sorted(skipped.keys() - set(outcomes.skipped)):
            self._metrics.skipped.inc()
            names = ", ".join(f"trainer {rank}" for rank in sorted(skipped[skipped_round]))
            self._coordinator.log.warning(
                f"round {skipped_round} was skipped on all pservers: NaN or infinity in gradients of {names}"
            )

    async def pull_buffers(self, memory: Mapping[str, memoryview]) -> None:
        """Fetch all buffers of the run (name -> writable bytes)."""
        buffers: dict[PserverIndex, dict[str, memoryview]] = {}
        for spec in self._run.plan.buffers:
            buffers.setdefault(spec.pserver, {})[spec.name] = memory[spec.name]
        await self._coordinator.guard(_gather(self.clients[i].get_buffers(wanted) for i, wanted in buffers.items()))


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently, and return their results. The first error cancels the rest, and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
