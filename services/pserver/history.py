"""What the newest applied rounds, or steps, were made of: for changes of members, and for a pserver that comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ps_protocol.vocabulary import Incarnation, Rank, Round


@dataclass(slots=True)
class History:
    """By round: whose contributions are in it, and for whose the round stepped nothing, if any.

    In asynchronous modes instead, by rank: the newest step that was taken, and which life it came from.
    """

    participants: dict[Round, tuple[Rank, ...]] = field(default_factory=dict)
    nonfinite: dict[Round, tuple[Rank, ...]] = field(default_factory=dict)
    steps: dict[Rank, tuple[Incarnation, Round]] = field(default_factory=dict)

    def add(self, round_: Round, ranks: tuple[Rank, ...], nonfinite: tuple[Rank, ...], *, keep: int) -> None:
        """A round was applied; of those before it `keep` - 1 are remembered."""
        self.participants[round_] = ranks
        if nonfinite:
            self.nonfinite[round_] = nonfinite
        for known in (self.participants, self.nonfinite):
            for old in [old for old in known if old <= round_ - keep]:
                del known[old]

    def copy(self) -> History:
        """Another one with the same content."""
        return History(dict(self.participants), dict(self.nonfinite), dict(self.steps))

    def to_json(self) -> str:
        """As it stands in a checkpoint."""
        return json.dumps([list(known.items()) for known in (self.participants, self.nonfinite, self.steps)])

    @classmethod
    def from_json(cls, text: str) -> History:
        """The same back.

        >>> History.from_json(History({7: (0, 1)}, {7: (1,)}).to_json())
        History(participants={7: (0, 1)}, nonfinite={7: (1,)}, steps={})
        """
        return cls(*({key: tuple(values) for key, values in items} for items in json.loads(text)))
