"""The order in which contributions are committed, and pauses in which none is.

contribution, contribution, ── freeze waits ──► pause or freeze ──► one contribution ──► the next pause, …
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from typing import Any

from .block_queue import BlockQueue


class HeldPushes:
    """The blocks of each complete push that waits for room in its queues, the longest waiting first."""

    def __init__(self, queues: Mapping[str, BlockQueue]) -> None:
        self.is_paused = False  # by an administrator
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
        self._task: asyncio.Task[None] | None = None  # of the running pause
        self._num_waiting = 0
        self._owes_turn = False  # to held pushes

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
