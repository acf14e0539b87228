"""Gradients in one dimension: from where they lie, or from memory that is made once."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import BadModel
from trainer_client.pushing.flattening import Flattening


def test_what_lies_in_order_is_sent_from_there() -> None:
    gradient = torch.arange(6.0).view(2, 3)
    flat = Flattening().flat("weight", gradient)
    assert (flat.shape, flat.data_ptr()) == ((6,), gradient.data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_otherwise_is_copied_to_the_same_memory_each_time(dtype: torch.dtype) -> None:
    flattening = Flattening()
    places = set()
    for factor in (1, 2, 3):
        gradient = (
            torch.arange(24, dtype=dtype).mul(factor).view(1, 4, 3, 2).contiguous(memory_format=torch.channels_last)
        )
        flat = flattening.flat("weight", gradient)
        assert flat.tolist() == [factor * n for n in range(24)]
        places.add(flat.data_ptr())
    assert len(places) == 1
    other = flattening.flat("bias", gradient)
    assert other.data_ptr() not in places


def test_another_kind_of_gradient_has_other_memory() -> None:
    flattening = Flattening()
    flattening.flat("weight", torch.ones(3, 2).t())
    assert flattening.flat("weight", torch.ones(3, 2, dtype=torch.float64).t()).dtype == torch.float64
    assert flattening.flat("weight", torch.ones(5, 2).t()).shape == (10,)


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(BadModel, match="the gradient of 'embedding' is sparse"):
        Flattening().flat("embedding", torch.ones(2, 2).to_sparse())
