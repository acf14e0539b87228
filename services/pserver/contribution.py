"""One trainer's gradient of one round or step, while it is staged. Pure: a staged block is an opaque payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ps_protocol.errors import ContributionConflict
from ps_protocol.optimizers import HyperParameters, StepState
from ps_protocol.vocabulary import Incarnation, Rank, Round

Payload = TypeVar("Payload")


@dataclass(slots=True)
class Contribution(Generic[Payload]):
    """The staged part of one trainer's gradient; complete once all announced blocks and slots are staged."""

    blocks: dict[str, Payload] = field(default_factory=dict)
    incarnation: Incarnation = 0  # of the trainer
    num_blocks: int | None = None
    hyper_parameters: list[HyperParameters] | None = None
    computed_on: Round | None = None  # asynchronous modes: the step after which its parameters were pulled
    slots: dict[str, Payload | StepState] = field(default_factory=dict)  # optimizer state that comes with it
    num_slots: int = 0

    @property
    def is_complete(self) -> bool:
        """True if all of it is staged. Its batch barrier is counted separately."""
        return self.num_blocks == len(self.blocks) and self.num_slots == len(self.slots)

    def stage(
        self,
        rank: Rank,
        round_: Round,
        blocks: Mapping[str, Payload],
        num_blocks: int | None,
        hyper_parameters: list[HyperParameters] | None,
        num_slots: int = 0,
    ) -> int:
        """Stage one push. Returns how many of its blocks are new. `rank` and `round_` are for messages.

        A ContributionConflict (other bytes or hyper-parameters for the same block or round, or more blocks than
        announced) stages nothing. `num_slots` comes with `num_blocks`.
        """
        _check_same(self.blocks, blocks, f"trainer {rank} pushed other bytes for block", round_)
        new = {name: payload for name, payload in blocks.items() if name not in self.blocks}
        total = self.num_blocks if num_blocks is None else num_blocks
        if total is not None and (total < len(self.blocks) + len(new) or self.num_blocks not in (None, total)):
            raise ContributionConflict(
                f"trainer {rank} pushed more blocks in round {round_} than it announced, or announced two numbers",
                expected=self.num_blocks if self.num_blocks is not None else total,
                actual=max(total, len(self.blocks) + len(new)),
            )
        if None not in (num_blocks, self.num_blocks) and hyper_parameters != self.hyper_parameters:
            raise ContributionConflict(f"trainer {rank} pushed two sets of hyper-parameters in round {round_}")
        if num_blocks is not None:
            self._check_slots(rank, round_, len(self.slots), num_slots)
        self.blocks.update(new)
        if self.num_blocks is None and num_blocks is not None:
            self.num_blocks, self.hyper_parameters, self.num_slots = num_blocks, hyper_parameters, num_slots
        return len(new)

    def stage_slots(self, rank: Rank, round_: Round, slots: Mapping[str, Payload | StepState]) -> int:
        """Stage one push of optimizer state. Returns how many of its slots are new. All or nothing, as `stage`."""
        _check_same(self.slots, slots, f"trainer {rank} pushed something else for", round_)
        num_slots = len(self.slots.keys() | slots.keys())
        self._check_slots(rank, round_, num_slots, max(num_slots, self.num_slots))
        num_new = num_slots - len(self.slots)
        self.slots.update(slots)
        return num_new

    def _check_slots(self, rank: Rank, round_: Round, staged: int, announced: int) -> None:
        if staged > announced or (self.num_blocks is not None and announced != self.num_slots):
            raise ContributionConflict(
                f"trainer {rank} pushed more slots in round {round_} than it announced, or announced two numbers",
                expected=announced if self.num_blocks is None else self.num_slots,
                actual=max(staged, announced),
            )


def _check_same(known: Mapping[str, object], new: Mapping[str, object], what: str, round_: Round) -> None:
    for name in new.keys() & known.keys():
        if new[name] != known[name]:
            raise ContributionConflict(f"{what} {name!r} in round {round_}")
