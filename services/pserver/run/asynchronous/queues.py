"""The queues of an asynchronous run: one with a worker for each block, and the order in which contributions enter them.

contribution, contribution, ── freeze waits ──► pause or freeze ──► one contribution ──► the next pause, …

A contribution enters all its queues together (ADR 5).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from ps_protocol.errors import Ended, GradpostError
from ps_protocol.optimizers import HyperParameters
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ...shard.shard import Shard
from ...shard.tensors import StagedBlock
from .clocks import Committed
from .staleness import PulledState

log = get_logger()


class BlockUpdate(NamedTuple):
    """One trainer's gradient for this block, the pull that it was computed on, and the hyperparameters of its step."""

    committed: Committed[StagedBlock]
    block: StagedBlock
    pull: PulledState
    hyper_parameters: list[HyperParameters]


ApplyUpdate: TypeAlias = Callable[[str, BlockUpdate], Awaitable[None]]


class Snapshot:
    """A copy of the shard that is made block by block, by a marker in all queues; `done` after the last block.

    A block is copied when every earlier update of it is applied, and no later one.
    """

    def __init__(self, shard: Shard, compute: ComputeExecutor, num_blocks: int) -> None:
        self.values = torch.empty_like(shard.values)
        self.versions: dict[str, int] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard = shard
        self._compute = compute
        self._num_blocks = num_blocks
        if num_blocks == 0:
            self.done.set_result(None)

    async def copy_block(self, name: str) -> None:
        """Copy this block, for its worker."""
        await self._compute.run(self._copy, name)
        if len(self.versions) == self._num_blocks and not self.done.done():
            self.done.set_result(None)

    def _copy(self, name: str) -> None:
        place = self._shard.layout.place[name]
        self.values[place.begin : place.end] = self._shard.values[place.begin : place.end]
        self.versions[name] = self._shard.versions[name]

    def fail(self, error: GradpostError) -> None:
        """End the wait for `done`, since a block has stopped."""
        if not self.done.done():
            self.done.set_exception(error)


class BlockQueue:
    """A bounded queue that never waits for room: the caller puts a contribution only if all its queues have room.

    `apply` runs an update; if it raises, the block stops, and `failure` has the reason.
    """

    def __init__(self, name: str, *, max_queued: int, apply: ApplyUpdate) -> None:
        self.name = name
        self.failure: GradpostError | None = None
        self.num_updates = 0  # updates that are queued or being applied
        self._queue: asyncio.Queue[BlockUpdate | Snapshot] = asyncio.Queue()
        self._max_queued = max_queued
        # The task alone refers to `apply`, which refers to the run, until it ends.
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._work(apply), name=f"block {name}")

    def __repr__(self) -> str:
        state = "stopped" if self.failure else f"{self.num_updates} of {self._max_queued} queued"
        return f"<BlockQueue {self.name} [{state}]>"

    @property
    def has_room(self) -> bool:
        """True if one more update may be put."""
        return self.num_updates < self._max_queued

    @property
    def is_working(self) -> bool:
        """True if the queued updates will be applied."""
        return self.failure is None and self._task is not None

    def put_update(self, update: BlockUpdate) -> None:
        """Queue an update, for which there is room."""
        self.num_updates += 1
        self._queue.put_nowait(update)

    def put_snapshot(self, snapshot: Snapshot) -> None:
        """Queue a snapshot, which needs no room and may have failed at another block."""
        self._queue.put_nowait(snapshot)

    def close(self) -> None:
        """End the task and drop the queued updates."""
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a cancelled task keeps its frames, and these refer to this queue

    async def _work(self, apply: ApplyUpdate) -> None:
        while self.failure is None:
            item = await self._queue.get()
            if isinstance(item, BlockUpdate):
                await self._apply_update(item, apply)
            else:
                await self._copy_block(item)
            del item  # the buffer of its body returns to the pool

    async def _copy_block(self, snapshot: Snapshot) -> None:
        try:
            await snapshot.copy_block(self.name)
        except Exception as error:  # the pull fails, not the block
            log.exception("reading a block failed", block=self.name)
            snapshot.fail(Ended(f"block {self.name!r} could not be read: {error}", code="apply_failed"))

    async def _apply_update(self, update: BlockUpdate, apply: ApplyUpdate) -> None:
        try:
            await apply(self.name, update)
        except Exception as error:
            log.exception("a block's worker failed; the block has stopped", block=self.name)
            self.failure = Ended(
                f"block {self.name!r} has stopped, because its optimizer failed: {error}", code="apply_failed"
            )
            self._drop_all(self.failure)
        self.num_updates -= 1

    def _drop_all(self, failure: GradpostError) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, BlockUpdate):
                self.num_updates -= 1
            else:
                item.fail(failure)


class HeldPushes:
    """The blocks of each complete push that waits for room in its queues, the longest waiting first."""

    def __init__(self, queues: Mapping[str, BlockQueue]) -> None:
        self.is_paused = False  # True if an administrator has paused the run
        self._queues = queues
        self._held: list[KeysView[str]] = []

    @contextmanager
    def hold(self, blocks: KeysView[str]) -> Iterator[None]:
        """Hold a push while the block runs."""
        self._held.append(blocks)
        try:
            yield
        finally:
            self._held = [other for other in self._held if other is not blocks]

    def find_full_queues(self, blocks: Iterable[str]) -> list[str]:
        """Return the blocks whose queues have no room."""
        return [name for name in blocks if not self._queues[name].has_room]

    def is_ready(self, blocks: KeysView[str]) -> bool:
        """Return whether a held push could be committed if there were no pauses.

        A push that has waited longer for one of its blocks comes first: else it would never find room in all queues.
        """
        if self.is_paused or self.find_full_queues(blocks):
            return False
        earlier = itertools.takewhile(lambda held: held is not blocks, self._held)
        return all(blocks.isdisjoint(held) for held in earlier)

    def has_ready(self) -> bool:
        """Return whether any held push could be committed if there were no pauses."""
        return any(map(self.is_ready, self._held))


class Pauses:
    """Spans in which a run commits no contribution and changes no members, one at a time. Lives on the event loop.

    A caller that waits for the end of a pause goes before all held pushes, so it waits for that pause and for the
    callers before it only. After a pause that was waited for, one ready push goes first, so that a stream of such
    pauses does not hold pushes back for ever.
    """

    def __init__(self, condition: asyncio.Condition, held: HeldPushes) -> None:
        """`condition` is notified whenever `may_commit` or `held.has_ready()` may have changed."""
        self._condition = condition
        self._held = held
        self._task: asyncio.Task[None] | None = None  # the task of the running pause
        self._num_waiting = 0
        self._owes_turn = False  # True if a ready held push goes before the next pause

    @property
    def may_commit(self) -> bool:
        """True if a contribution may be committed now."""
        return self._task is None and (self._num_waiting == 0 or self._owes_turn)

    def note_commit(self) -> None:
        """Note that a contribution has had its turn, whether it is committed or fails."""
        self._owes_turn = False

    def begin_pause(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Pause for as long as `work` takes. No pause may be running, unless this is called from within it."""

        async def pause() -> None:
            try:
                await work
            finally:
                if self._task is task:
                    self._task = None
                async with self._condition:
                    self._condition.notify_all()

        self._task = task = asyncio.create_task(pause(), name="pause")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the caller may be cancelled
        return task

    async def wait_for_turn(self) -> None:
        """Wait until no pause is running. Contributions are held until the caller awaits something else."""
        async with self._condition:
            self._num_waiting += 1
            try:
                await self._condition.wait_for(
                    lambda: self._task is None and not (self._owes_turn and self._held.has_ready())
                )
            finally:
                self._num_waiting -= 1
                self._condition.notify_all()  # contributions go on, unless the caller begins a pause at once

    async def wait_for_turn_and_pause(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for a turn, and then for `work` in a pause, which ends even if the caller is cancelled."""
        await self.wait_for_turn()
        task = self.begin_pause(work())
        self._owes_turn = True
        await asyncio.shield(task)
