"""Results of rounds: which were skipped, and the agreement of all pservers on the norm of a clipped gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from ps_protocol.errors import NormChanged
from ps_protocol.norms import AgreedNorm, ShardNorm, agree
from ps_protocol.optimizers import HyperParameters
from ps_protocol.requests import Pull
from ps_protocol.vocabulary import Round

from .pserver_client import PserverClient


class Outcomes(NamedTuple):
    """The outcomes of the newest rounds. A later value replaces it, so that threads share it without a lock."""

    skipped: Collection[Round] = ()
    scaler: HyperParameters | None = None  # the state of the lowest rank's GradScaler, for a trainer that joins

    def advance(
        self, skipped: Collection[Round], scaler: HyperParameters | None, *, newest: Round, keep: int
    ) -> Outcomes:
        """Return the outcomes of the `keep` newest rounds, with those that came with version `newest`.

        >>> Outcomes(skipped=(4, 5)).advance([6], None, newest=6, keep=2)
        Outcomes(skipped=(5, 6), scaler=None)
        """
        known = sorted({*self.skipped, *skipped})
        return Outcomes(tuple(round_ for round_ in known if round_ > newest - keep), scaler)


@dataclass
class RoundResults:
    """The newest results of the run's rounds, which pulls or the engine write, and the script reads."""

    outcomes: Outcomes = field(default_factory=Outcomes)
    grad_norm: float | None = None  # of the newest round, before it was clipped; NaN if the round was skipped


T = TypeVar("T")

PAUSE_SECONDS = 0.05  # until every pserver has a change of members
MAX_ASKED = 200  # times in one pull; a change of members takes two or three


class NormAgreement:
    """The agreement on one round's norm, in one pull. All methods run on the I/O loop."""

    def __init__(self, ask: Callable[[], Awaitable[Sequence[ShardNorm | None]]]) -> None:
        """Use `ask`, which asks every pserver, in order; None: the round is over there without a norm."""
        self._ask = ask
        self._lock = asyncio.Lock()
        self._num_asked = 0
        self._agreed: Sequence[AgreedNorm | None] | None = None  # the newest answers that agree, by pserver

    @property
    def norm(self) -> float | None:
        """The 2-norm of the whole gradient before it was clipped; None if the round has none."""
        return self._agreed[0].norm if self._agreed and self._agreed[0] else None

    async def bring(self, index: int, get: Callable[[AgreedNorm | None], Awaitable[T]]) -> T:
        """Call `get` with the norm for this pserver, and again if the gradient has changed meanwhile.

        Raises NormChanged if that never ends.
        """
        refused = None
        while True:
            async with self._lock:
                if self._agreed is None or self._agreed is refused:  # else another call has asked meanwhile
                    self._agreed = await self._ask_until_agreed()
                agreed = self._agreed
            try:
                return await get(agreed[index])
            except NormChanged:
                refused = agreed

    async def _ask_until_agreed(self) -> Sequence[AgreedNorm | None]:
        while self._num_asked < MAX_ASKED:
            norms = await self._ask()
            self._num_asked += 1
            known = [norm for norm in norms if norm is not None]
            if len(known) < len(norms):  # a round without a norm is over, and no pserver waits for it
                return [None] * len(norms)
            if agreed := agree(known):
                return agreed
            await asyncio.sleep(PAUSE_SECONDS)
        raise NormChanged("the pservers disagree about the trainers whose gradients are in a round")


async def finish_rounds(pservers: Sequence[PserverClient], last: Round, max_delay: int) -> None:
    """Send the norms of rounds before `last` that may not be over on all pservers, and wait until they are.

    Called by a trainer that has joined later, because all trainers of these rounds may have left. There are as many
    rounds as pservers can be apart.
    """
    for round_ in range(max(1, last - 1 - 2 * max_delay), last):
        agreement = NormAgreement(partial(_ask_norms, pservers, round_))
        for index, pserver in enumerate(pservers):
            await agreement.bring(index, partial(_bring_norm, pserver, round_))


async def _ask_norms(pservers: Sequence[PserverClient], round_: Round) -> list[ShardNorm | None]:
    return [await pserver.norm(Pull(round_)) for pserver in pservers]


async def _bring_norm(pserver: PserverClient, round_: Round, norm: AgreedNorm | None) -> None:
    await pserver.norm(Pull(round_, norm=norm))
