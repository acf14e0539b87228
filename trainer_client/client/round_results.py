"""Results of rounds: which were skipped, and the agreement of all pservers on the norm of a clipped gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ps_protocol.errors import NormChanged
from ps_protocol.norms import AgreedNorm, ShardNorm, agree
from ps_protocol.requests import Pull
from ps_protocol.vocabulary import Round

from ..transport.work import Work, pause, together
from .pserver_client import PserverClient


@dataclass
class RoundResults:
    """The newest results of the run's rounds, which pulls or the engine write, and the script reads."""

    skipped: Collection[Round] = ()  # of the versions that came with the newest pull, those whose round was skipped
    grad_norm: float | None = None  # of the newest round, before it was clipped; NaN if the round was skipped


T = TypeVar("T")

PAUSE_SECONDS = 0.05  # until every pserver has a change of members
MAX_ASKED = 200  # times in one pull; a change of members takes two or three


class NormAgreement:
    """The agreement on one round's norm, in one pull."""

    def __init__(self, ask: Callable[[], Work[list[ShardNorm | None]]]) -> None:
        """Use `ask`, which asks every pserver, in order; None: the round is over there without a norm."""
        self._ask = ask
        self._is_asking = False
        self._num_asked = 0
        self._agreed: Sequence[AgreedNorm | None] | None = None  # the newest answers that agree, by pserver

    @property
    def norm(self) -> float | None:
        """The 2-norm of the whole gradient before it was clipped; None if the round has none."""
        return self._agreed[0].norm if self._agreed and self._agreed[0] else None

    def bring(self, index: int, get: Callable[[AgreedNorm | None], Work[T]]) -> Work[T]:
        """Call `get` with the norm for this pserver, and again if the gradient has changed meanwhile.

        Raises NormChanged if that never ends.
        """
        refused = None
        while True:
            while self._is_asking:
                yield math.inf
            if self._agreed is None or self._agreed is refused:  # else other work has asked meanwhile
                self._is_asking = True
                try:
                    self._agreed = yield from self._ask_until_agreed()
                finally:
                    self._is_asking = False
                yield 0.0
            agreed = self._agreed
            try:
                return (yield from get(agreed[index]))
            except NormChanged:
                refused = agreed

    def _ask_until_agreed(self) -> Work[Sequence[AgreedNorm | None]]:
        while self._num_asked < MAX_ASKED:
            norms = yield from self._ask()
            self._num_asked += 1
            known = [norm for norm in norms if norm is not None]
            if len(known) < len(norms):  # a round without a norm is over, and no pserver waits for it
                return [None] * len(norms)
            if agreed := agree(known):
                return agreed
            yield from pause(PAUSE_SECONDS)
        raise NormChanged("the pservers disagree about the trainers whose gradients are in a round")


def finish_rounds(pservers: Sequence[PserverClient], last: Round, max_delay: int) -> Work[None]:
    """Send the norms of rounds before `last` that may not be over on all pservers, and wait until they are.

    Called by a trainer that has joined later, because all trainers of these rounds may have left. There are as many
    rounds as pservers can be apart.
    """
    for round_ in range(max(1, last - 1 - 2 * max_delay), last):
        agreement = NormAgreement(partial(_ask_norms, pservers, round_))
        for index, pserver in enumerate(pservers):
            yield from agreement.bring(index, partial(_bring_norm, pserver, round_))


def _ask_norms(pservers: Sequence[PserverClient], round_: Round) -> Work[list[ShardNorm | None]]:
    return together(pserver.norm(Pull(round_)) for pserver in pservers)


def _bring_norm(pserver: PserverClient, round_: Round, norm: AgreedNorm | None) -> Work[None]:
    yield from pserver.norm(Pull(round_, norm=norm))
