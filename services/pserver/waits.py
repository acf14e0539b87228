"""The waits of requests for trainers, their limit, and waits for several events."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ps_protocol.errors import RoundPending, RoundTimeout, TryAgain
from ps_protocol.vocabulary import Rank, Round
from services.runtime.gate import current_request, end_request

T = TypeVar("T")

MAX_WAITING_PULLS = 16  # for one trainer, which needs one pull for each step in flight


@dataclass(frozen=True, slots=True)
class Wait:
    """The reason why a request waits. Without `since` the wait has no time-out for now."""

    what: str  # the object of the wait, such as a round
    cause: str  # the reason why it is not there yet
    missing: Sequence[Rank] = ()  # the trainers among the causes
    owed: str = ""  # the action that the missing trainers, or the coordinator, have not done yet
    since: float | None = None  # when waiting began, by the loop's clock
    facts: Mapping[str, Any] = field(default_factory=dict)  # the facts of the errors that end the wait


def name_trainers(ranks: Sequence[Rank]) -> str:
    """Return `trainer 1` or `trainers 1, 3`."""
    return f"trainer{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


class Waits:
    """The waiting requests of one run. A change of the run notifies all of them."""

    def __init__(self, patience_seconds: float) -> None:
        self.condition = asyncio.Condition()
        self.since: float | None = None  # when requests began to wait for the initial values or the open round
        self.notice = ""  # the notice of the coordinator about lost trainers
        self._patience_seconds = patience_seconds
        self._awaited: dict[asyncio.Future[None], Round] = {}  # the rounds after which the shard is to be read

    def begin(self) -> float:
        """Return the time since which requests wait: from now on, unless one waits already."""
        if self.since is None:
            self.since = asyncio.get_running_loop().time()
        return self.since

    async def notify(self) -> None:
        """Make every waiting request check its condition again."""
        async with self.condition:
            self.condition.notify_all()

    async def wait_for_round(self, round_: Round, seconds: float) -> None:
        """Wait until `note_round` names this round, or a later one. Raises TimeoutError."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited[reached] = round_
        try:
            async with asyncio.timeout(seconds):
                await reached
        finally:
            del self._awaited[reached]

    def note_round(self, round_: float) -> None:
        """End the waits for this round, or an earlier one."""
        for reached, awaited in self._awaited.items():
            if awaited <= round_ and not reached.done():
                reached.set_result(None)

    async def wait_for(self, wait_seconds: float, find: Callable[[], T | Wait]) -> T:
        """Return what `find` returns as soon as it is not a wait; an error that it raises ends the wait.

        Raises RoundPending after `wait_seconds` (the caller asks again), and RoundTimeout when trainers have been
        missing for `patience_seconds`.
        """
        deadline = asyncio.get_running_loop().time() + wait_seconds
        async with self.condition:
            while isinstance(found := find(), Wait):
                next_check = self._find_next_check(found, deadline)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(next_check):
                        await self.condition.wait()
        return found

    def _find_next_check(self, wait: Wait, deadline: float) -> float:
        """Return the time until which a request waits before its next check. Raises the error that ends its wait."""
        limit = self._patience_seconds
        timeout_at = math.inf if wait.since is None else wait.since + limit
        now = asyncio.get_running_loop().time()
        if now >= timeout_at:
            who = name_trainers(wait.missing) or "the coordinator"
            text = f"{who} did not {wait.owed} within {limit:g} s"
            raise RoundTimeout(text, missing=list(wait.missing), **wait.facts)
        if now >= deadline:
            notice = f" ({self.notice})" if self.notice else ""
            text = f"{wait.what} waits for {wait.cause}{notice}"
            raise RoundPending(text, missing=list(wait.missing), **wait.facts)
        return min(deadline, timeout_at)


async def wait_for_any(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of these is set, up to `seconds`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def run_until(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or cancel it once an event is set, and return None."""
    task, setting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, setting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        setting.cancel()
        task.cancel()
        await asyncio.wait({task})
    return None if task.cancelled() else task.result()


class WaitingPulls:
    """The pulls of each trainer that wait, or whose replies are being sent.

    A pull beyond the limit ends the oldest pull, whose client has most likely disconnected.
    """

    def __init__(self, max_each: int = MAX_WAITING_PULLS) -> None:
        self._max_each = max_each
        self._by_rank: defaultdict[Rank, deque[asyncio.Task[Any]]] = defaultdict(deque)

    def __repr__(self) -> str:
        return f"<WaitingPulls [{ {rank: len(pulls) for rank, pulls in self._by_rank.items()} }]>"

    @contextlib.contextmanager
    def place(self, rank: Rank) -> Iterator[None]:
        """Count a pull while the block runs. It is ended when a newer pull needs the place."""
        pulls, request = self._by_rank[rank], current_request()
        if len(pulls) >= self._max_each:
            text = f"trainer {rank} sent {self._max_each} newer requests, so this one was ended"
            end_request(pulls.popleft(), TryAgain(text, code="overloaded"))
        pulls.append(request)
        try:
            yield
        finally:
            if request in pulls:
                pulls.remove(request)
            if not pulls:
                self._by_rank.pop(rank, None)
