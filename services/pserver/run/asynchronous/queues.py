"""The queues of an asynchronous run: one with a worker for each block.

A contribution enters all its queues together (ADR 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

from ps_protocol.errors import Ended, GradpostError
from ps_protocol.optimizers import HyperParameters
from services.runtime.logs import get_logger

from ...shard.tensors import StagedBlock
from .clocks import Committed
from .pulls import PulledState

log = get_logger()


class BlockUpdate(NamedTuple):
    """One trainer's gradient for this block, the pull that it was computed on, and the hyperparameters of its step."""

    committed: Committed[StagedBlock]
    block: StagedBlock
    pull: PulledState
    hyper_parameters: list[HyperParameters]


ApplyUpdate: TypeAlias = Callable[[str, BlockUpdate], Awaitable[None]]


class BlockQueue:
    """A bounded queue that never waits for room: the caller puts a contribution only if all its queues have room.

    `apply` runs an update; if it raises, the block stops, and `failure` has the reason.
    """

    def __init__(self, name: str, *, max_queued: int, apply: ApplyUpdate) -> None:
        self.name = name
        self.failure: GradpostError | None = None
        self.num_updates = 0  # updates that are queued or being applied
        self._queue: asyncio.Queue[BlockUpdate] = asyncio.Queue()
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

    def close(self) -> None:
        """End the task and drop the queued updates."""
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a cancelled task keeps its frames, and these refer to this queue

    async def _work(self, apply: ApplyUpdate) -> None:
        while self.failure is None:
            update = await self._queue.get()
            await self._apply_update(update, apply)
            del update  # the buffer of its body returns to the pool

    async def _apply_update(self, update: BlockUpdate, apply: ApplyUpdate) -> None:
        try:
            await apply(self.name, update)
        except Exception as error:
            log.exception("a block's worker failed; the block has stopped", block=self.name)
            self.failure = Ended(
                f"block {self.name!r} has stopped, because its optimizer failed: {error}", code="apply_failed"
            )
            while not self._queue.empty():
                self._queue.get_nowait()
                self.num_updates -= 1
        self.num_updates -= 1
