"""One block's queue of gradients, and the task that applies them one after another (seeds 000 and 004)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from ps_protocol.errors import Ended, GradpostError
from services.runtime.logs import get_logger

from .clocks import Committed
from .pulls import Pull
from .tensors import StagedBlock

log = get_logger()


@dataclass(frozen=True, slots=True)
class Update:
    """One trainer's gradient for this block, and what it was computed on."""

    committed: Committed[StagedBlock]
    block: StagedBlock
    pull: Pull


class Marker(Protocol):
    """Stands in the queues for a get that wants every block as it is when all that came before is applied."""

    async def reached(self, name: str) -> None:
        """Everything before the marker is applied to this block, and nothing after it until this returns."""

    def fail(self, error: GradpostError) -> None:
        """The block has stopped, so that the marker will not be reached."""


class BlockQueue:
    """Never waits for room: the caller makes sure that all queues of a contribution have some before it puts an update.

    `apply` runs an update; if it raises, the block stops, and `failure` says why.
    `changed` is called then, and whenever there is more room.
    """

    def __init__(
        self,
        name: str,
        *,
        max_queued: int,
        apply: Callable[[str, Update], Awaitable[None]],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self.name = name
        self.failure: GradpostError | None = None
        self.num_updates = 0  # that wait or are being applied
        self._queue: asyncio.Queue[Update | Marker] = asyncio.Queue()
        self._max_queued = max_queued
        self._apply = apply
        self._changed = changed
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._work(), name=f"block {name}")

    def __repr__(self) -> str:
        state = "stopped" if self.failure else f"{self.num_updates} of {self._max_queued} queued"
        return f"<BlockQueue {self.name} [{state}]>"

    @property
    def has_room(self) -> bool:
        """Whether one more update may be put."""
        return self.num_updates < self._max_queued

    @property
    def is_working(self) -> bool:
        """Whether what is queued will be applied."""
        return self.failure is None and self._task is not None

    def put_update(self, update: Update) -> None:
        """Queue an update, for which there is room."""
        self.num_updates += 1
        self._queue.put_nowait(update)

    def put_marker(self, marker: Marker) -> None:
        """Queue a marker, which needs no room: one that has failed elsewhere may still be queued."""
        self._queue.put_nowait(marker)

    def close(self) -> None:
        """End the task; what is queued is dropped."""
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a cancelled task keeps its frames, and these refer to this queue

    async def _work(self) -> None:
        while self.failure is None:
            item = await self._queue.get()
            if isinstance(item, Update):
                await self._apply_update(item)
            else:
                await self._reach(item)

    async def _reach(self, marker: Marker) -> None:
        try:
            await marker.reached(self.name)
        except Exception as error:  # the get fails, not the block
            log.exception("reading a block failed", block=self.name)
            marker.fail(Ended(f"block {self.name!r} could not be read: {error}", code="apply_failed"))

    async def _apply_update(self, update: Update) -> None:
        try:
            await self._apply(self.name, update)
        except Exception as error:
            log.exception("a block's worker failed; the block has stopped", block=self.name)
            self.failure = Ended(
                f"block {self.name!r} has stopped, because its optimizer failed: {error}", code="apply_failed"
            )
            self._drop_all(self.failure)
        self.num_updates -= 1
        await self._changed()

    def _drop_all(self, failure: GradpostError) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, Update):
                self.num_updates -= 1
            else:
                item.fail(failure)
