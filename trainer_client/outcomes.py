"""What a trainer knows of the newest rounds: which were skipped, and the lowest rank's GradScaler."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round


class Outcomes(NamedTuple):
    """The outcomes of the newest rounds. A later value replaces it, so that threads share it without a lock."""

    skipped: Collection[Round] = ()
    scaler: HyperParameters | None = None  # that the lowest rank pushed in the newest round, for a trainer that joins

    def followed_by(
        self, skipped: Collection[Round], scaler: HyperParameters | None, *, newest: Round, keep: int
    ) -> Outcomes:
        """Return the outcomes of the `keep` newest rounds, with those that came with version `newest`.

        >>> Outcomes(skipped=(4, 5)).followed_by([6], None, newest=6, keep=2)
        Outcomes(skipped=(5, 6), scaler=None)
        """
        known = sorted({*self.skipped, *skipped})
        return Outcomes(tuple(round_ for round_ in known if round_ > newest - keep), scaler)
