"""Slots that a trainer has loaded, such as those of a checkpoint of its own: they come with its next contribution.

They are staged with the gradient, logged with the update and taken before it is stepped. So a round has them on all
pservers or on none, whatever dies meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.slots import StepState, read_states, split_key, write_states

from .layout import ShardLayout
from .tensors import StagedBlock, view_bytes


@dataclass(frozen=True, slots=True)
class LoadedSlots:
    """Of the blocks in `states`; a slot of theirs that is not in `tensors` is empty."""

    states: Mapping[str, StepState]
    tensors: Mapping[str, Tensor]  # by `{slot}/{block}`, of shape (num_elements,), float32; only read

    @classmethod
    def of_staged(cls, staged: Mapping[str, StagedBlock | StepState]) -> LoadedSlots | None:
        """What a contribution holds; views of what was received. None if it holds none."""
        if not staged:
            return None
        states = {split_key(key)[1]: state for key, state in staged.items() if isinstance(state, StepState)}
        tensors = {key: block.tensor() for key, block in staged.items() if isinstance(block, StagedBlock)}
        return cls(states, tensors)

    def describe(self) -> str:
        """As it stands in the log, with `parts` behind it."""
        return json.dumps([write_states(self.states), list(self.tensors)])

    def parts(self) -> list[memoryview]:
        """The bytes of all tensors, not copied."""
        return [view_bytes(tensor) for tensor in self.tensors.values()]

    @classmethod
    def from_log(cls, description: str, data: memoryview, layout: ShardLayout) -> tuple[LoadedSlots, memoryview]:
        """The same back, from the end of a record's data, and what is before it."""
        states, keys = json.loads(description)
        tensors: dict[str, Tensor] = {}
        for key in reversed(keys):
            begin = len(data) - torch.float32.itemsize * layout.place[split_key(key)[1]].block.num_elements
            tensors[key] = torch.frombuffer(data[begin:], dtype=torch.float32)
            data = data[:begin]
        return cls(read_states(states), tensors), data


def find_loaded(contributions: Sequence[Mapping[str, StagedBlock | StepState]]) -> LoadedSlots | None:
    """Those that a round takes: of the lowest rank that has any."""
    return next(filter(None, map(LoadedSlots.of_staged, contributions)), None)
