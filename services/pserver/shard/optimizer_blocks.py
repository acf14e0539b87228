"""A shard's optimizer state, the ranges in which blocks are stepped, and state that a trainer loads.

A trainer sends loaded optimizer state with its next contribution. The pserver stages and logs the state with the
gradient, and loads it before the step.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ps_protocol.optimizers import (
    FRESH,
    HyperParameters,
    OptimizerSpec,
    StepState,
    read_states,
    slots_under,
    split_key,
    write_states,
)
from ps_protocol.vocabulary import Rank

from .layout import ShardLayout
from .optimizer_rules import UPDATE_RULES, Operands
from .shard_state import OptimizerState
from .tensors import StagedBlock, view_bytes


@dataclass(frozen=True, slots=True)
class LoadedState:
    """Optimizer state of the blocks in `states`; a slot of these blocks that is not in `tensors` is empty."""

    states: Mapping[str, StepState]
    tensors: Mapping[str, Tensor]  # by `{slot}/{block}`, of shape (num_elements,), float32; only read

    @classmethod
    def from_staged(cls, staged: Mapping[str, StagedBlock | StepState]) -> LoadedState | None:
        """Return the state in a contribution, as views of the received bodies, or None if there is none."""
        if not staged:
            return None
        states = {split_key(key)[1]: state for key, state in staged.items() if isinstance(state, StepState)}
        tensors = {key: block.tensor() for key, block in staged.items() if isinstance(block, StagedBlock)}
        return cls(states, tensors)

    def describe(self) -> str:
        """Return the description that the log contains, with `parts` behind it."""
        return json.dumps([write_states(self.states), list(self.tensors)])

    def parts(self) -> list[memoryview]:
        """Return the bytes of all tensors, not copied."""
        return [view_bytes(tensor) for tensor in self.tensors.values()]

    @classmethod
    def from_log(cls, description: str, data: memoryview, layout: ShardLayout) -> tuple[LoadedState, memoryview]:
        """Return the state at the end of a record's data, and the data before it."""
        states, keys = json.loads(description)
        tensors: dict[str, Tensor] = {}
        for key in reversed(keys):
            begin = len(data) - torch.float32.itemsize * layout.place[split_key(key)[1]].block.num_elements
            tensors[key] = torch.frombuffer(data[begin:], dtype=torch.float32)
            data = data[:begin]
        return cls(read_states(states), tensors), data


def find_loaded(contributions: Sequence[Mapping[str, StagedBlock | StepState]]) -> LoadedState | None:
    """Return the state that a round loads: the state from the lowest rank that loads any."""
    for slots in contributions:
        if slots:
            return LoadedState.from_staged(slots)
    return None


@dataclass(slots=True)
class _Stepped:
    """Blocks of one group in one state, and their flat ranges."""

    names: list[str] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)


class OptimizerBlocks:
    """Steps of a shard's blocks, and their state. Synchronous, not thread-safe."""

    def __init__(self, layout: ShardLayout, spec: OptimizerSpec) -> None:
        self.state = OptimizerState(steps=dict.fromkeys(layout.place, FRESH))
        self._spec = spec
        self._layout = layout

    def apply(
        self,
        values: Tensor,
        gradient: Tensor,
        present: Collection[str],
        hyper_parameters: list[HyperParameters],
        *,
        counter: Rank | None = None,
    ) -> None:
        """Step the blocks named in `present`, once.

        `values` and `gradient` are flat float32 tensors of the layout; `values` is written, `gradient` read where
        blocks are present. For buffers it contains the pushed values. `hyper_parameters` has one checked dictionary for
        each parameter group. Steps are counted for each block, or with a `counter` for each block and counter; counters
        share the slots. A new counter begins with the steps of the block before any counter stepped it.
        """
        if counter is None:
            self.state.counted.clear()  # such a step counts for all
        else:
            self.state.steps.update({name: self._begin(name, counter) for name in present})
        for (group, state), stepped in self._find_runs(frozenset(present)).items():
            name = self._spec.rule(group)
            rule = UPDATE_RULES[name]
            options = {**hyper_parameters[group], **self._spec.group_flags[group]}
            pieces = [piece for run in stepped.runs for piece in _cut(*run, rule.max_elements)]
            slots = {slot: _view(self._slot(slot), pieces) for slot in slots_under(name, options)}
            operands = Operands(_view(values, pieces), _view(gradient, pieces), slots, state)
            self.state.steps.update(dict.fromkeys(stepped.names, rule.step(operands, options)))
        if counter is not None:
            self.state.counted.update({(counter, name): self.state.steps[name] for name in present})

    def _begin(self, name: str, counter: Rank) -> StepState:
        """Return a counter's state of a block that it is about to step."""
        before = self.state.counted.setdefault((None, name), self.state.steps[name])
        return self._own_state(name, self.state.counted.get((counter, name), before))

    def _own_state(self, name: str, counted: StepState) -> StepState:
        has_momentum = self.state.steps[name].has_momentum  # the slot is one for all
        return counted if counted.has_momentum == has_momentum else counted._replace(has_momentum=has_momentum)

    def steps_for(self, counter: Rank) -> dict[str, StepState]:
        """Return the step state of every block: the counter's own where it has stepped the block."""
        counted = {name: self.state.counted.get((counter, name), state) for name, state in self.state.steps.items()}
        return {name: self._own_state(name, state) for name, state in counted.items()}

    def load(self, state: OptimizerState) -> None:
        """Replace the state by a copy of another one."""
        self.state = state.clone()

    def load_blocks(self, states: Mapping[str, StepState], slots: Mapping[str, Tensor]) -> None:
        """Replace the counts and slots of these blocks. `{slot}/{block}` tensors of shape (num_elements,) are copied.

        A slot of these blocks without a tensor becomes empty. Every counter begins with these counts.
        """
        for name in states:
            place = self._layout.place[name]
            for slot in self.state.slots.values():
                slot[place.step_begin : place.padded_end] = 0
        for key, values in slots.items():
            slot_name, name = split_key(key)
            place = self._layout.place[name]
            self._slot(slot_name)[place.begin : place.end] = values
        self.state.steps.update(states)
        self.state.counted = {key: state for key, state in self.state.counted.items() if key[1] not in states}

    def _find_runs(self, present: frozenset[str]) -> dict[tuple[int, StepState], _Stepped]:
        """Return the present blocks by group and state.

        Adjacent blocks share a run, unless a parameter ends within a window between them.
        """
        found: dict[tuple[int, StepState], _Stepped] = {}
        places = self._layout.places
        if len(present) < len(places):
            places = tuple(sorted((self._layout.place[name] for name in present), key=lambda place: place.begin))
        for place in places:
            stepped = found.setdefault((place.group, self.state.steps[place.name]), _Stepped())
            stepped.names.append(place.name)
            if stepped.runs and stepped.runs[-1][1] == place.step_begin:
                stepped.runs[-1] = (stepped.runs[-1][0], place.step_end)
            else:
                stepped.runs.append((place.step_begin, place.step_end))
        return found

    def _slot(self, name: str) -> Tensor:
        if name not in self.state.slots:
            self.state.slots[name] = torch.zeros(self._layout.num_elements)
        return self.state.slots[name]


def _view(flat: Tensor, pieces: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [flat[begin:end] for begin, end in pieces]


def _cut(begin: int, end: int, size: int | None) -> list[tuple[int, int]]:
    if size is None:
        return [(begin, end)]
    return [(at, min(at + size, end)) for at in range(begin, end, size)]
