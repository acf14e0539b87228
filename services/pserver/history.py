"""What the newest applied rounds, or steps, were made of: for changes of members, and for a pserver that comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.norms import ShardNorm
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

    def add(
        self,
        round_: Round,
        ranks: tuple[Rank, ...],
        nonfinite: tuple[Rank, ...],
        norm: ShardNorm | None = None,
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
        known: dict[Round, Any]
        for known in (self.participants, self.nonfinite, self.norms) if ranks else ():
            for old in [old for old in known if old <= round_ - keep]:
                del known[old]

    def copy(self) -> History:
        """Another one with the same content."""
        return History(dict(self.participants), dict(self.nonfinite), dict(self.steps), dict(self.norms))

    def to_json(self) -> str:
        """As it stands in a checkpoint."""
        every = (self.participants, self.nonfinite, self.steps, self.norms)
        return json.dumps([list(known.items()) for known in every])

    @classmethod
    def from_json(cls, text: str) -> History:
        """The same back.

        >>> History.from_json(History({7: (0, 1)}, {7: (1,)}).to_json())
        History(participants={7: (0, 1)}, nonfinite={7: (1,)}, steps={}, norms={})
        """
        every = json.loads(text)
        *rest, norms = every if len(every) == 4 else (*every, [])  # before there were norms
        participants, nonfinite, steps = ({key: tuple(values) for key, values in items} for items in rest)
        return cls(participants, nonfinite, steps, {round_: ShardNorm(*norm) for round_, norm in norms})
