"""A shard's optimizer state, the ranges in which blocks are stepped, and state that a trainer loads.

A trainer loads optimizer state, such as that of a checkpoint of its own, with its next contribution. It is staged and
logged with the gradient and loaded before the step. So a round loads it on all pservers or on none.
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
from .tensors import StagedBlock, view_bytes


@dataclass(frozen=True, slots=True)
class LoadedState:
    """Optimizer state of the blocks in `states`; a slot of theirs that is not in `tensors` is empty."""

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
    """Return the state that a round loads: that of the lowest rank with any."""
    return next(filter(None, map(LoadedState.from_staged, contributions)), None)


@dataclass(slots=True)
class _Stepped:
    """Blocks of one group in one state, and their flat ranges."""

    names: list[str] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)


class OptimizerBlocks:
    """The slots and the step states of a shard's blocks.

    Slots are flat float32 tensors of the shard's layout that are allocated when first needed. Each block has a step
    state, because a parameter without a gradient is skipped, as in `torch.optim`. Synchronous, not thread-safe.
    """

    def __init__(self, layout: ShardLayout, spec: OptimizerSpec) -> None:
        self.spec = spec
        self._layout = layout
        self._slots: dict[str, Tensor] = {}
        self._states = dict.fromkeys(layout.place, StepState())
        # By counter, where each has its own steps; by None the state before any counter stepped the block.
        self._counted: dict[tuple[Rank | None, str], StepState] = {}

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
            self._counted.clear()  # such a step counts for all
        else:
            self._states.update({name: self._begin(name, counter) for name in present})
        for (group, state), stepped in self._find_runs(frozenset(present)).items():
            name = self.spec.rule(group)
            rule = UPDATE_RULES[name]
            options = {**hyper_parameters[group], **self.spec.group_flags[group]}
            pieces = [piece for run in stepped.runs for piece in _cut(*run, rule.max_elements)]
            operands = Operands(
                values=[values[begin:end] for begin, end in pieces],
                gradients=[gradient[begin:end] for begin, end in pieces],
                slots={
                    slot_name: [slot[begin:end] for begin, end in pieces]
                    for slot_name in slots_under(name, options)
                    for slot in (self._slot(slot_name),)
                },
                state=state,
            )
            self._states.update(dict.fromkeys(stepped.names, rule.step(operands, options)))
        if counter is not None:
            self._counted.update({(counter, name): self._states[name] for name in present})

    def _begin(self, name: str, counter: Rank) -> StepState:
        """Return a counter's state of a block that it is about to step."""
        before = self._counted.setdefault((None, name), self._states[name])
        return self._own_state(name, self._counted.get((counter, name), before))

    def _own_state(self, name: str, counted: StepState) -> StepState:
        return counted._replace(has_momentum=self._states[name].has_momentum)  # the slot is one for all

    def slots(self) -> dict[str, Tensor]:
        """Return the slots allocated so far, by torch's name: flat float32 tensors of the layout, not copies."""
        return dict(self._slots)

    def states(self, counter: Rank | None = None) -> dict[str, StepState]:
        """Return the step state of every block: the `counter`'s own where it has stepped the block."""
        if counter is None:
            return dict(self._states)
        counted = {name: self._counted.get((counter, name), state) for name, state in self._states.items()}
        return {name: self._own_state(name, state) for name, state in counted.items()}

    def counted(self) -> dict[tuple[Rank | None, str], StepState]:
        """Return the step states of all counters by counter and block; those before any counter are under None."""
        return dict(self._counted)

    def load(
        self,
        slots: Mapping[str, Tensor],
        states: Mapping[str, StepState],
        counted: Mapping[tuple[Rank | None, str], StepState],
    ) -> None:
        """Replace the slots, which are copied, and all counts.

        Counters of earlier versions began at 0, and their files contain no states under None.
        """
        self._slots = {name: slot.clone() for name, slot in slots.items()}
        self._states = dict(states)
        self._counted = {(None, name): FRESH for _, name in counted} | dict(counted)

    def load_blocks(self, states: Mapping[str, StepState], slots: Mapping[str, Tensor]) -> None:
        """Replace the counts and slots of these blocks. `{slot}/{block}` tensors of shape (num_elements,) are copied.

        A slot of theirs that is not among these becomes empty. Every counter begins with these counts.
        """
        for name in states:
            place = self._layout.place[name]
            for slot in self._slots.values():
                slot[place.step_begin : place.padded_end] = 0
        for key, values in slots.items():
            slot_name, name = split_key(key)
            place = self._layout.place[name]
            self._slot(slot_name)[place.begin : place.end] = values
        self._states.update(states)
        self._counted = {key: state for key, state in self._counted.items() if key[1] not in states}

    @property
    def num_bytes(self) -> int:
        """Memory that the slots take."""
        return sum(slot.nbytes for slot in self._slots.values())

    def _find_runs(self, present: frozenset[str]) -> dict[tuple[int, StepState], _Stepped]:
        """Return the present blocks by group and state.

        Adjacent blocks share a run, unless a parameter ends within a window between them.
        """
        found: dict[tuple[int, StepState], _Stepped] = {}
        places = self._layout.places
        if len(present) < len(places):
            places = tuple(sorted((self._layout.place[name] for name in present), key=lambda place: place.begin))
        for place in places:
            stepped = found.setdefault((place.group, self._states[place.name]), _Stepped())
            stepped.names.append(place.name)
            if stepped.runs and stepped.runs[-1][1] == place.step_begin:
                stepped.runs[-1] = (stepped.runs[-1][0], place.step_end)
            else:
                stepped.runs.append((place.step_begin, place.step_end))
        return found

    def _slot(self, name: str) -> Tensor:
        if name not in self._slots:
            self._slots[name] = torch.zeros(self._layout.num_elements)
        return self._slots[name]


def _cut(begin: int, end: int, size: int | None) -> list[tuple[int, int]]:
    if size is None:
        return [(begin, end)]
    return [(at, min(at + size, end)) for at in range(begin, end, size)]
