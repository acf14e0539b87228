"""From a gradient to its bytes on the wire; what these leave out is kept, and pushed later.

Error feedback: Seide et al. 2014, "1-Bit Stochastic Gradient Descent" (Interspeech); Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD" (arXiv:1901.09847). Scales for groups of elements: Dettmers et al. 2021, "8-bit Optimizers via
Block-wise Quantization" (arXiv:2110.02861). The largest elements only: Stich et al. 2018, "Sparsified SGD with Memory"
(arXiv:1809.07599).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_protocol.quantisation import pieces, quantise
from ps_protocol.vocabulary import Block
from ps_protocol.wire_types import PushType


class ErrorFeedback:
    """What has not been pushed yet of each block, flat float32 tensors; for one trainer."""

    def __init__(self) -> None:
        self._errors: dict[str, Tensor] = {}

    def of(self, block: Block) -> Tensor:
        """Shape (num_elements,), zeros at first."""
        error = self._errors.get(block.name)
        if error is None:
            error = self._errors[block.name] = torch.zeros(block.num_elements)
        return error

    def forget(self) -> None:
        """Begin anew: the run has gone back."""
        for error in self._errors.values():
            error.zero_()


def encode_gradient(kind: PushType, source: Tensor, error: Tensor | None, destinations: Sequence[Tensor]) -> None:
    """Write a flat gradient to the tensors that it is on the wire (`SlicePlan.pushed`).

    `error`, without which it is only converted, is added to it first, and holds the rest afterwards. A gradient that
    is not finite is pushed as such, and leaves no error.
    """
    if error is None:
        destinations[0].copy_(source)
    elif kind == "int8":
        _quantise(source, error, *destinations)
    else:
        _sparsify(source, error, *destinations)


def _quantise(source: Tensor, error: Tensor, integers: Tensor, scales: Tensor) -> None:
    for elements, groups in pieces(len(source)):
        quantise(error[elements].add_(source[elements]), integers[elements], scales[groups])
    if not scales.sum().isfinite():
        error.zero_()


def _sparsify(source: Tensor, error: Tensor, values: Tensor, indices: Tensor) -> None:
    error.add_(source)
    largest = torch.topk(error.abs(), len(values), sorted=False).indices.sort().values
    indices.copy_(largest)
    torch.index_select(error, 0, largest, out=values)
    error[largest] = 0.0
    if not values.sum().isfinite():
        error.zero_()
