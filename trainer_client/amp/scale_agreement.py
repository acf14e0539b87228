"""What the trainers of a run know of its newest rounds, so that their GradScalers go the same way.

With each round come the rounds that were skipped, and the state that the lowest rank had then: everybody reckons from
that one. So a trainer that was started again, or has begun with another scale, has the others'.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ps_protocol.grad_scalers import ScalerState
from ps_protocol.vocabulary import Rank, Round


class ScaleAgreement:
    """Told by those who pull, on the I/O loop; asked by the training thread. Nothing blocks."""

    def __init__(self) -> None:
        self.mine: ScalerState | None = None  # that goes with the step which is being begun
        self.num_returns = 0  # how often the run has gone back
        self._skipped: dict[Round, tuple[Rank, ...]] = {}
        self._told: ScalerState | None = None  # the lowest rank's, as of the newest round that was told
        self._since: Round = 0  # after which the script has set the scale; what was told of before does not count
        self._lock = threading.Lock()

    def tell(
        self, skipped: Mapping[Round, tuple[Rank, ...]], state: ScalerState | None, *, newest: Round, keep: int
    ) -> dict[Round, tuple[Rank, ...]]:
        """What has come with version `newest`. Returns those skipped rounds that nobody has told of before."""
        with self._lock:
            fresh = {round_: ranks for round_, ranks in skipped.items() if ranks and round_ not in self._skipped}
            self._skipped.update(fresh)
            for old in [round_ for round_ in self._skipped if round_ <= newest - keep]:
                del self._skipped[old]
            self._told = state if state is not None and state.after >= self._since else None
            return fresh

    def was_skipped(self, round_: Round) -> bool:
        """Of one of the newest rounds that were told of."""
        with self._lock:
            return round_ in self._skipped

    def forget(self) -> None:
        """The run has gone back: what was told of the rounds that are lost does not hold."""
        with self._lock:
            self._skipped.clear()
            self._told, self._since = None, 0
            self.num_returns += 1

    def known(self) -> dict[str, Any]:
        """All of that, to be told to another process of this host: `take_over`."""
        with self._lock:
            told = None if self._told is None else self._told.to_json()
            return {"skipped": list(self._skipped.items()), "told": told, "num_returns": self.num_returns}

    def take_over(self, known: Mapping[str, Any]) -> None:
        """What the process that leads a host knows."""
        state = ScalerState.from_json(known["told"])
        with self._lock:
            if self.num_returns != known["num_returns"]:
                self._since = 0
            self._skipped = {round_: tuple(ranks) for round_, ranks in known["skipped"]}
            self._told = state if state is not None and state.after >= self._since else None
            self.num_returns = known["num_returns"]

    def set_by_script(self, after: Round) -> None:
        """The script has set the scale after this round."""
        with self._lock:
            self._told, self._since = None, after

    def state_after(
        self, round_: Round, own: ScalerState, *, growth_factor: float, backoff_factor: float, growth_interval: int
    ) -> ScalerState:
        """The state after a round that was waited for; reckoned from `own` where nobody has told another."""
        with self._lock:
            state, skipped = self._told or own, dict(self._skipped)
        while state.after < round_:
            state = state.next(
                is_skipped=state.after + 1 in skipped,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
            )
        return replace(state, after=round_)

    @contextmanager
    def pushing(self, state: ScalerState) -> Iterator[None]:
        """A step that is begun in the block was scaled like this."""
        self.mine = state
        try:
            yield
        finally:
            self.mine = None
