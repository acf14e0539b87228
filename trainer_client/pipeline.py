"""A trainer's steps on their way: gradients out, parameters in, up to `max_delay` steps behind the computation.

    step t:  begin(t) ──push to every pserver──► pull ──► landing[t mod (k + 1)]
                                                  └─ step t may only return once step t - k has been pulled

Pushes leave in the order of the steps, and so do pulls; a push of step t + 1 and the pull of step t overlap. A step
that fails takes those behind it along: none of them is pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from torch import Tensor

from ps_protocol.optimizers import HyperParameters
from ps_protocol.requests import Barrier
from ps_protocol.vocabulary import Round

from .client import RunClient
from .destinations import PullProgress, ShardDestination
from .io_thread import IoThread
from .optimizer_state.transfer import StateFrames
from .pushing.buckets import Bucket, make_buckets
from .pushing.outgoing import Outgoing, note_task, nothing_to_wait_for
from .tensors import writable_bytes


class Pipeline:
    """All methods are called by the training thread; `wait` blocks for the network.

    Gradients are sent from their own memory if the script computes nothing meanwhile and they have their form on the
    wire; else from k + 1 sets of copies.
    """

    def __init__(self, client: RunClient, io: IoThread, *, by_parameter: bool) -> None:
        """Prepare the sets. `by_parameter`: the script computes with complete parameters while others are missing."""
        self._is_by_parameter = by_parameter
        self.max_delay = client.joined.consistency.max_delay
        self.newest: Round = 0  # that was waited for, or was found to be there already
        self._client = client
        self._io = io
        self._destinations: list[list[ShardDestination]] = []  # by landing set and pserver
        self._layouts: list[_Layout | None] = [None] * (self.max_delay + 1)
        self._outgoing: Outgoing | None = None  # of a step that has not begun, and has gradients already
        self._pulls: dict[Round, Future[None]] = {}  # not waited for yet
        self._arrivals: dict[Round, PullProgress] = {}  # of these, as long as they last
        self._pushed = nothing_to_wait_for()  # of the newest step
        self._newest_pull: Future[None] | None = None

    def bind(self, landing: Sequence[Mapping[str, Tensor]]) -> None:
        """Say where pulls are written to: k + 1 sets of contiguous host tensors by parameter name.

        That of step t holds until step t + 1 + k begins. Nothing may be under way.
        """
        self._destinations = [
            self._client.destinations(
                {name: writable_bytes(tensor) for name, tensor in one.items() if tensor.numel()}, keeps_values=True
            )
            for one in landing
        ]

    def forget_versions(self) -> None:
        """Pull all blocks the next time, because the sets were changed. Nothing may be under way."""
        for destination in (one for some in self._destinations for one in some):
            destination.version = None

    def pull_start(self, version: Round) -> None:
        """Begin after this version: pull it into its landing set. Nothing may be under way."""
        self._give_up()
        self.forget_versions()
        self._io.run(self._client.pull(version, self._destinations[self.slot(version)]))
        if not self._client.plan.wire.pulls_deltas:  # into parameters, which the script may write to before its step
            self.forget_versions()
        self.newest = version

    def begin(
        self,
        step: Round,
        gradients: Mapping[str, Tensor],
        numbers: list[HyperParameters],
        computed_on: Round,
        *,
        is_finite: bool = True,
        slots: Sequence[StateFrames] | None = None,
    ) -> None:
        """Start to push flattened gradients (name -> shape (numel,)), and slots if there are any; a pull will follow.

        `is_finite` is the trainer's own verdict on them; the pservers have one each, too.
        """
        outgoing = self._outgoing = self._outgoing or self._begin_pushes(step)
        is_async = self._client.joined.consistency.is_async
        if is_async:
            self._client.begin_round(step)
        try:
            outgoing.complete(gradients, numbers, computed_on if is_async else None, slots)
        except BaseException:
            self.forget_gradients()
            raise
        self._outgoing = None
        self._pushed = outgoing.acknowledged  # from here on: a step that could not begin is not waited for
        arrivals = PullProgress(self._client.plan.blocks_of) if self._is_by_parameter else None
        pull = self._io.start(self._pull(outgoing, self._newest_pull, is_finite, arrivals))
        if arrivals is not None:
            self._arrivals[step] = arrivals
            pull.add_done_callback(lambda _: arrivals.end())
        self._pulls[step] = self._newest_pull = pull

    def add(self, step: Round, name: str, gradient: Tensor) -> None:
        """Take a flat gradient of the step that will begin next; it may leave at once, and must not change any more."""
        if self._outgoing is None:
            self._outgoing = self._begin_pushes(step)
        self._outgoing.add(name, gradient, self._layout(step).holding.get(name, ()))

    def forget_gradients(self) -> None:
        """Give up what was pushed of a step that has not begun; what is staged already stays."""
        if self._outgoing is not None:
            self._outgoing.cancel()
            # A request that was given up may still be reading its buffer: leave it alone.
            self._layouts[self.slot(self._outgoing.step)] = None
            self._outgoing = None

    @property
    def _borrows(self) -> bool:
        """True if no computation runs before a step was pulled, so that its gradients stay as they are."""
        return self.max_delay == 0 and not self._is_by_parameter

    def _begin_pushes(self, step: Round) -> Outgoing:
        if self.max_delay:  # the outcome of the step before is not awaited
            self._client.feedback.resolve(is_applied=True)
        shards = self._layout(step).shards
        return Outgoing(self._client, self._io, step, shards, self._pushed, borrow=self._borrows)

    async def _pull(
        self, outgoing: Outgoing, before: Future[None] | None, is_finite: bool, arrivals: PullProgress | None
    ) -> None:
        note_task(self._client.unfinished)
        step, is_finite_everywhere = outgoing.step, await outgoing.join()
        self._client.begin_round(step)  # from here on barriers say that pservers may count it
        acknowledged = perf_counter()
        if before is not None:
            await asyncio.wrap_future(before)
        is_async = self._client.joined.consistency.is_async
        await self._client.pull(
            step,
            self._destinations[self.slot(step)],
            barrier=None if is_async else Barrier("batch", is_finite and is_finite_everywhere),
            on_block=None if arrivals is None else arrivals.mark_complete,
        )
        metrics, ended = self._client.metrics, perf_counter()
        metrics.push_seconds.observe(acknowledged - outgoing.begun)
        metrics.pull_seconds.observe(ended - acknowledged)
        metrics.rounds.inc()
        metrics.round.set(step)

    def wait(self, step: Round) -> Round:
        """Wait until this step has been pulled; returns the newest one that has. Raises what went wrong."""
        try:
            while (pull := self._pulls.get(self.newest + 1)) is not None and (self.newest < step or pull.done()):
                self._io.wait(pull)
                self.newest += 1
                del self._pulls[self.newest]
                self._arrivals.pop(self.newest, None)
        except BaseException:
            self._give_up()
            raise
        return self.newest

    def wait_for(self, step: Round, names: Collection[str]) -> None:
        """Wait until some parameters of this step, which is the newest, are in its landing set. Raises as `wait`."""
        if step > self.newest and not all(map(self._arrivals[step].wait, names)):
            self.wait(step)

    def slot(self, step: Round) -> int:
        """Which landing set a step is pulled into."""
        return step % len(self._destinations)

    def _give_up(self) -> None:
        _cancel(self._pulls.values())
        self._pulls.clear()
        self._arrivals.clear()
        self._newest_pull = None
        self._pushed = nothing_to_wait_for()
        self.forget_gradients()
        self._layouts = [None] * len(self._layouts)  # see there

    def _layout(self, step: Round) -> _Layout:
        layout = self._layouts[self.slot(step)]
        if layout is None:
            settings = self._client.settings
            shards = make_buckets(
                self._client.plan, bucket_bytes=settings.chosen_bucket_bytes, feedback=self._client.feedback
            )
            layout = self._layouts[self.slot(step)] = _Layout(shards)
        return layout


class _Layout:
    """Buckets of each pserver, and those that hold blocks of a parameter, by its name."""

    def __init__(self, shards: list[list[Bucket]]) -> None:
        self.shards = shards
        self.holding: dict[str, list[Bucket]] = {}
        for bucket in (bucket for shard in shards for bucket in shard):
            for name in bucket.parameters:
                self.holding.setdefault(name, []).append(bucket)


def _cancel(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
