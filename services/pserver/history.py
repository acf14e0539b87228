"""What the newest applied rounds, or steps, were made of: for changes of members, and for a pserver that comes back."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field
from typing import Any

from ps_protocol.grad_scalers import ScalerState
from ps_protocol.norms import ShardNorm
from ps_protocol.routes import GRAD_SCALER_KEY, SKIPPED_BEFORE_KEY, SKIPPED_KEY
from ps_protocol.vocabulary import Incarnation, Rank, Round


@dataclass(slots=True)
class History:
    """By round: whose contributions are in it, and for whose the round stepped nothing, if any.

    In asynchronous modes instead, by rank: the newest step that was taken, and which life it came from.
    """

    participants: dict[Round, tuple[Rank, ...]] = field(default_factory=dict)
    nonfinite: dict[Round, tuple[Rank, ...]] = field(default_factory=dict)
    steps: dict[Rank, tuple[Incarnation, Round]] = field(default_factory=dict)
    norms: dict[Round, ShardNorm] = field(default_factory=dict)  # where gradients are clipped
    scalers: dict[Round, ScalerState] = field(default_factory=dict)  # the lowest rank's, where there are any

    def add(
        self,
        round_: Round,
        ranks: tuple[Rank, ...],
        nonfinite: tuple[Rank, ...],
        norm: ShardNorm | None = None,
        scaler: ScalerState | None = None,
        *,
        keep: int,
    ) -> None:
        """A round was applied; of those before it `keep` - 1 are remembered.

        One that was passed over makes none forgotten: they may not be over on other pservers.
        """
        self.participants[round_] = ranks
        if nonfinite:
            self.nonfinite[round_] = nonfinite
        if norm is not None:
            self.norms[round_] = norm
        if scaler is not None:
            self.scalers[round_] = scaler
        known: dict[Round, Any]
        for known in (self.participants, self.nonfinite, self.norms, self.scalers) if ranks else ():
            for old in [old for old in known if old <= round_ - keep]:
                del known[old]

    def outcome(self, round_: Round) -> dict[str, str]:
        """What the answer with this version says of it: which rounds were skipped, and the GradScaler's state.

        >>> History(nonfinite={6: (1,), 7: (0,)}).outcome(7)
        {'skipped_for': '[0]', 'skipped_before': '{"6": [1]}'}
        """
        before = {str(known): ranks for known, ranks in self.nonfinite.items() if known < round_}
        metadata = {}
        if round_ in self.nonfinite:
            metadata[SKIPPED_KEY] = json.dumps(self.nonfinite[round_])
        if before:
            metadata[SKIPPED_BEFORE_KEY] = json.dumps(before)
        known = [told for told in self.scalers if told <= round_]
        if known:  # a round that nobody took part in has none of its own
            metadata[GRAD_SCALER_KEY] = self.scalers[max(known)].to_json()
        return metadata

    def take_outcomes(self, other: History) -> None:
        """What trainers are told of another run's rounds, whoever took part in them: this one goes on from there."""
        self.nonfinite.update(other.nonfinite)
        self.scalers.update(other.scalers)

    def copy(self) -> History:
        """Another one with the same content."""
        return History(
            dict(self.participants), dict(self.nonfinite), dict(self.steps), dict(self.norms), dict(self.scalers)
        )

    def to_json(self) -> str:
        """As it stands in a checkpoint."""
        scalers = {round_: astuple(state) for round_, state in self.scalers.items()}
        every = (self.participants, self.nonfinite, self.steps, self.norms, scalers)
        return json.dumps([list(known.items()) for known in every])

    @classmethod
    def from_json(cls, text: str) -> History:
        """The same back.

        >>> History.from_json(History({7: (0, 1)}, {7: (1,)}).to_json())
        History(participants={7: (0, 1)}, nonfinite={7: (1,)}, steps={}, norms={}, scalers={})
        """
        every = json.loads(text)
        *rest, norms, scalers = every + [[]] * (5 - len(every))  # before there were norms, and before GradScalers
        participants, nonfinite, steps = ({key: tuple(values) for key, values in items} for items in rest)
        return cls(
            participants,
            nonfinite,
            steps,
            {round_: ShardNorm(*norm) for round_, norm in norms},
            {round_: ScalerState(*state) for round_, state in scalers},
        )
