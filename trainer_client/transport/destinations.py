"""Memory that pulls are written to: that of the parameters where it has their form on the wire, else a copy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ps_protocol.encodings import PIECE, TORCH_DTYPES, add_delta
from ps_protocol.errors import BadInput
from ps_protocol.frames import TensorEntry
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import DTYPE_BYTES, Block, Round
from ps_protocol.wire_types import ROWS, SCALES, quantised

from .device_copies import ParameterCopies, host_memory, is_away
from .tensors import has_wire_layout, writable_bytes
from .work import CHECK_SECONDS, Signal, Work


def make_destinations(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the memory that each tensor is pulled to, in the dtype on the wire: its own, or a copy."""
    return {
        name: tensor.detach()
        if has_wire_layout(tensor) and tensor.dtype == dtypes[name]
        else host_memory(tensor, dtypes[name])
        for name, tensor in tensors.items()
    }


def write_back(tensors: Mapping[str, Tensor], pulled: Mapping[str, Tensor], copies: ParameterCopies) -> None:
    """Copy pulled values to tensors with other memory: on other devices, or in other memory formats."""
    written_in_place = []
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.data_ptr() == pulled[name].data_ptr():
                written_in_place.append(tensor)
            elif is_away(tensor):
                copies.copy(tensor, pulled[name])
            else:
                tensor.copy_(pulled[name])
    # Autograd has not seen what the network wrote; a second backward pass through the old graph must fail.
    torch.autograd.graph.increment_version(written_in_place)


class PullProgress:
    """The complete parameters of one pull: the thread of the requests counts blocks, and another one waits."""

    def __init__(self, blocks_of: Mapping[str, Sequence[Block]]) -> None:
        """Count the blocks of each parameter, by its name."""
        self._parameter_of = {block.name: name for name, blocks in blocks_of.items() for block in blocks}
        self._missing = {name: len(blocks) for name, blocks in blocks_of.items()}
        self._complete: set[str] = set()
        self._is_over = False
        self._changed = Signal()

    def mark_complete(self, block: str) -> None:
        """Note that a block is complete. It may be repeated, with the same bytes, after a broken reply."""
        if block in self._complete:
            return
        self._complete.add(block)
        name = self._parameter_of[block]
        self._missing[name] -= 1
        if not self._missing[name]:
            self._changed.set()

    def end(self) -> None:
        """Note that no further block will come."""
        self._is_over = True
        self._changed.set()

    def wait(self, name: str) -> bool:
        """Wait until this parameter is complete; return False if the pull has ended without it."""
        while self._missing[name] and not self._is_over:
            self._changed.wait(CHECK_SECONDS)
        return not self._missing[name]


@dataclass
class ShardDestination:
    """The memory that the blocks of one pserver are pulled to.

    With deltas the blocks are flat float32 memory that keeps the pulled values.
    """

    blocks: Mapping[str, memoryview]  # writable bytes, by block name
    rows: Mapping[str, RowsDestination] = field(default_factory=dict)  # the blocks of sparse parameters
    deltas: Deltas | None = None
    base: Round | None = None  # the version in the memory; None: unknown, or the script may have changed it
    received: Collection[str] = ()  # the blocks that the newest pull has written; it leaves out unchanged ones


def make_shard_destinations(
    plan: SlicePlan, memory: Mapping[str, memoryview], *, keeps_values: bool = False
) -> list[ShardDestination]:
    """Return for each pserver the memory of its blocks within that of whole dense parameters (name -> bytes).

    `keeps_values`: the memory keeps the pulled values, so that deltas may be added, if the run pulls deltas.
    """
    result = []
    for shard in plan.shards:
        blocks, rounded, rows = {}, {}, {}
        for block in shard:
            if plan.parameter[block.parameter].is_sparse:
                rows[block.name] = RowsDestination(block, plan)
            elif block.parameter in memory:
                dtype = plan.pulled(block.parameter)
                begin, end = block.begin * DTYPE_BYTES[dtype], block.end * DTYPE_BYTES[dtype]
                blocks[block.name] = memory[block.parameter][begin:end]
                if dtype == "F32" and block.parameter not in plan.buffer_rules:
                    rounded[block.name] = blocks[block.name]
        deltas = Deltas(rounded) if keeps_values and plan.wire.pulls_deltas else None
        result.append(ShardDestination(blocks, rows, deltas))
    return result


_PulledRows: TypeAlias = tuple[Tensor | None, Tensor]  # indices of shape (k,) int32, values of shape (k, width)


class RowsDestination:
    """The memory that a block of a sparse parameter is pulled to: its changed rows, or all, made for each pull.

    From there it is written to the parameter once the pull has ended.
    """

    def __init__(self, block: Block, plan: SlicePlan) -> None:
        self.parameter = block.parameter
        self._width = plan.parameter[block.parameter].width
        self._begin, self._end = block.begin // self._width, block.end // self._width
        self._dtype = TORCH_DTYPES[plan.pulled(block.parameter)]
        self._incoming: _PulledRows | None = None  # of the newest frame; without indices: all rows
        self._arrived: _PulledRows | None = None  # None: no row has changed

    def make_room(self, name: str, entries: Mapping[str, TensorEntry]) -> dict[str, memoryview]:
        """Return memory for the tensors of this block in a frame. Raises BadInput if its values come before its rows.

        A frame may be received again, and what has arrived before stays until it is complete.
        """
        indices, values = entries.get(name + ROWS), entries.get(name)
        if values is None:
            self._incoming = self._arrived = None
            return {}
        if indices is None:
            of_rows, num_rows = None, self._end - self._begin
        else:
            if indices.begin > values.begin:
                raise BadInput(f"the rows of block {name!r} must come before its values", code="malformed_frame")
            num_rows = math.prod(indices.shape)
            of_rows = torch.empty(num_rows, dtype=torch.int32, device="cpu")
        new = torch.empty((num_rows, self._width), dtype=self._dtype, device="cpu")
        self._incoming = of_rows, new
        room = {} if of_rows is None else {name + ROWS: writable_bytes(of_rows)}
        return {**room, name: writable_bytes(new)}

    def complete(self) -> None:
        """Note that all values of the frame have been received."""
        self._arrived = self._incoming

    def read(self) -> tuple[Tensor, Tensor] | None:
        """Return what the newest pull has brought: indices of rows of the parameter, (k,) int64, and values."""
        if self._arrived is None:
            return None
        indices, values = self._arrived
        return self._begin + (torch.arange(len(values)) if indices is None else indices.long()), values

    def write_to(self, parameter: Tensor) -> None:
        """Write what the newest pull has brought to the parameter. May be repeated."""
        if self._arrived is None:
            return
        indices, values = self._arrived
        rows = parameter.detach().view(-1, self._width)[self._begin : self._end]
        values = values.to(parameter.device, parameter.dtype)
        if indices is None:
            rows.copy_(values)
        elif has_wire_layout(parameter):  # whole rows are moved, which takes half of the time of single elements
            _view_rows(rows)[indices.numpy()] = _view_rows(values)
            torch.autograd.graph.increment_version(rows)
        else:
            rows.index_copy_(0, indices.to(parameter.device).long(), values)


def _view_rows(table: Tensor) -> np.ndarray:
    """Return a view of shape (rows,), each element of which is a whole row, as bytes."""
    width = table.shape[1] * table.itemsize
    return table.view(torch.uint8).numpy().view(f"V{width}")[:, 0]


class Deltas:
    """Memory for the deltas of one pserver's blocks, made once: about 26 bytes for 100 bytes of values.

    Deltas are received separately, and added once all of them have arrived. A reply that breaks off leaves the values
    unchanged, and may be requested again.
    """

    def __init__(self, values: Mapping[str, memoryview]) -> None:
        """Make the memory for float32 blocks; `values` are their bytes by name, which hold pulled values only."""
        self.memory: dict[str, memoryview] = {}  # writable bytes, by the name of the tensor in a frame
        self._blocks = {}
        for name, data in values.items():
            block = torch.frombuffer(data, dtype=torch.float32)
            tensors = quantised(name, len(block))
            integers, scales = (
                torch.empty(count, dtype=TORCH_DTYPES[dtype], device="cpu") for _, dtype, (count,) in tensors
            )
            self.memory[name], self.memory[name + SCALES] = writable_bytes(integers), writable_bytes(scales)
            self._blocks[name] = block, integers, scales

    def add(self, received: Collection[str]) -> Work[None]:
        """Add the received deltas (names of tensors) to the values. An error may leave some of them added.

        Lets other work go on now and then. Raises BadInput before anything is added.
        """
        names = [name for name in received if name in self._blocks]
        if set(received) != {*names, *(name + SCALES for name in names)}:
            raise BadInput(
                "a delta must have integers and scales for each block",
                code="malformed_frame",
                actual=sorted(received)[:8],
            )
        num_elements = 0
        for name in names:
            add_delta(*self._blocks[name])
            num_elements += len(self._blocks[name][0])
            if num_elements >= PIECE:
                num_elements = 0
                yield 0.0
