"""Memory for collectives: gradients that are summed, tensors that one process broadcasts, and facts of a round."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.vocabulary import Rank

from ..session.collectives import Collectives

BYTES = 4  # of a float32 element
PIECE = 1 << 16  # elements that are squared at once, in memory that an allocator keeps
PART_BYTES = 32 * 1024 * 1024  # the most bytes of one broadcast
ALIGNMENT_BYTES = 16  # of each tensor in a broadcast, for any dtype
FACTS = 4  # of each rank


class FlatBucket:
    """The gradients of several parameters in one flat tensor, last layers first."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Allocate the memory; `sizes` are the numbers of elements by parameter name."""
        self.flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=device)  # (sum of sizes,)
        parts = torch.split(self.flat, list(sizes.values()))
        self.parts = dict(zip(sizes, parts, strict=True))  # name -> (size,) float32

    def fill(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy flat gradients of any dtype into the bucket, and zeros for parameters without one."""
        for name, part in self.parts.items():
            if name in gradients:
                part.copy_(gradients[name])
            else:
                part.zero_()

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares of all elements, a float64 scalar on their device."""
        pieces = (piece.double() for piece in torch.split(self.flat, PIECE))
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()


def cut_buckets(parameters: Mapping[str, Tensor], bucket_bytes: int, device: torch.device) -> list[FlatBucket]:
    """Return buckets of about `bucket_bytes` for all parameters, the last ones first.

    A parameter is never cut: one that is larger has a bucket of its own.

    >>> shapes = {"a": torch.empty(10), "b": torch.empty(2, 5), "c": torch.empty(10)}
    >>> [list(bucket.parts) for bucket in cut_buckets(shapes, 80, torch.device("cpu"))]
    [['c', 'b'], ['a']]
    """
    groups: list[dict[str, int]] = [{}]
    for name, parameter in reversed(list(parameters.items())):
        if groups[-1] and BYTES * (sum(groups[-1].values()) + parameter.numel()) > bucket_bytes:
            groups.append({})
        groups[-1][name] = parameter.numel()
    return [FlatBucket(group, device) for group in groups if group]


class BroadcastBuffer:
    """A packed copy, on one device, of tensors of any dtype and device, whose shapes and dtypes stay."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._parts = torch.split(flat, PART_BYTES)
        self._views = {
            name: memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), memory in zip(tensors.items(), torch.split(flat, sizes), strict=True)
        }

    @torch.no_grad()
    def broadcast(self, collectives: Collectives, source: int, *, sends: bool) -> None:
        """Broadcast the tensors of process `source`, which alone `sends`. Blocks for all processes, which call it.

        The others find the values with `write_back`.
        """
        for name, view in self._views.items() if sends else ():
            view.copy_(self._tensors[name])
        for part in self._parts:
            collectives.broadcast(part, source)
        collectives.finish()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the received values to the tensors."""
        for name, view in self._views.items():
            self._tensors[name].copy_(view)


# ---------------------------------------------------------------- the facts of a round


@dataclass(frozen=True)
class Tally:
    """The reduced facts of all ranks, which are trainers of a ring or processes of a host, about a round."""

    present: list[str]  # parameters with a gradient on any rank
    nonfinite: list[Rank]  # ranks whose gradients hold NaN or infinity
    lowest: Rank | None  # the lowest rank that had a batch
    num_active: int  # ranks that had a batch; the mean is theirs
    has_same_terms: bool  # on all ranks that had a batch
    source: Rank | None  # the lowest rank that has written parameters on purpose: all continue from its values


class TallyVector:
    """A float32 vector with the number of gradients of each parameter, and four facts of each rank as in `fill`.

    Its sum lets all processes of a group decide alike about a round.
    """

    def __init__(self, names: Sequence[str], rank: Rank, size: int, device: torch.device) -> None:
        self._names = names
        self._rank, self._size = rank, size
        self.vector = torch.zeros(len(names) + FACTS * size, dtype=torch.float32, device=device)

    def fill(
        self,
        present: Collection[str],
        *,
        is_finite: bool = True,
        is_active: bool = True,
        terms: object = None,
        has_written: bool = False,
    ) -> None:
        """Fill the vector with the facts of this rank about the next round. An all_reduce sums it.

        `terms` are what must be the same on all ranks.
        """
        facts = [[0.0] * self._size for _ in range(FACTS)]
        values = (not is_finite, is_active, _digest(terms), has_written)
        for fact, value in zip(facts, values, strict=True):
            fact[self._rank] = float(value)
        counts = [float(name in present) for name in self._names]
        flat = [*counts, *(value for fact in facts for value in fact)]
        self.vector.copy_(torch.tensor(flat, dtype=torch.float32, device="cpu"))

    def read(self) -> Tally:
        """Return the facts of all ranks from the summed vector."""
        counts, of_ranks = torch.split(self.vector.cpu(), [len(self._names), FACTS * self._size])
        not_finite, active, digests, written = of_ranks.view(FACTS, self._size).tolist()
        return Tally(
            present=[name for name, count in zip(self._names, counts.tolist(), strict=True) if count > 0],
            nonfinite=[rank for rank, count in enumerate(not_finite) if count > 0],
            lowest=next((rank for rank, is_active in enumerate(active) if is_active), None),
            num_active=int(sum(active)),
            has_same_terms=len({digest for digest, is_active in zip(digests, active, strict=True) if is_active}) <= 1,
            source=next((rank for rank, has_written in enumerate(written) if has_written), None),
        )


def _digest(terms: object) -> int:
    """Return 24 bits that differ for other terms; a float32 holds them exactly."""
    return zlib.crc32(repr(terms).encode()) >> 8
