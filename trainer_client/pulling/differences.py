"""Pulls that are differences to the values of the round before: received apart, and added once all of them are there.

So a reply that breaks off leaves the values as they were, and the same reply can be asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import torch

from ps_protocol.errors import BadInput
from ps_protocol.quantisation import PIECE, add_delta
from ps_protocol.wire_types import SCALES, quantised

from ..tensors import TORCH_DTYPES, writable_bytes


class Differences:
    """Memory for those of one pserver's blocks, made once: some 26 bytes for 100 of the values."""

    def __init__(self, values: Mapping[str, memoryview]) -> None:
        """`values` are the bytes of float32 blocks by name, which hold what was pulled and nothing else."""
        self.memory: dict[str, memoryview] = {}  # by the name of a tensor in a frame: where it is received
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
        """Add what has been received (names of tensors) to the values; on an error some are added, and some are not.

        Others of the loop have their turn now and then. Raises BadInput, before anything is added.
        """
        names = [name for name in received if name in self._blocks]
        if set(received) != {*names, *(name + SCALES for name in names)}:
            raise BadInput("a difference has integers and scales", code="malformed_frame", actual=sorted(received)[:8])
        num_elements = 0
        for name in names:
            add_delta(*self._blocks[name])
            num_elements += len(self._blocks[name][0])
            if num_elements >= PIECE:
                num_elements = 0
                await asyncio.sleep(0)
