"""The gradients of one step on their way out: full buckets are sent early, the others at the end.

The last bucket of each pserver is kept for the end, because its frame describes the whole contribution and the
hyperparameters, which are known only in `step()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from time import perf_counter

from torch import Tensor

from ps_protocol.errors import GradpostError
from ps_protocol.requests import Completion
from ps_protocol.vocabulary import PserverIndex, Round

from ..client.buckets import Bucket, Payload, describe_push
from ..client.run_client import RunClient
from ..session.io_thread import IoThread
from .state_transfer import StateFrames

END_SECONDS = 5.0  # for requests that are given up; they end at once


@dataclass
class Acknowledged:
    """A flag on the I/O loop: every push of a step was acknowledged, or a push has failed."""

    _event: asyncio.Event = field(default_factory=asyncio.Event)
    _succeeded: bool = False

    def resolve(self, *, succeeded: bool) -> None:
        """Set the flag."""
        self._succeeded = succeeded
        self._event.set()

    async def wait(self) -> bool:
        """Wait until the flag is set; return True if all pushes have succeeded."""
        await self._event.wait()
        return self._succeeded


def nothing_to_wait_for() -> Acknowledged:
    """Return the flag of a step that was pushed."""
    acknowledged = Acknowledged()
    acknowledged.resolve(succeeded=True)
    return acknowledged


class Outgoing:
    """One step's pushes. `join` runs on the I/O loop; all else is called by one thread at a time.

    With `borrow` gradients are sent from their own memory, and must not change until the step was pulled.
    """

    def __init__(
        self,
        client: RunClient,
        io: IoThread,
        step: Round,
        layout: Sequence[Sequence[Bucket]],
        before: Acknowledged,
        *,
        borrow: bool,
    ) -> None:
        self.step = step
        self.begun = perf_counter()
        self.acknowledged = Acknowledged()
        self._client = client
        self._io = io
        self._layout = layout
        self._before = before
        self._borrow = borrow
        self._gradients: dict[str, Tensor] = {}
        self._left: set[int] = set()  # identities of buckets
        self._pushes: list[Future[bool]] = []
        self._tasks: list[asyncio.Task[bool]] = []  # the same on the I/O loop, once they have begun

    def add(self, name: str, gradient: Tensor, buckets: Sequence[Bucket]) -> None:
        """Add a flat gradient, which must not change any more. `buckets` are those that its blocks are in."""
        self._gradients[name] = gradient
        for bucket in buckets:
            if bucket.parameters <= self._gradients.keys() and bucket is not self._layout[bucket.pserver][-1]:
                bucket.fill(self._gradients, borrow=self._borrow)
                self._push(bucket, bucket.frame())

    def complete(
        self,
        gradients: Mapping[str, Tensor],
        completion: Completion,
        slots: Sequence[StateFrames] | None = None,
    ) -> None:
        """Push the remaining buckets, without parameters that have no gradient. `slots` are pushed, too."""
        for pserver, one in enumerate(slots or ()):
            for frame in one.frames:
                self._pushes.append(self._io.start(self._send(pserver, frame)))
        # Bucket by bucket, so that the network works while the next one is being copied; one of each pserver in turn.
        for bucket in chain.from_iterable(zip_longest(*self._layout)):
            if bucket is None or id(bucket) in self._left:
                continue
            bucket.fill(gradients, borrow=self._borrow)
            shard = self._layout[bucket.pserver]
            if bucket is shard[-1]:
                num_slots = slots[bucket.pserver].num_slots if slots else 0
                self._push(bucket, bucket.frame(describe_push(shard, completion, num_slots)))
            elif bucket.present:
                self._push(bucket, bucket.frame())

    def _push(self, bucket: Bucket, frame: Payload) -> None:
        self._left.add(id(bucket))
        self._pushes.append(self._io.start(self._send(bucket.pserver, frame)))

    async def _send(self, pserver: PserverIndex, frame: Payload) -> bool:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        if not await self._before.wait():
            raise GradpostError(f"step {self.step} was not pushed, because the step before it failed")
        return await self._client.push(self.step, pserver, frame)

    async def join(self) -> bool:
        """Wait for all acknowledgements; return True if all pushes were finite. Raises the error of a push.

        Called by a task that was started after all pushes, so that they have begun.
        """
        succeeded = False
        try:
            verdicts = await asyncio.gather(*self._tasks)
            succeeded = True
        except BaseException:
            for task in self._tasks:
                task.cancel()
            # They read the caller's gradients, which may change once this has failed.
            await asyncio.wait(self._tasks, timeout=END_SECONDS)
            raise
        finally:
            self.acknowledged.resolve(succeeded=succeeded)
        return all(verdicts)

    def cancel(self) -> None:
        """Cancel the pushes, without waiting for their end."""
        for push in self._pushes:
            push.cancel()
