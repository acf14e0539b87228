"""The gradients of one step on their way out: full buckets are sent early, the others at the end.

The last bucket of each pserver is kept for the end, because its frame describes the whole contribution and the
hyperparameters, which are known only in `step()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from torch import Tensor

from ps_protocol.errors import GradpostError
from ps_protocol.requests import Completion
from ps_protocol.vocabulary import PserverIndex, Round

from ..client.buckets import Bucket, FrameParts, PushBuckets, describe_push
from ..client.pserver_group import PserverGroup
from ..session.io_thread import IoThread, end_tasks
from .state_transfer import StateFrames

SMALL_BYTES = 64 * 1024  # of a frame that is sent sooner than another thread is woken for it


class Outgoing:
    """One step's pushes. `join` runs on the I/O loop; all else is called by one thread at a time.

    With `borrow` gradients are sent from their own memory, and must not change until the step was pulled.
    """

    def __init__(
        self,
        pservers: PserverGroup,
        io: IoThread,
        step: Round,
        buckets: PushBuckets,
        previous_pushes: asyncio.Future[bool] | None,
        *,
        borrow: bool,
    ) -> None:
        """Push nothing yet. All pushes wait for `previous_pushes`, those of the step before."""
        self.step = step
        self.begun = perf_counter()
        self.pushes_done: asyncio.Future[bool] = io.loop.create_future()  # True if all pushes have succeeded
        self._pservers = pservers
        self._io = io
        self._buckets = buckets
        self._previous_pushes = previous_pushes
        self._borrow = borrow
        self._gradients: dict[str, Tensor] = {}
        self._sent_early: set[Bucket] = set()
        self._pushes: list[Future[bool]] = []
        self._small: list[tuple[PserverIndex, FrameParts]] = []  # frames that `join` pushes
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a flat gradient, which must not change any more."""
        self._gradients[name] = gradient
        for bucket in self._buckets.holding.get(name, ()):
            if bucket.parameters <= self._gradients.keys() and bucket is not self._buckets.shards[bucket.pserver][-1]:
                bucket.fill(self._gradients, borrow=self._borrow)
                self._start(bucket.pserver, bucket.frame())
                self._sent_early.add(bucket)

    def complete(
        self, gradients: Mapping[str, Tensor], completion: Completion, state_frames: Sequence[StateFrames] | None = None
    ) -> None:
        """Push the remaining buckets, without parameters that have no gradient, and the frames of optimizer state."""
        for pserver, of_pserver in enumerate(state_frames or ()):
            for frame in of_pserver.frames:
                self._push(pserver, frame)
        # Bucket by bucket, so that the network works while the next one is being copied.
        for bucket in self._buckets.in_order:
            if bucket in self._sent_early:
                continue
            bucket.fill(gradients, borrow=self._borrow)
            shard = self._buckets.shards[bucket.pserver]
            if bucket is shard[-1]:
                num_slots = state_frames[bucket.pserver].num_slots if state_frames else 0
                self._push(bucket.pserver, bucket.frame(describe_push(shard, completion, num_slots)))
            elif bucket.present:
                self._push(bucket.pserver, bucket.frame())

    def _push(self, pserver: PserverIndex, frame: FrameParts) -> None:
        if sum(map(len, frame)) <= SMALL_BYTES:
            self._small.append((pserver, frame))
        else:
            self._start(pserver, frame)

    def _start(self, pserver: PserverIndex, frame: FrameParts) -> None:
        self._pushes.append(self._io.start(self._send(pserver, frame)))

    async def _send(self, pserver: PserverIndex, frame: FrameParts) -> bool:
        note_task(self._tasks)
        if (previous := self._previous_pushes) is not None:
            if not previous.done():
                await asyncio.wait([previous])  # to await it directly would cancel it together with this task
            if not previous.result():
                raise GradpostError(f"step {self.step} was not pushed, because the step before it failed")
        return await self._pservers.push(self.step, pserver, frame)

    def take_whole(self) -> Sequence[FrameParts]:
        """Return a frame for each pserver, which the pulls carry, if each has a small one and no other; else none.

        A frame with NaN or infinity is pushed first, since all pservers must receive the same verdict on the round.
        """
        shards = self._buckets.shards
        if self._pushes or len(self._small) != len(shards) or not self._pservers.takes_whole_steps:
            return ()
        if not all(len(shard) == 1 and shard[0].is_known_finite for shard in shards):
            return ()
        frames = dict(self._small)
        self._small.clear()
        return [frames[pserver] for pserver in range(len(shards))]

    async def join(self) -> bool:
        """Push the small frames, and wait for all acknowledgements; return True if all pushes were finite.

        Raises the error of a push.
        """
        has_succeeded = False
        try:
            small = (self._send(*each) for each in self._small)
            are_finite = await asyncio.gather(*small, *map(asyncio.wrap_future, self._pushes))
            has_succeeded = True
        except BaseException:
            await end_tasks(self._tasks)  # they read the caller's gradients, which may change once this has failed
            raise
        finally:
            self.pushes_done.set_result(has_succeeded)
        return all(are_finite)

    def cancel(self) -> None:
        """Cancel the pushes, without waiting for their end."""
        for push in self._pushes:
            push.cancel()


def note_task(tasks: set[asyncio.Task[Any]]) -> None:
    """Add the running task until it is done."""
    task = asyncio.current_task()
    assert task is not None
    tasks.add(task)
    task.add_done_callback(tasks.discard)
