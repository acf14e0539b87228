"""Looking at a whole shard right after a named round, before its next write, so that all pservers show the same one.

As with checkpoints, but nothing goes to a disk: whoever asks names a round that is not over, on every pserver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from ps_protocol.errors import FutureRound, StaleRound, TryAgain
from ps_protocol.vocabulary import Round


@dataclass(frozen=True, slots=True)
class Stepped:
    """Copies of one block's values, of shape (num_elements,), float32; `version` is that after the update."""

    version: Round
    before: Tensor
    after: Tensor


@dataclass(slots=True)
class _Probe:
    waiter: asyncio.Future[Stepped]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def tell(self, stepped: Stepped) -> None:
        if not self.waiter.done():
            self.waiter.set_result(stepped)


class Probes:
    """One for each block at most, shared by all who ask meanwhile. `take` is called on the compute thread."""

    def __init__(self) -> None:
        self._wanted: dict[str, _Probe] = {}

    async def wait_for_step(self, name: str, seconds: float) -> Stepped | None:
        """The block's next update; None if there is none for so long. Called on the event loop."""
        probe = self._wanted.get(name)
        if probe is None:
            probe = self._wanted[name] = _Probe(asyncio.get_running_loop().create_future())
        try:
            return await asyncio.wait_for(asyncio.shield(probe.waiter), seconds)
        except TimeoutError:
            return None

    def take(self, present: Iterable[str], block: Callable[[str], Tensor]) -> list[tuple[str, _Probe, Tensor]]:
        """Before an update of these blocks: those that somebody looks at, and copies of their values."""
        if not self._wanted:
            return []
        probes = ((name, self._wanted.pop(name, None)) for name in present)
        return [(name, probe, block(name).clone()) for name, probe in probes if probe is not None]

    def tell(self, taken: list[tuple[str, _Probe, Tensor]], block: Callable[[str], Tensor], version: Round) -> None:
        """After it."""
        for name, probe, before in taken:
            probe.loop.call_soon_threadsafe(probe.tell, Stepped(version, before, block(name).clone()))


T = TypeVar("T")

MAX_WANTED = 8  # each holds a copy of a shard for its reader
MAX_ROUNDS_AHEAD = 10_000


class Captures:
    """`want` and `miss` are called on the event loop, `take` on the compute thread."""

    def __init__(self) -> None:
        self._wanted: dict[Round, list[_Capture]] = {}

    async def wait_for_round(self, round_: Round, look: Callable[[], T], seconds: float, newest: Round) -> T:
        """What `look` finds after a round that is not over, `newest` being the one before the open one.

        Raises TimeoutError after so many seconds, StaleRound if the round was over too soon, FutureRound, TryAgain.
        """
        if round_ > newest + MAX_ROUNDS_AHEAD:
            raise FutureRound(f"round {round_} is far ahead", current=newest)
        if sum(map(len, self._wanted.values())) >= MAX_WANTED:
            raise TryAgain("too many wait for rounds to look at", code="overloaded")
        capture = _Capture(look)
        self._wanted.setdefault(round_, []).append(capture)
        try:
            return await asyncio.wait_for(capture.result, seconds)
        finally:
            if capture in (left := self._wanted.get(round_, [])):
                left.remove(capture)

    def capture_round(self, version: Round) -> None:
        """The shard is now what it is after this round."""
        for capture in tuple(self._wanted.pop(version, ())):  # who gives up meanwhile takes itself out
            capture.take()

    def expire_rounds(self, applied: Round) -> None:
        """Those whose round is over have come too late."""
        for round_ in [round_ for round_ in self._wanted if round_ <= applied]:
            for capture in self._wanted.pop(round_):
                capture.tell(None, StaleRound(f"round {round_} is over", current=applied))

    def end(self, reason: Exception) -> None:
        """There are no more rounds."""
        while self._wanted:
            for capture in self._wanted.popitem()[1]:
                capture.tell(None, reason)


class _Capture:
    def __init__(self, look: Callable[[], Any]) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._look = look

    def take(self) -> None:
        """On the compute thread. What goes wrong is the reader's, not the round's."""
        found, error = None, None
        try:
            found = self._look()
        except Exception as problem:
            error = problem
        self.result.get_loop().call_soon_threadsafe(self.tell, found, error)

    def tell(self, found: Any, error: Exception | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(found)
        else:
            self.result.set_exception(error)
