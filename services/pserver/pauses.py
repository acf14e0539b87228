"""The order in which contributions are taken, and pauses in which none is.

contribution, contribution, ── freeze waits ──► pause or freeze ──► one contribution ──► the next pause, …
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Pauses:
    """Spans in which a run takes no contribution and changes no members, one at a time. Lives on the event loop.

    A caller that waits for the end of a pause goes before all contributions that are held, so it waits for that pause
    and for the callers before it only. After a pause that was waited for, one contribution that is ready goes first, so
    that a stream of such pauses does not hold contributions back for ever.
    """

    def __init__(self, condition: asyncio.Condition) -> None:
        """`condition` is notified whenever `may_commit` or the result of a caller's `has_ready` may have changed."""
        self._condition = condition
        self._task: asyncio.Task[None] | None = None  # of the pause that is under way
        self._num_waiting = 0
        self._owes_turn = False  # to contributions

    @property
    def may_commit(self) -> bool:
        """Whether a contribution may be taken now."""
        return self._task is None and (self._num_waiting == 0 or self._owes_turn)

    def note_commit(self) -> None:
        """Note that a contribution has had its turn, whatever becomes of it."""
        self._owes_turn = False

    def begin_pause(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Pause for as long as `work` takes. No pause may be under way, unless this is called from within it."""

        async def pause() -> None:
            try:
                await work
            finally:
                if self._task is task:
                    self._task = None
                async with self._condition:
                    self._condition.notify_all()

        self._task = task = asyncio.create_task(pause(), name="pause")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # who waited for it may be gone
        return task

    async def wait_for_turn(self, has_ready: Callable[[], bool]) -> None:
        """Wait until no pause is under way. Contributions are held until the caller awaits something else.

        `has_ready` returns whether a held contribution could be taken if `may_commit` were true.
        """
        async with self._condition:
            self._num_waiting += 1
            try:
                await self._condition.wait_for(lambda: self._task is None and not (self._owes_turn and has_ready()))
            finally:
                self._num_waiting -= 1
                self._condition.notify_all()  # contributions go on, unless the caller begins a pause at once

    async def wait_for_turn_and_pause(
        self, has_ready: Callable[[], bool], work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Wait for a turn, and then for `work` in a pause, which ends even if the caller is cancelled."""
        await self.wait_for_turn(has_ready)
        task = self.begin_pause(work())
        self._owes_turn = True
        await asyncio.shield(task)
