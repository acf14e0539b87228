"""A staged gradient as the aggregator reads it: any range of its elements, as a tensor, whatever was on the wire."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ps_protocol.errors import BadInput
from ps_protocol.quantisation import dequantise
from ps_protocol.wire_types import GROUP


class Part(Protocol):
    """What one trainer pushed of one block; only read."""

    @property
    def shape(self) -> torch.Size:
        """(num_elements,), of the block."""

    def __getitem__(self, elements: slice) -> Tensor:
        """The elements in a range that begins on a multiple of 256, as a floating tensor; maybe a view."""


class QuantisedPart:
    """int8 with a scale for each 256 elements; decoded range by range, so that never much of it is."""

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        self._integers, self._scales = integers, scales

    @property
    def shape(self) -> torch.Size:
        """See Part."""
        return self._integers.shape

    def __getitem__(self, elements: slice) -> Tensor:
        """See Part."""
        begin, end, _ = elements.indices(len(self._integers))
        return dequantise(self._integers[begin:end], self._scales[begin // GROUP : -(-end // GROUP)])


class SparsePart:
    """Some elements, at increasing indices; the others are 0."""

    def __init__(self, values: Tensor, indices: Tensor, num_elements: int) -> None:
        self._values, self._indices, self._num_elements = values, indices, num_elements

    def check(self) -> None:
        """Raise BadInput unless the indices increase and lie within the block."""
        indices = self._indices
        is_sorted = bool((indices[1:] > indices[:-1]).all())
        if not is_sorted or not 0 <= int(indices[0]) <= int(indices[-1]) < self._num_elements:
            raise BadInput(
                "the indices of a sparse block have to increase, from 0 to below its size", code="malformed_frame"
            )

    @property
    def shape(self) -> torch.Size:
        """See Part."""
        return torch.Size((self._num_elements,))

    def __getitem__(self, elements: slice) -> Tensor:
        """See Part."""
        begin, end, _ = elements.indices(self._num_elements)
        bounds = torch.tensor([begin, end], dtype=self._indices.dtype)
        first, last = torch.searchsorted(self._indices, bounds).tolist()
        dense = torch.zeros(end - begin)
        dense[(self._indices[first:last] - begin).long()] = self._values[first:last]
        return dense
