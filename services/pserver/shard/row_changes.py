"""The rows of sparse parameters that the newest updates have changed, so that a pull brings no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from ps_protocol.encodings import Rows

from .layout import ShardLayout

MAX_UPDATES = 1024  # of a block that are remembered


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changed rows of one block in all updates behind a position. Replaced as a whole, since threads read it."""

    after: int
    updates: tuple[tuple[int, Tensor], ...] = ()  # positions, and indices of shape (k,), int64
    num_indices: int = 0  # of all updates


class RowChanges:
    """The changed rows of each sparse block.

    A position counts updates: rounds, or in asynchronous modes steps from a random beginning, so that none is one of a
    pserver's earlier process. At most as many indices are remembered as a block has rows.
    """

    def __init__(self, layout: ShardLayout, position: int) -> None:
        """Begin at this position, before which nothing is known."""
        self.position = position
        self._num_rows = {place.name: place.block.num_elements // place.width for place in layout.sparse}
        self._changes = dict.fromkeys(self._num_rows, _Changes(position))
        self.num_touched = dict.fromkeys(self._num_rows, 0)  # rows in the newest update of each block
        self.num_newest = 0  # rows in the newest update, of all blocks

    def __repr__(self) -> str:
        return f"<RowChanges [{len(self._num_rows)} blocks | position {self.position}]>"

    def advance(self, rows: Mapping[str, Rows], whole: Iterable[str] = ()) -> None:
        """Note an update that has changed these rows, and `whole` blocks, some of them sparse, after their values."""
        position = self.position + 1
        self.num_newest = sum(len(its.indices) for its in rows.values())
        for name, its in rows.items():
            self.num_touched[name] = len(its.indices)
            if len(its.indices):
                self._changes[name] = self._append(name, position, its.indices)
        for name in self._changes.keys() & whole:
            self._changes[name] = _Changes(position)
        self.position = position

    def _append(self, name: str, position: int, indices: Tensor) -> _Changes:
        known = self._changes[name]
        after, updates = known.after, (*known.updates, (position, indices))
        num_indices = known.num_indices + len(indices)
        while len(updates) > MAX_UPDATES or num_indices > self._num_rows[name]:
            (after, dropped), *rest = updates
            num_indices, updates = num_indices - len(dropped), tuple(rest)
        return _Changes(after, updates, num_indices)

    def find(self, name: str, base: int | None) -> Tensor | None:
        """Return the indices, (k,) int64, of the rows that have changed since a position; None if that is not known."""
        known = self._changes[name]
        if base is None or not known.after <= base <= self.position:
            return None
        newer = takewhile(lambda update: update[0] > base, reversed(known.updates))  # a large table has many others
        found = [indices for _, indices in newer]
        if len(found) == 1:
            return found[0]
        return torch.unique(torch.cat(found)) if found else torch.empty(0, dtype=torch.int64)
