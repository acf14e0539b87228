"""Staged blocks as torch sees them: views into received bodies, never copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from ps_protocol.frames import TensorEntry
from ps_protocol.vocabulary import Rank, Round

from .bodies import Body
from .contribution import Contribution
from .finite import is_finite

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D tensor, not copied; valid and changing as long as the tensor."""
    return tensor.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True, eq=False)
class StagedBlock:
    """One block of a received body. Holding it keeps the body's buffer from being reused."""

    body: Body
    entry: TensorEntry

    def tensor(self) -> Tensor:
        """View of shape (num_elements,) in the wire's dtype; valid while this block is held, not to be written."""
        return torch.frombuffer(
            self.body.buffer,
            dtype=TORCH_DTYPES[self.entry.dtype],
            count=self.entry.shape[0],
            offset=self.body.frame.data_begin + self.entry.begin,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StagedBlock) and self.body.view(self.entry) == other.body.view(other.entry)


def digest_contribution(
    digest: xxhash.xxh3_128, identity: tuple[Round, Rank], contribution: Contribution[StagedBlock]
) -> None:
    """Add everything that a trainer has staged."""
    digest.update(repr((identity, contribution.num_blocks, contribution.hyper_parameters)).encode())
    for name, block in sorted(contribution.blocks.items()):
        digest.update(name.encode())
        digest.update(block.body.view(block.entry))


def find_nonfinite(blocks: Mapping[str, StagedBlock]) -> str | None:
    """Return the name of a block that holds NaN or infinity, if there is one."""
    return next((name for name, block in blocks.items() if not is_finite(block.tensor())), None)
