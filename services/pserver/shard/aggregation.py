"""The mean of contributions, whose rounding depends on the order of the ranks alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ps_protocol.encodings import Part, Rows, is_finite
from ps_protocol.errors import Ended
from ps_protocol.optimizers import LOWEST_RANK

from .bodies import view_bytes
from .layout import ShardLayout

PIECE = 1 << 18  # elements that are summed before they are scaled, so that they stay in the cache
SMALL = 1 << 12  # elements of a block whose sum takes less time than the call


class Aggregator:
    """The aggregation of contributions into a gradient, one flat float32 tensor of the layout, reused every round.

    Of sparse parameters it consists of rows.
    """

    def __init__(self, layout: ShardLayout, values: Tensor) -> None:
        """`values` are the values of the shard, which are only read."""
        self._layout = layout
        self._values = values
        self.allows_nonfinite = False  # else a gradient with NaN or infinity raises Ended (`non_finite_update`)
        self._is_checked = True  # by `_scale`, while a piece is in the cache
        self.rows: Mapping[str, Rows] = {}  # the newest gradient of sparse parameters, by block, float32
        self._gradient = torch.zeros(layout.num_dense)
        self._views = {place.name: self._gradient[place.begin : place.end] for place in layout.dense}

    def aggregate(
        self,
        contributions: Sequence[Mapping[str, Part]],
        rows: Sequence[Mapping[str, Rows]] = (),
        *,
        is_measured: bool = False,
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Average contributions, given in rank order. Return the gradient, and the blocks present in it.

        `rows` are the parts of sparse parameters, in the same order. Their mean goes to `self.rows`.

        A contribution maps block names to parts of shape (num_elements,), which are only read and may lie at any
        address. They are summed in float32 in the given order, the first one copied (so that -0.0 survives), and
        multiplied once by 1/n, n being the number of contributions. A contribution without a block counts as zeros, as
        in DDP, or as the current values of a buffer. A buffer of LOWEST_RANK is that of the first contribution. A block
        that no contribution has is not present; the gradient there is left over from an earlier round. The gradient is
        valid until the next call. It is checked for NaN and infinity, except in buffers: here, or if it `is_measured`
        in `sum_of_squares`, which follows. Raises Ended.
        """
        self._is_checked = not (is_measured or self.allows_nonfinite)
        scale = 1 / max(len(contributions), 1)
        present = []
        begin = end = 0  # not yet scaled; small blocks are summed, and scaled, together
        small: list[tuple[Tensor, list[Tensor]]] = []
        for place in self._layout.dense:
            parts = [blocks[place.name] for blocks in contributions if place.name in blocks]
            if not parts:
                continue
            if place.buffer_rule:
                values = self._values[place.begin : place.end]
                parts = [blocks.get(place.name, values) for blocks in contributions]
            present.append(place.name)
            if place.buffer_rule == LOWEST_RANK:  # not scaled
                self._views[place.name].copy_(parts[0][:])
                continue
            if end != place.step_begin or place.end - begin > PIECE:
                _sum_small(small)
                self._scale(begin, end, scale)
                begin = place.step_begin
            end = place.padded_end
            total = self._views[place.name]
            if place.end - place.begin <= SMALL:
                small.append((total, [part if isinstance(part, Tensor) else part[:] for part in parts]))
                continue
            if len(total) <= PIECE:
                _sum([part[:] for part in parts], total)
                continue
            for at in range(0, len(total), PIECE):
                _sum([part[at : at + PIECE] for part in parts], total[at : at + PIECE])
                self._scale(place.begin + at, min(place.begin + at + PIECE, place.end), scale)
            begin = end
        _sum_small(small)
        self._scale(begin, end, scale)
        found = {
            place.name: [blocks[place.name] for blocks in rows if place.name in blocks] for place in self._layout.sparse
        }
        self.rows = {name: _average_rows(its, scale) for name, its in found.items() if its}
        if self._is_checked:
            self._check(self.rows)
        return self._gradient, (*present, *self.rows)

    def sum_of_squares(self, present: Sequence[str]) -> float:
        """Return the sum of squares of these blocks of the newest gradient, without buffers, in float64.

        The slicing of the parameters changes its rounding only. Raises Ended for NaN and infinity.
        """
        sums = []
        for name in present:
            if self._layout.place[name].buffer_rule:
                continue
            view = self._newest(name)
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE].double()
                sums.append(float(torch.dot(piece, piece)))
        if not all(map(math.isfinite, sums)):
            self._check(present)
            return sum(sums)
        return math.fsum(sums)

    def scale(self, coefficient: float) -> None:
        """Multiply the newest gradient, in the tensor that `aggregate` has returned, by `coefficient`.

        The averaged buffers behind it stay unchanged.
        """
        self._gradient[: self._layout.num_stepped].mul_(coefficient)
        for rows in self.rows.values():
            rows.values.mul_(coefficient)

    def _newest(self, name: str) -> Tensor:
        """Return the newest gradient of a block, flat: of a sparse parameter, its rows."""
        return self.rows[name].values.view(-1) if name in self.rows else self._views[name]

    def encode(self, present: Sequence[str] | None) -> tuple[list[memoryview], dict[str, int]]:
        """Return the bytes of the newest gradient, not copied: all of it, or these blocks in the given order.

        Behind them are the rows of sparse parameters, of each block their indices and their values. The numbers of rows
        by block are returned, too.
        """
        dense = [self._gradient] if present is None else [self._views[n] for n in present if n in self._views]
        rows = {name: its for name, its in self.rows.items() if present is None or name in present}
        data = [*dense, *(tensor for its in rows.values() for tensor in (its.indices.int(), its.values.view(-1)))]
        return [view_bytes(tensor) for tensor in data], {name: len(its.indices) for name, its in rows.items()}

    def decode(self, data: memoryview, present: Sequence[str] | None, num_rows: Mapping[str, int]) -> Tensor:
        """Replace the gradient by an encoded one. Returns the whole gradient, valid until the next call."""
        logged = torch.frombuffer(data, dtype=torch.float32) if len(data) else torch.empty(0)
        views = [self._gradient] if present is None else [self._views[n] for n in present if n in self._views]
        sizes = [count * each for name, count in num_rows.items() for each in (1, self._layout.place[name].width)]
        dense, *rows = torch.split(logged, [sum(map(len, views)), *sizes])
        for view, part in zip(views, torch.split(dense, [*map(len, views)]), strict=True):
            view.copy_(part)
        pairs = zip(num_rows, rows[::2], rows[1::2], strict=True)
        self.rows = {
            name: Rows(indices.view(torch.int32).long(), values.view(-1, self._layout.place[name].width))
            for name, indices, values in pairs
        }
        return self._gradient

    def load_blocks(self, parts: Mapping[str, Tensor], rows: Mapping[str, Rows]) -> Tensor:
        """Copy the gradients of some blocks, without averaging. Returns the whole gradient, valid until the next call.

        `parts` are tensors of shape (num_elements,) in any floating dtype, `rows` are of sparse parameters. Raises
        Ended for NaN and infinity.
        """
        if parts:
            torch._foreach_copy_([self._views[name] for name in parts], list(parts.values()))
        self.rows = {name: _average_rows([its], 1.0) for name, its in rows.items()}
        self._check([*parts, *rows])
        return self._gradient

    def _scale(self, begin: int, end: int, scale: float) -> None:
        if scale != 1 and begin < end:
            self._gradient[begin:end].mul_(scale)  # padding stays zero
        if self._is_checked and not is_finite(self._gradient[begin : min(end, self._layout.num_stepped)]):
            self._check(self._views)

    def _check(self, names: Iterable[str]) -> None:
        """Raise Ended if a block of the gradient holds NaN or infinity, which no pserver may leave out by itself."""
        checked = () if self.allows_nonfinite else names
        if (culprit := next((name for name in checked if not is_finite(self._newest(name))), None)) is not None:
            raise Ended(
                f"NaN or infinity in the update of block {culprit!r}: finite gradients have overflowed, or a client "
                "does not check what it pushes",
                code="non_finite_update",
            )


def _sum_small(blocks: list[tuple[Tensor, list[Tensor]]]) -> None:
    """Sum the parts of each block to its total, and clear the list. One call for many blocks takes less time."""
    if blocks:
        torch._foreach_copy_([total for total, _ in blocks], [parts[0] for _, parts in blocks])
    for number in range(1, max((len(parts) for _, parts in blocks), default=0)):
        further = [(total, parts[number]) for total, parts in blocks if number < len(parts)]
        torch._foreach_add_([total for total, _ in further], [part for _, part in further])
    blocks.clear()


def _average_rows(parts: Sequence[Rows], scale: float) -> Rows:
    """Return the sum of each row that a part has, in the order of the parts, times `scale`, in memory of its own."""
    first, *rest = parts
    if not rest:
        return Rows(first.indices.long(), first.values.float() * scale)
    indices, places = torch.unique(torch.cat([part.indices for part in parts]).long(), return_inverse=True)
    total = torch.zeros(len(indices), first.values.shape[1])
    for part, at in zip(parts, places.split([len(part.indices) for part in parts]), strict=True):
        total.index_add_(0, at, part.values.float())
    return Rows(indices, total.mul_(scale))


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    first, *rest = parts
    if rest and first.dtype == rest[0].dtype == torch.float32:
        torch.add(first, rest.pop(0), out=total)  # the same as copy and add, in one pass
    else:
        total.copy_(first)
    for part in rest:
        total.add_(part)  # makes a float32 copy of a bfloat16 or float16 part, which has PIECE elements at most
