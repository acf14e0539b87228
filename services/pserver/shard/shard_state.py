"""The state of a shard as a value: copied, written to a file, read, and resliced; and the history of its rounds.

The file is a safetensors stream: the flat float32 tensors of the shard's layout (`values`, `published` where trainers
pull deltas, `slot.exp_avg`, …), the buffers in their own dtypes, and the rest in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ps_protocol.frames import TRUSTED_LIMITS, encode_header, parse_frame
from ps_protocol.norms import ShardNorm
from ps_protocol.optimizers import StepState
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.storage import check_format

from .bodies import view_bytes
from .layout import BlockPlace, ShardLayout

FORMAT = 2
VALUES = "values"
PUBLISHED = "published"
SLOT_PREFIX = "slot."
BUFFER_PREFIX = "buffer."


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


@dataclass(slots=True)
class OptimizerState:
    """The optimizer state of a shard's blocks.

    Slots are flat float32 tensors of the shard's layout, by torch's name, which are allocated when first needed. Each
    block has a step state, because a parameter without a gradient is skipped, as in `torch.optim`.
    """

    slots: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, StepState] = field(default_factory=dict)  # by block
    # By counter and block, where each counter has its own steps; under None the state before any counter's steps.
    counted: dict[tuple[Rank | None, str], StepState] = field(default_factory=dict)

    def clone(self) -> OptimizerState:
        """Return a copy."""
        slots = {name: slot.clone() for name, slot in self.slots.items()}
        return OptimizerState(slots, dict(self.steps), dict(self.counted))


@dataclass(slots=True)
class ShardState:
    """The state of a shard. Tensors are flat float32 in the shard's layout; mappings are by block name."""

    version: Round
    values: Tensor
    published: Tensor | None = None  # what trainers have, where that is not the values
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    versions: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, bytes] = field(default_factory=dict)

    def clone(self) -> ShardState:
        """Return a copy."""
        published = None if self.published is None else self.published.clone()
        return ShardState(
            self.version,
            self.values.clone(),
            published,
            self.optimizer.clone(),
            dict(self.versions),
            dict(self.buffers),
        )

    def encode(self, plan: SlicePlan, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
        """Return the chunks of a file. They are views of the tensors, which must not change before it is written."""
        flat = {VALUES: self.values}
        if self.published is not None:
            flat[PUBLISHED] = self.published
        flat |= {SLOT_PREFIX + name: slot for name, slot in sorted(self.optimizer.slots.items())}
        entries: list[tuple[str, str, tuple[int, ...]]]
        entries = [(name, "F32", (len(tensor),)) for name, tensor in flat.items()]
        specs = [spec for spec in plan.buffers if spec.name in self.buffers]
        entries += [(BUFFER_PREFIX + spec.name, spec.dtype, spec.shape) for spec in specs]
        state = {
            "format": str(FORMAT),
            "version": str(self.version),
            "states": json.dumps([[name, *steps] for name, steps in self.optimizer.steps.items()]),
            "versions": json.dumps(self.versions),
            "counted": json.dumps([[*key, *steps] for key, steps in self.optimizer.counted.items()]),
        }
        header = encode_header(entries, {**metadata, **state})
        return [header, *map(view_bytes, flat.values()), *(self.buffers[spec.name] for spec in specs)]

    @classmethod
    def decode(cls, data: memoryview) -> tuple[ShardState, Mapping[str, str]]:
        """Return the state and the metadata of a file; the tensors are views of `data`.

        Raises UnsupportedFormat, BadInput and others.
        """
        frame = parse_frame(data, TRUSTED_LIMITS)
        metadata = frame.metadata
        check_format(metadata.get("format"), FORMAT, "the checkpoint of a shard")
        state = cls(int(metadata["version"]), torch.empty(0), versions=json.loads(metadata["versions"]))
        for name, *steps in json.loads(metadata["states"]):
            state.optimizer.steps[name] = StepState(*steps)
        for counter, name, *steps in json.loads(metadata["counted"]):
            state.optimizer.counted[counter, name] = StepState(*steps)
        for entry in frame.tensors:
            view = data[frame.data_begin + entry.begin : frame.data_begin + entry.end]
            if entry.name.startswith(BUFFER_PREFIX):
                state.buffers[entry.name.removeprefix(BUFFER_PREFIX)] = bytes(view)
                continue
            tensor = torch.frombuffer(view, dtype=torch.float32) if len(view) else torch.empty(0)
            if entry.name == VALUES:
                state.values = tensor
            elif entry.name == PUBLISHED:
                state.published = tensor
            else:
                state.optimizer.slots[entry.name.removeprefix(SLOT_PREFIX)] = tensor
        return state, metadata


def reslice(
    shards: Iterable[tuple[PserverIndex, ShardState]], old: SlicePlan, new: SlicePlan, index: PserverIndex
) -> ShardState:
    """Return the state of shard `index` of a new plan, from the shards of another plan of the same parameters.

    Reads the old shards one after another, so that only one of them has to be in memory. Every element keeps its bits,
    and a block gets the counts of the block that its first element was in.
    """
    layout = ShardLayout(new, index)
    state = ShardState(0, torch.zeros(layout.num_elements))
    if new.wire.pulls_deltas:
        state.published = torch.zeros_like(state.values)
    by_parameter: dict[str, list[BlockPlace]] = {}
    for place in layout.places:
        by_parameter.setdefault(place.block.parameter, []).append(place)
    wanted = {spec.name for spec in new.buffers if spec.pserver == index}
    for old_index, shard in shards:
        state.version = shard.version
        state.buffers.update({name: data for name, data in shard.buffers.items() if name in wanted})
        for source in ShardLayout(old, old_index).places:
            for target in by_parameter.get(source.block.parameter, ()):
                _copy(shard, source, state, target)
    return state


def _copy(shard: ShardState, source: BlockPlace, state: ShardState, target: BlockPlace) -> None:
    begin, end = max(source.block.begin, target.block.begin), min(source.block.end, target.block.end)
    if begin >= end:
        return
    at = slice(target.begin + begin - target.block.begin, target.begin + end - target.block.begin)
    of = slice(source.begin + begin - source.block.begin, source.begin + end - source.block.begin)
    state.values[at] = shard.values[of]
    if state.published is not None:
        state.published[at] = (shard.values if shard.published is None else shard.published)[of]
    for name, slot in shard.optimizer.slots.items():
        state.optimizer.slots.setdefault(name, torch.zeros_like(state.values))[at] = slot[of]
    if begin == target.block.begin:
        state.optimizer.steps[target.name] = shard.optimizer.steps[source.name]
        state.versions[target.name] = shard.versions[source.name]
        for (counter, name), steps in shard.optimizer.counted.items():
            if name == source.name:
                state.optimizer.counted[counter, target.name] = steps


def concatenate(shards: Iterable[tuple[PserverIndex, ShardState]], plan: SlicePlan) -> dict[str, Tensor]:
    """Return whole parameters by name, float32 in their own shapes, from all shards of a plan, in any order."""
    whole = {spec.name: torch.empty(spec.num_elements) for spec in plan.parameters}
    for index, shard in shards:
        for place in ShardLayout(plan, index).places:
            block = place.block
            whole[block.parameter][block.begin : block.end] = shard.values[place.begin : place.end]
    return {spec.name: whole[spec.name].reshape(spec.shape) for spec in plan.parameters}
