"""Compressed pushes: the error of one push is added to the next one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.encodings import PIECE, TORCH_DTYPES
from ps_protocol.vocabulary import Block
from ps_protocol.wire_types import GROUP, WireTypes
from trainer_client.client.error_feedback import ErrorFeedback, Remainder

SIZES = st.sampled_from([1, 2, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP + 3, PIECE, PIECE + GROUP + 5])


def encode(kind: str, gradient: Tensor, error: Tensor, topk: float = 0.1) -> list[Tensor]:
    """Encode with the error in `error`, and write the remaining error there."""
    remainder = Remainder(kind, len(gradient))
    remainder.kept.copy_(error)
    found = encode_with(kind, gradient, remainder, topk)
    remainder.resolve(is_applied=True)
    error.copy_(remainder.kept)
    return found


def encode_with(kind: str, gradient: Tensor, remainder: Remainder, topk: float = 0.1) -> list[Tensor]:
    tensors = WireTypes(push=kind, topk=topk).pushed("w.block0", "F32", len(gradient))
    found = [torch.full((count,), 77).to(TORCH_DTYPES[dtype]) for _, dtype, (count,) in tensors]
    remainder.encode(gradient, found)
    return found


def decode(kind: str, found: list[Tensor], num_elements: int) -> Tensor:
    """Decode by the definition of the types, without the code under test."""
    if kind == "int8":
        integers, scales = found
        return integers.float() * scales.repeat_interleave(GROUP)[:num_elements]
    values, indices = found
    return torch.zeros(num_elements).index_put((indices.long(),), values)


@settings(deadline=None)  # the first call of a kernel takes its time
@given(kind=st.sampled_from(["int8", "topk"]), size=SIZES, seed=st.integers(0, 99), exponent=st.integers(-20, 20))
def test_the_pushed_values_and_the_error_add_up_to_the_gradient(kind: str, size: int, seed: int, exponent: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    error = gradient.flip(0) / 8
    before = error.clone()
    pushed = decode(kind, encode(kind, gradient, error), size)
    torch.testing.assert_close(pushed + error, gradient + before, rtol=1e-6, atol=2.0 ** (exponent - 18))


def test_the_largest_elements_are_pushed_exactly_and_leave_no_error() -> None:
    gradient = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 0.0, 0.0, 0.0, 0.0, 0.0])
    error = torch.zeros(10)
    values, indices = encode("topk", gradient, error, topk=0.2)
    assert (indices.tolist(), values.tolist()) == ([1, 3], [-5.0, 3.0])
    assert error[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["int8", "topk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_pushed_as_such_and_leaves_no_error(kind: str, bad: float) -> None:
    gradient, error = torch.ones(1000), torch.zeros(1000)
    gradient[700] = bad
    found = encode(kind, gradient, error)
    assert not all(bool(tensor.float().isfinite().all()) for tensor in found)
    assert bool(error.isfinite().all())


def test_forget_discards_the_errors() -> None:
    feedback, block = ErrorFeedback(), Block("w", 0, 0, 4, 0)
    feedback.of(block, "int8").kept.fill_(3.0)
    feedback.reset()
    assert feedback.of(block, "int8").kept.tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ["int8", "topk"])
@given(fates=st.lists(st.sampled_from(["applied", "skipped", "refused"]), max_size=12), seed=st.integers(0, 99))
@settings(deadline=None)
def test_a_push_that_is_not_applied_leaves_the_error_as_it_was(kind: str, fates: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    feedback, block, size = ErrorFeedback(), Block("w", 0, 0, 1000, 0), 1000
    undisturbed = Remainder(kind, size)
    for fate in fates:
        gradient = torch.randn(size, generator=generator)
        pushed = encode_with(kind, gradient, feedback.of(block, kind))
        if fate == "refused":  # and pushed again: what is staged already has to be the same
            again = encode_with(kind, gradient, feedback.of(block, kind))
            assert all(map(torch.equal, pushed, again))
        feedback.resolve(is_applied=fate != "skipped")
        if fate != "skipped":
            assert all(map(torch.equal, pushed, encode_with(kind, gradient, undisturbed)))
            undisturbed.resolve(is_applied=True)
    assert torch.equal(feedback.of(block, kind).kept, undisturbed.kept)
