"""Memory that pulls are written to: that of the parameters where it has their form on the wire, else a copy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.encodings import PIECE, TORCH_DTYPES, add_delta
from ps_protocol.errors import BadInput
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Block, Round
from ps_protocol.wire_types import SCALES, quantised

from .device_copies import ParameterCopies, host_memory, is_away
from .tensors import has_wire_layout, writable_bytes


class Destinations:
    """Sets of host tensors by parameter name, one for each step that may be on its way, in the dtype on the wire.

    The sets are the parameters' own memory if the script computes nothing meanwhile. A delta is added to pulled values,
    which the script must not have changed: then the sets are separate, too.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], plan: SlicePlan, max_delay: int, *, are_awaited: bool = False
    ) -> None:
        """Make the sets. `are_awaited`: each computation with a parameter waits for its new value first."""
        self._parameters = parameters
        self._copies = ParameterCopies(are_awaited=are_awaited)
        self._dtypes = {name: TORCH_DTYPES[plan.pulled(name)] for name in parameters}
        self._is_apart = max_delay > 0 or plan.wire.pulls_deltas
        self.sets: list[dict[str, Tensor]] = [
            {name: host_memory(p, self._dtypes[name]) for name, p in parameters.items()}
            for _ in range(max_delay + 1 if self._is_apart else 0)
        ]
        self.follow_parameters()

    def follow_parameters(self) -> None:
        """Use the memory that the parameters have now, unless the sets are separate."""
        if not self._is_apart:
            self.sets = [make_destinations(self._parameters, self._dtypes)]

    def begin_step(self) -> None:
        """Begin a step, whose pull will write to a set. Blocks for copies from there to a device."""
        self._copies.wait_for_copies(self._parameters)

    def write_back(self, index: int, names: Iterable[str], *, is_noticed: bool = True) -> None:
        """Write the tensors of a set back to these parameters.

        Unless `is_noticed`, autograd does not see the write: the graph of an earlier pass stays valid.
        """
        taken = {name: self._parameters[name] for name in names}
        seen = taken if is_noticed else {name: parameter.data for name, parameter in taken.items()}
        write_back(seen, self.sets[index], self._copies)


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
    written = []  # by the network already
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.data_ptr() == pulled[name].data_ptr():
                written.append(tensor)
            elif is_away(tensor):
                copies.copy(tensor, pulled[name])
            else:
                tensor.copy_(pulled[name])
    # Autograd did not see that; a second backward through the old graph must fail.
    torch.autograd.graph.increment_version(written)


class PullProgress:
    """The complete parameters of one pull: the I/O thread counts blocks, and another thread waits."""

    def __init__(self, blocks_of: Mapping[str, Sequence[Block]]) -> None:
        """Count the blocks of each parameter, by its name."""
        self._parameter_of = {block.name: name for name, blocks in blocks_of.items() for block in blocks}
        self._missing = {name: len(blocks) for name, blocks in blocks_of.items()}
        self._complete: set[str] = set()
        self._is_over = False
        self._changed = threading.Condition()

    def mark_complete(self, block: str) -> None:
        """Note that a block is complete. It may be repeated, with the same bytes, after a broken reply."""
        if block in self._complete:
            return
        self._complete.add(block)
        name = self._parameter_of[block]
        self._missing[name] -= 1
        if not self._missing[name]:
            with self._changed:
                self._changed.notify_all()

    def end(self) -> None:
        """Note that no further block will come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, name: str) -> bool:
        """Wait until this parameter is complete; return False if the pull has ended without it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._missing[name])
        return not self._missing[name]


@dataclass
class ShardDestination:
    """The memory that the blocks of one pserver are pulled to.

    With deltas the blocks are flat float32 memory that keeps the pulled values.
    """

    blocks: Mapping[str, memoryview]  # by name: writable bytes
    deltas: Deltas | None = None
    version: Round | None = None  # that the memory holds; None: unknown, or the script may have changed it

    def forget_version(self) -> Round | None:
        """Return the version, which is unknown from now on."""
        version, self.version = self.version, None
        return version


class Deltas:
    """Memory for the deltas of one pserver's blocks, made once: about 26 bytes for 100 bytes of values.

    Deltas are received separately, and added once all of them have arrived. A reply that breaks off leaves the values
    unchanged, and may be requested again.
    """

    def __init__(self, values: Mapping[str, memoryview]) -> None:
        """Make the memory for float32 blocks; `values` are their bytes by name, which hold pulled values only."""
        self.memory: dict[str, memoryview] = {}  # by the name of a tensor in a frame
        self._blocks = {}
        for name, data in values.items():
            block = torch.frombuffer(data, dtype=torch.float32)
            tensors = quantised(name, len(block))
            integers, scales = (
                torch.empty(count, dtype=TORCH_DTYPES[dtype], device="cpu") for _, dtype, (count,) in tensors
            )
            self.memory[name], self.memory[name + SCALES] = writable_bytes(integers), writable_bytes(scales)
            self._blocks[name] = block, integers, scales

    async def add(self, received: Collection[str]) -> None:
        """Add the received deltas (names of tensors) to the values. An error may leave some of them added.

        Yields to other tasks of the loop now and then. Raises BadInput before anything is added.
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
                await asyncio.sleep(0)
