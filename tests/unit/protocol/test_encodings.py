"""Quantisation to eight bits per element: rounding, and equal sums at both ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.encodings import PIECE, add_delta, dequantise, pieces, quantise
from ps_protocol.wire_types import GROUP

SIZES = st.sampled_from([1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 7])


def quantised(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the integers, the scales and the rounding errors."""
    lacking = values.clone()
    integers, scales = torch.empty(len(values), dtype=torch.int8), torch.empty(-(-len(values) // GROUP))
    quantise(lacking, integers, scales)
    return integers, scales, lacking


@settings(deadline=None)
@given(size=SIZES, seed=st.integers(0, 99), exponent=st.integers(-148, 120))
def test_quantisation_is_off_by_half_a_step_at_most(size: int, seed: int, exponent: int) -> None:
    """Scales go down to subnormal numbers; smaller groups become 0."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    integers, scales, lacking = quantised(values)
    steps = scales.repeat_interleave(GROUP)[:size]
    off = (dequantise(integers, scales) - values).abs()
    assert bool(((off <= steps * 0.5001) | ((steps == 0) & (values.abs() < 4e-37))).all())
    assert torch.equal(lacking, values - dequantise(integers, scales))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite_has_a_scale_that_is_not_finite(bad: float) -> None:
    values = torch.ones(3 * GROUP)
    values[GROUP + 3] = bad
    _, scales, _ = quantised(values)
    assert scales.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("begin", [0, 1, 3, 63])
def test_a_difference_is_added_with_the_same_bits_wherever_it_lies(begin: int) -> None:
    """A product is rounded, then the sum is: no fused operation, in the last elements of a vector or anywhere."""
    size = PIECE + GROUP + 5
    generator = torch.Generator().manual_seed(begin)
    values = torch.randn(size, generator=generator)
    integers, scales, _ = quantised(torch.randn(size, generator=generator))
    somewhere = torch.zeros(size + 64)[begin : begin + size].copy_(values)
    add_delta(somewhere, integers, scales)
    product = integers.double() * scales.double().repeat_interleave(GROUP)[:size]
    assert torch.equal(somewhere, (values.double() + product.float().double()).float())


@given(st.integers(0, 3 * PIECE))
def test_pieces_are_all_elements_and_their_scales(num_elements: int) -> None:
    found = list(pieces(num_elements))
    assert sum(elements.stop - elements.start for elements, _ in found) == num_elements
    assert all(groups.start * GROUP == elements.start for elements, groups in found)
    assert not found or found[-1][1].stop == -(-num_elements // GROUP)
