"""The history of the newest applied rounds, or steps, for changes of members and for a restored pserver."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.norms import ShardNorm
from ps_protocol.requests import Pulled
from ps_protocol.vocabulary import Incarnation, Rank, Round


@dataclass(slots=True)
class History:
    """The ranks whose contributions each round contains, and the ranks because of which a round stepped nothing.

    In asynchronous modes instead, by rank: the incarnation and the number of the newest committed step.
    """

    participants: dict[Round, tuple[Rank, ...]] = field(default_factory=dict)
    nonfinite: dict[Round, tuple[Rank, ...]] = field(default_factory=dict)
    steps: dict[Rank, tuple[Incarnation, Round]] = field(default_factory=dict)
    norms: dict[Round, ShardNorm] = field(default_factory=dict)  # where gradients are clipped

    def add_round(
        self,
        round_: Round,
        ranks: tuple[Rank, ...],
        nonfinite: tuple[Rank, ...],
        norm: ShardNorm | None = None,
        *,
        keep: int,
    ) -> None:
        """Add an applied round, and forget those before the newest `keep` rounds.

        A round without contributions makes none forgotten, since other pservers may still work on those.
        """
        self.participants[round_] = ranks
        if nonfinite:
            self.nonfinite[round_] = nonfinite
        if norm is not None:
            self.norms[round_] = norm
        known: dict[Round, Any]
        for known in (self.participants, self.nonfinite, self.norms) if ranks else ():
            for old in list(known):
                if old <= round_ - keep:
                    del known[old]

    def outcome(self, round_: Round) -> dict[str, str]:
        """Return the metadata of the reply for this version: because of which ranks it was skipped."""
        return Pulled(round_, None, self.nonfinite.get(round_, ())).to_metadata()

    def copy(self) -> History:
        """Return a copy."""
        return History(dict(self.participants), dict(self.nonfinite), dict(self.steps), dict(self.norms))

    def to_json(self) -> str:
        """Return the text that a checkpoint contains."""
        known_by_key = (self.participants, self.nonfinite, self.steps, self.norms)
        return json.dumps([list(known.items()) for known in known_by_key])

    @classmethod
    def from_json(cls, text: str) -> History:
        """Return the history in such a text.

        >>> History.from_json(History({7: (0, 1)}, {7: (1,)}).to_json())
        History(participants={7: (0, 1)}, nonfinite={7: (1,)}, steps={}, norms={})
        """
        *rest, norms = json.loads(text)
        participants, nonfinite, steps = ({key: tuple(values) for key, values in items} for items in rest)
        return cls(participants, nonfinite, steps, {round_: ShardNorm(*norm) for round_, norm in norms})
