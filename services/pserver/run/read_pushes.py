"""Reading of received pushes: their blocks and numbers, checked against the plan before anything is staged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from torch import Tensor

from ps_protocol.errors import BadInput
from ps_protocol.frames import NUM_CACHED, Frame, TensorEntry
from ps_protocol.optimizers import (
    MASTER,
    SLOTS,
    OptimizerSpec,
    StepState,
    check_sparse_numbers,
    read_states,
    slot_key,
    split_key,
)
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import STATES_KEY, Completion
from ps_protocol.vocabulary import BufferSpec, PserverIndex
from ps_protocol.wire_types import WireTensor, sparse

from ..shard.bodies import Body, StagedBlock, view_tensors
from ..shard.layout import BlockPlace, ShardLayout
from ..shard.shard import MASTER_BYTES
from .staging import Push

FoundBlocks: TypeAlias = list[tuple[BlockPlace, list[int]]]  # with the indices of its tensors


class PushReader:
    """Reads the pushes of a run. What follows from a header alone is checked once, since it comes in each round."""

    def __init__(self, layout: ShardLayout, plan: SlicePlan) -> None:
        assert plan.optimizer is not None  # the plan of a run always has an optimizer
        self._layout = layout
        self._optimizer = plan.optimizer
        self._sparse_groups = plan.sparse_groups
        self._check = lru_cache(NUM_CACHED)(self._check_frame)

    def read(self, body: Body) -> Push[StagedBlock]:
        """Return a pushed body without a copy, checked against the plan. Raises BadInput."""
        if STATES_KEY in body.frame.metadata:
            body.is_recurring = False
            return Push({}, slots=_read_slots(body, self._layout, self._optimizer))
        found, completion = self._check(body.frame)
        return Push(_view_blocks(body, found), completion)

    def _check_frame(self, frame: Frame) -> tuple[FoundBlocks, Completion | None]:
        completion = Completion.from_metadata(frame.metadata, self._optimizer)
        if completion is not None:
            check_sparse_numbers(self._optimizer, self._sparse_groups, completion.hyper_parameters)
        return _find_blocks(frame, self._layout), completion


def read_blocks(body: Body, layout: ShardLayout) -> dict[str, StagedBlock]:
    """Return the blocks of a pushed body by name, without a copy. Raises BadInput."""
    return _view_blocks(body, _find_blocks(body.frame, layout))


def _find_blocks(frame: Frame, layout: ShardLayout) -> FoundBlocks:
    entries = {entry.name: entry for entry in frame.tensors}
    places: dict[str, BlockPlace] = {}
    for name in entries:
        place = layout.place_of_pushed.get(name)
        if place is None:
            raise BadInput(f"block {name!r} is not on this pserver", code="unknown_block")
        if place.name not in places:
            _find_entries(_expect(place, entries), entries)
            places[place.name] = place
    index = {name: number for number, name in enumerate(entries)}
    return [(place, [index[tensor] for tensor, _, _ in place.pushed]) for place in places.values()]


def _expect(place: BlockPlace, entries: Mapping[str, TensorEntry]) -> Sequence[WireTensor]:
    """Return the tensors of a block: of a sparse parameter, of as many rows as its first tensor names."""
    (name, _, most), *rest = place.pushed
    if not place.width or name not in entries:
        return place.pushed
    return sparse(place.name, rest[0][1], min((*most, *entries[name].shape[:1])), place.width)


def _view_blocks(body: Body, found: FoundBlocks) -> dict[str, StagedBlock]:
    views = view_tensors(body, body.frame.tensors)
    return {
        place.name: StagedBlock(body, [views[index] for index in indices], place.block.num_elements, place.width)
        for place, indices in found
    }


def _read_slots(body: Body, layout: ShardLayout, optimizer: OptimizerSpec) -> dict[str, StagedBlock | StepState]:
    """Return slots and masters of a pushed body by `{slot}/{block}`, without a copy, and step states by `/{block}`.

    Raises BadInput.
    """
    entries = {entry.name: entry for entry in body.frame.tensors}
    slots: dict[str, StagedBlock | StepState] = {}
    for key in entries:
        slot, name = split_key(key)
        place = layout.place.get(name)
        if place is None or slot not in (MASTER, *SLOTS[optimizer.rule(place.group)]):
            raise BadInput(f"slot {key!r} is not on this pserver", code="unknown_block")
        size = place.block.num_elements
        slots[key] = _read_block(body, ((key, "F32", (size,)),), entries, size)
    for name, state in read_states(body.frame.metadata[STATES_KEY]).items():
        if name not in layout.place:
            raise BadInput(f"block {name!r} is not on this pserver", code="unknown_block")
        slots[slot_key("", name)] = state
    return slots


def read_initial(
    body: Body, layout: ShardLayout, specs: Mapping[str, BufferSpec]
) -> tuple[dict[str, Tensor], dict[str, memoryview]]:
    """Return the blocks in a body, in their parameters' own dtypes, and its buffers, without a copy. Raises BadInput.

    `specs` are the buffers of this pserver.
    """
    entries = {entry.name: entry for entry in body.frame.tensors}
    blocks, buffers = {}, {}
    for name, entry in entries.items():
        place, spec = layout.place.get(name), specs.get(name)
        if spec is not None:
            _check_entry(f"buffer {name!r}", entry, spec.dtype, spec.shape)
            buffers[name] = body.view(entry)
        elif place is not None:
            size = place.block.num_elements
            blocks[name] = _read_block(body, ((name, place.dtype, (size,)),), entries, size).tensor()
        else:
            raise BadInput(f"block {name!r} is not on this pserver", code="unknown_block")
    return blocks, buffers


def _read_block(
    body: Body, expected: Sequence[WireTensor], entries: Mapping[str, TensorEntry], num_elements: int
) -> StagedBlock:
    found = _find_entries(expected, entries)
    return StagedBlock(body, [view for entry in found for view in view_tensors(body, [entry])], num_elements)


def _find_entries(expected: Sequence[WireTensor], entries: Mapping[str, TensorEntry]) -> list[TensorEntry]:
    """Return the entries of a block's tensors. Raises BadInput."""
    found = []
    for name, dtype, shape in expected:
        entry = entries.get(name)
        if entry is None:
            raise BadInput(
                f"the push contains a part of a block and must also contain {name!r}",
                code="malformed_frame", expected=f"{dtype} {list(shape)}",
            )  # fmt: skip
        _check_entry(f"block {name!r}", entry, dtype, shape)
        found.append(entry)
    return found


def _check_entry(what: str, entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise BadInput unless a tensor has this dtype and shape."""
    if entry.dtype != dtype:
        raise BadInput(f"{what} has another dtype", code="wrong_dtype", expected=dtype, actual=entry.dtype)
    if entry.shape != shape:
        raise BadInput(f"{what} has another shape", code="wrong_shape", expected=list(shape), actual=list(entry.shape))


def measure_largest_body(plan: SlicePlan, index: PserverIndex) -> int:
    """Return the bytes that a request about this shard contains at most, without its header."""
    assert plan.optimizer is not None  # the plan of a run always has an optimizer
    buffers = [spec for spec in plan.buffers if spec.pserver == index]
    num_kinds = max(len(SLOTS[rule]) for rule in plan.optimizer.rules) + 1  # slots and masters
    return max(
        plan.shard_bytes(index) + sum(spec.num_bytes for spec in buffers),
        plan.pushed_bytes(*plan.shards[index]),
        num_kinds * MASTER_BYTES * sum(block.num_elements for block in plan.shards[index]),
    )
