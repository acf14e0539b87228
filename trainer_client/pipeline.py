"""A trainer's steps on their way: gradients out, parameters in, up to `max_delay` steps behind the computation.

    step t:  begin(t) ──push to every pserver──► pull ──► landing[t mod (k + 1)]
                                                  └─ step t may only return once step t - k has been pulled

Pushes leave in the order of the steps, and so do pulls; a push of step t + 1 and the pull of step t overlap. A step
that fails takes those behind it along: none of them is pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from ps_protocol.errors import GradpostError
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round

from .buckets import Bucket, Payload, make_buckets
from .client import ParameterClient, completion
from .differences import Differences
from .io_thread import IoThread
from .tensors import writable_bytes

END_SECONDS = 5.0  # for requests that are given up; they end at once
MAX_KEPT_LAYOUTS = 4  # which parameters have a gradient seldom changes


@dataclass
class _Acknowledged:
    """Whether every push of a step has been acknowledged, once that is known; on the I/O loop."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    succeeded: bool = False

    async def wait(self) -> bool:
        await self.event.wait()
        return self.succeeded


def _nothing_to_wait_for() -> _Acknowledged:
    acknowledged = _Acknowledged(succeeded=True)
    acknowledged.event.set()
    return acknowledged


class Pipeline:
    """All methods are called by the training thread; `wait` blocks for the network.

    Without a delay gradients are sent from where they lie, which nobody writes before `wait` has returned; else, and if
    they are something else on the wire, from copies of our own, k + 1 sets of them.
    """

    def __init__(self, client: ParameterClient, io: IoThread) -> None:
        self.max_delay = client.joined.consistency.max_delay
        self.newest: Round = 0  # that was waited for, or was found to be there already
        self._client = client
        self._io = io
        self._destinations: list[list[dict[str, memoryview]]] = []
        self._differences: list[list[Differences] | None] = []
        self._have: dict[int, list[Round]] = {}  # by landing set: the version of each shard in it, if that is known
        self._layouts: list[dict[frozenset[str], list[list[Bucket]]]] = [{} for _ in range(self.max_delay + 1)]
        self._pulls: dict[Round, Future[None]] = {}  # those that nobody has waited for
        self._pushed = _nothing_to_wait_for()  # of the newest step
        self._newest_pull: Future[None] | None = None

    def bind(self, landing: Sequence[Mapping[str, Tensor]]) -> None:
        """Say where pulls are written to: k + 1 sets of contiguous host tensors by parameter name.

        That of step t holds until step t + 1 + k begins. Nothing may be under way.
        """
        self._destinations = [
            self._client.destinations({name: writable_bytes(tensor) for name, tensor in one.items() if tensor.numel()})
            for one in landing
        ]
        self._differences = [self._client.make_differences(one) for one in self._destinations]
        self.forget_versions()

    def forget_versions(self) -> None:
        """Somebody else has written to the landing sets: pull all blocks next time. Nothing may be under way."""
        self._have.clear()

    def pull_start(self, version: Round) -> None:
        """Begin after this version: pull it into its landing set. Nothing may be under way."""
        self._give_up()
        self.forget_versions()
        slot = self.slot(version)
        versions = self._io.run(self._client.pull(version, self._destinations[slot], with_batch_barrier=False))
        if self._differences[slot] is not None:  # into memory that no script writes to, until its first step
            self._have[slot] = versions
        self.newest = version

    def begin(
        self,
        step: Round,
        gradients: Mapping[str, Tensor],
        numbers: list[HyperParameters],
        computed_on: Round,
        *,
        is_finite: bool = True,
    ) -> None:
        """Start to push flattened gradients (name -> shape (numel,)); a pull will follow.

        `is_finite` is the trainer's own verdict on them; the pservers have one each, too.
        """
        layout = self._layout(step, frozenset(gradients))
        if self.max_delay:  # nobody waits for what becomes of the step before
            self._client.feedback.settle(is_applied=True)
        is_async = self._client.joined.consistency.is_async
        before, pushed = self._pushed, _Acknowledged()
        pushes: list[Future[bool]] = []
        pushing: set[asyncio.Task[Any]] = set()
        try:
            # Bucket by bucket, so that the network works while the next one is being copied.
            for bucket, shard in _interleave(layout):
                bucket.fill(gradients, borrow=self.max_delay == 0)  # then nobody computes before it is pulled
                last = bucket is shard[-1]
                frame = bucket.frame(completion(shard, numbers, computed_on if is_async else None) if last else None)
                pushes.append(self._io.start(self._push(step, bucket, frame, before, pushing)))
        except BaseException:
            _cancel(pushes)
            raise
        self._pushed = pushed  # from here on: a step that could not begin is not waited for
        pull = self._io.start(self._pull(step, pushes, pushing, pushed, self._newest_pull, perf_counter(), is_finite))
        self._pulls[step] = self._newest_pull = pull

    async def _push(
        self, step: Round, bucket: Bucket, frame: Payload, before: _Acknowledged, pushing: set[asyncio.Task[Any]]
    ) -> bool:
        _note_task(pushing)
        if not await before.wait():
            raise GradpostError(f"step {step} was not pushed, because the one before it failed")
        return await self._client.push(step, bucket, frame)

    async def _pull(
        self,
        step: Round,
        pushes: Sequence[Future[bool]],
        pushing: set[asyncio.Task[Any]],
        pushed: _Acknowledged,
        before: Future[None] | None,
        begun: float,
        is_finite: bool,
    ) -> None:
        _note_task(self._client.unfinished)
        try:
            verdicts = await asyncio.gather(*map(asyncio.wrap_future, pushes))
            pushed.succeeded = True
        except BaseException:
            await _end(pushing)  # they read the caller's gradients, which may change once this has failed
            raise
        finally:
            pushed.event.set()
        acknowledged = perf_counter()
        if before is not None:
            await asyncio.wrap_future(before)
        is_sync = not self._client.joined.consistency.is_async
        slot = self.slot(step)
        self._have[slot] = await self._client.pull(
            step,
            self._destinations[slot],
            with_batch_barrier=is_sync,
            is_finite=is_finite and all(verdicts),
            have=self._have.pop(slot, None),  # what a failure leaves there is nothing that is known
            differences=self._differences[slot],
        )
        metrics, ended = self._client.metrics, perf_counter()
        metrics.push_seconds.observe(acknowledged - begun)
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
        except BaseException:
            self._give_up()
            raise
        return self.newest

    def slot(self, step: Round) -> int:
        """Which landing set a step is pulled into."""
        return step % len(self._destinations)

    def _give_up(self) -> None:
        _cancel(self._pulls.values())
        self._pulls.clear()
        self._newest_pull = None
        self._pushed = _nothing_to_wait_for()
        for layouts in self._layouts:  # a request that was given up may still be reading its buffer: leave it alone
            layouts.clear()

    def _layout(self, step: Round, present: frozenset[str]) -> list[list[Bucket]]:
        layouts = self._layouts[self.slot(step)]
        layout = layouts.get(present)
        if layout is None:
            if len(layouts) >= MAX_KEPT_LAYOUTS:
                layouts.clear()
            layout = layouts[present] = make_buckets(
                self._client.plan,
                present,
                bucket_bytes=self._client.settings.bucket_bytes,
                feedback=self._client.feedback,
            )
        return layout


def _interleave(layout: list[list[Bucket]]) -> list[tuple[Bucket, list[Bucket]]]:
    """Buckets in the order in which they leave: one of each pserver in turn, so that all of them are busy."""
    longest = max(map(len, layout), default=0)
    return [(shard[i], shard) for i in range(longest) for shard in layout if i < len(shard)]


def _note_task(tasks: set[asyncio.Task[Any]]) -> None:
    """Add the running task until it is done."""
    task = asyncio.current_task()
    assert task is not None
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=END_SECONDS)


def _cancel(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
