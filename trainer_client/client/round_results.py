"""Results of rounds: which were skipped, and the agreement of all pservers on the norm of a clipped gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
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
    scaler: HyperParameters | None = None  # that the lowest rank pushed in the newest round, for a trainer that joins

    def advance(
        self, skipped: Collection[Round], scaler: HyperParameters | None, *, newest: Round, keep: int
    ) -> Outcomes:
        """Return the outcomes of the `keep` newest rounds, with those that came with version `newest`.

        >>> Outcomes(skipped=(4, 5)).advance([6], None, newest=6, keep=2)
        Outcomes(skipped=(5, 6), scaler=None)
        """
        known = sorted({*self.skipped, *skipped})
        return Outcomes(tuple(round_ for round_ in known if round_ > newest - keep), scaler)


T = TypeVar("T")

PAUSE_SECONDS = 0.05  # until every pserver has a change of members
MAX_ASKED = 200  # in one pull: a change of members makes it twice or three times


class NormAgreement:
    """The agreement on one round's norm, in one pull. All methods run on the I/O loop."""

    def __init__(self, ask: Callable[[], Awaitable[Sequence[ShardNorm | None]]]) -> None:
        """Use `ask`, which asks every pserver, in order; None: the round is over there without a norm."""
        self._ask = ask
        self._lock = asyncio.Lock()
        self._num_asked = 0
        self._agreed: Sequence[AgreedNorm | None] = ()

    @property
    def norm(self) -> float | None:
        """The 2-norm of the whole gradient before it was clipped; None if the round has none."""
        return self._agreed[0].norm if self._agreed and self._agreed[0] else None

    async def bring(self, index: int, get: Callable[[AgreedNorm | None], Awaitable[T]]) -> T:
        """Call `get` with the norm for this pserver, and again if the gradient has changed meanwhile.

        Raises NormChanged if that never ends.
        """
        known = 0
        while True:
            known = await self._agree_after(known)
            try:
                return await get(self._agreed[index])
            except NormChanged:
                continue

    async def _agree_after(self, known: int) -> int:
        """Ask the pservers, unless another call has asked since `known`."""
        async with self._lock:
            while self._num_asked <= known or not self._agreed:
                if self._num_asked == MAX_ASKED:
                    raise NormChanged("the pservers disagree about the trainers whose gradients are in a round")
                if self._num_asked > known:
                    await asyncio.sleep(PAUSE_SECONDS)
                norms = await self._ask()
                self._num_asked += 1
                known_norms = [norm for norm in norms if norm is not None]
                # What one of them passed over, or has forgotten by now, no other waits for.
                self._agreed = [None] * len(norms) if len(known_norms) < len(norms) else agree(known_norms) or ()
            return self._num_asked


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
