"""A trainer's steps on their way: gradients out, parameters in, up to `max_delay` steps behind the computation.

    step t:  begin(t) ──push to every pserver──► pull ──► destinations[t mod (k + 1)]
                                                  └─ step t may only return once step t - k has been pulled

Pushes leave in the order of the steps, and so do pulls; a push of step t + 1 and the pull of step t overlap. If a step
fails, all later steps fail with it, and are not pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter

import torch
from torch import Tensor

from ps_protocol.requests import Barrier
from ps_protocol.vocabulary import Round

from ..client.buckets import Bucket, make_buckets
from ..client.run_client import RunClient
from ..session.io_thread import IoThread
from ..transport.destinations import Destinations, PullProgress, ShardDestination
from ..transport.device_copies import GradientCopies, is_away
from ..transport.tensors import writable_bytes
from .engine import Contribution
from .outgoing import Outgoing, nothing_to_wait_for
from .state_transfer import StateFrames


class Pipeline:
    """The pushes and pulls of one trainer. The training thread calls all methods; `wait` blocks for the network.

    Gradients are sent from their own memory if the script computes nothing meanwhile and they have their form on the
    wire; else from k + 1 sets of copies. Pulls are written to k + 1 sets of host memory; that of step t holds until
    step t + 1 + k begins.
    """

    def __init__(
        self, client: RunClient, io: IoThread, parameters: Mapping[str, Tensor], *, by_parameter: bool
    ) -> None:
        """Prepare the sets. `by_parameter`: the script computes with complete parameters while others are missing."""
        self.max_delay = client.joined.consistency.max_delay
        self.newest: Round = 0  # that was waited for, or was found to be there already
        self._client = client
        self._io = io
        self._is_by_parameter = by_parameter
        self._destinations = Destinations(parameters, client.plan, self.max_delay, are_awaited=by_parameter)
        self._copies = GradientCopies(self.max_delay + 1)
        self._memory: list[list[ShardDestination]] = []  # by set and pserver
        self._layouts: list[_Layout | None] = [None] * (self.max_delay + 1)
        self._outgoing: Outgoing | None = None  # of a step that has not begun, and has gradients already
        self.newest_pushed: Round = 0  # the newest step of which a part may have left
        self._pulls: dict[Round, Future[None]] = {}  # not waited for yet
        self._arrivals: dict[Round, PullProgress] = {}  # of these, as long as they last
        self._pushed = nothing_to_wait_for()  # of the newest step
        self.follow_parameters()

    # ------------------------------------------------------------------ memory. Nothing may be under way.

    def follow_parameters(self) -> None:
        """Use the memory that the parameters have now."""
        self._destinations.follow_parameters()
        self._memory = [
            self._client.destinations(
                {name: writable_bytes(tensor) for name, tensor in one.items() if tensor.numel()}, keeps_values=True
            )
            for one in self._destinations.sets
        ]

    def forget_versions(self) -> None:
        """Pull all blocks the next time, because the sets were changed."""
        for destination in (one for some in self._memory for one in some):
            destination.forget_version()

    def pull_start(self, version: Round) -> None:
        """Pull `version`, from which the next step starts. Discard all steps and pulls in flight."""
        self._give_up()
        self.forget_versions()
        self._io.run(self._client.pull(version, self._memory[self._slot(version)]))
        if not self._client.plan.wire.pulls_deltas:  # into parameters, which the script may write to before its step
            self.forget_versions()
        self.newest = version

    def write_back(self, version: Round, names: Collection[str], *, is_noticed: bool) -> None:
        """Write a pulled version to these parameters; unless `is_noticed`, autograd does not see it."""
        with torch.no_grad():
            self._destinations.write_back(self._slot(version), names, is_noticed=is_noticed)

    # ------------------------------------------------------------------ gradients out

    def add(self, step: Round, name: str, gradient: Tensor) -> None:
        """Add a flat gradient of the next step. It may be sent immediately, and must not change any more."""
        if not is_away(gradient):
            self._add(step, name, gradient)
            return
        self._copies.begin_copies(step, {name: gradient})
        for arrived, host in self._copies.arrived():
            self._add(step, arrived, host)

    def _add(self, step: Round, name: str, gradient: Tensor) -> None:
        if self._outgoing is None:
            self._outgoing = self._begin_pushes(step)
        self._outgoing.add(name, gradient, self._layout(step).holding.get(name, ()))

    def discard_gradients(self) -> None:
        """Discard the gradients of a step that has not begun. Pservers keep the blocks that are staged."""
        self._copies.forget()
        self._cancel_pushes()

    def _cancel_pushes(self) -> None:
        if self._outgoing is not None:
            self._outgoing.cancel()
            # A request that was given up may still be reading its buffer: leave it alone.
            self._layouts[self._slot(self._outgoing.step)] = None
            self._outgoing = None

    def begin_step(self, step: Round, contribution: Contribution, slots: Sequence[StateFrames] | None = None) -> None:
        """Start to push all gradients, and optimizer state if there is any; a pull will follow.

        Blocks for copies from and to a device.
        """
        self._destinations.begin_step()
        gradients = self._copy_to_host(step, contribution.gradients)
        outgoing = self._outgoing = self._outgoing or self._begin_pushes(step)
        if self._client.joined.consistency.is_async:
            self._client.begin_round(step)
        try:
            outgoing.complete(gradients, contribution.completion, slots)
        except BaseException:
            self._cancel_pushes()
            raise
        self._outgoing = None
        self._pushed = outgoing.acknowledged  # from here on: a step that could not begin is not waited for
        arrivals = PullProgress(self._client.plan.blocks_of) if self._is_by_parameter else None
        pull = self._io.start(self._pull(outgoing, self._pulls.get(step - 1), contribution.is_finite, arrivals))
        if arrivals is not None:
            self._arrivals[step] = arrivals
            pull.add_done_callback(lambda _: arrivals.end())
        self._pulls[step] = pull

    def _copy_to_host(self, step: Round, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        away = {name: gradients[name] for name in reversed(list(gradients)) if is_away(gradients[name])}
        if not away:
            return gradients
        self._copies.begin_copies(step, away)
        for arrived, host in self._copies.finish():
            self._add(step, arrived, host)
        return {**gradients, **{name: self._copies.host(step, name) for name in away}}

    def _begin_pushes(self, step: Round) -> Outgoing:
        if self.max_delay:  # the outcome of the step before is not awaited
            self._client.feedback.resolve(is_applied=True)
        self.newest_pushed = step
        # Gradients stay as they are if no computation runs before the step was pulled.
        borrow = self.max_delay == 0 and not self._is_by_parameter
        return Outgoing(self._client, self._io, step, self._layout(step).shards, self._pushed, borrow=borrow)

    def _layout(self, step: Round) -> _Layout:
        slot = self._slot(step)
        layout = self._layouts[slot]
        if layout is None:
            size = self._client.settings.chosen_bucket_bytes
            shards = make_buckets(self._client.plan, bucket_bytes=size, feedback=self._client.feedback)
            layout = self._layouts[slot] = _Layout(shards)
        return layout

    # ------------------------------------------------------------------ parameters in

    async def _pull(
        self, outgoing: Outgoing, before: Future[None] | None, is_finite: bool, arrivals: PullProgress | None
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._client.unfinished.add(task)
        task.add_done_callback(self._client.unfinished.discard)
        step, is_finite_everywhere = outgoing.step, await outgoing.join()
        self._client.begin_round(step)  # from here on barriers say that pservers may count it
        acknowledged = perf_counter()
        if before is not None:
            await asyncio.wrap_future(before)
        is_async = self._client.joined.consistency.is_async
        await self._client.pull(
            step,
            self._memory[self._slot(step)],
            barrier=None if is_async else Barrier("batch", is_finite and is_finite_everywhere),
            on_block=None if arrivals is None else arrivals.mark_complete,
        )
        metrics, ended = self._client.metrics, perf_counter()
        metrics.push_seconds.observe(acknowledged - outgoing.begun)
        metrics.pull_seconds.observe(ended - acknowledged)
        metrics.rounds.inc()
        metrics.round.set(step)

    def wait(self, step: Round) -> Round:
        """Wait until this step was pulled, and return the newest pulled step. Raises the error of a failed step."""
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
        """Wait until some parameters of this step, which is the newest, are in its set. Raises the errors of `wait`."""
        if step > self.newest and not all(map(self._arrivals[step].wait, names)):
            self.wait(step)

    def _slot(self, step: Round) -> int:
        """Return the index of the set that a step is pulled into."""
        return step % (self.max_delay + 1)

    def _give_up(self) -> None:
        for pull in self._pulls.values():
            pull.cancel()
        self._pulls.clear()
        self._arrivals.clear()
        self._pushed = nothing_to_wait_for()
        self.discard_gradients()
        self._layouts = [None] * len(self._layouts)  # see `_cancel_pushes`


class _Layout:
    """Buckets of each pserver, and those that hold blocks of a parameter, by its name."""

    def __init__(self, shards: list[list[Bucket]]) -> None:
        self.shards = shards
        self.holding: dict[str, list[Bucket]] = {}
        for bucket in (bucket for shard in shards for bucket in shard):
            for name in bucket.parameters:
                self.holding.setdefault(name, []).append(bucket)
