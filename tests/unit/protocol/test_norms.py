"""Global norms: their header, their sum, and the clip coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.norms import MAX_TEXT, AgreedNorm, ShardNorm, agree, clip_coefficient

from ...raising import raises_code

pytestmark = pytest.mark.clip

DIGEST = "5f0c9e7d21ab0042"
squares = st.floats(min_value=0, max_value=1e90)  # of a float32 gradient it is far less
any_squares = squares | st.sampled_from([math.nan, math.inf])


@given(st.lists(any_squares, min_size=1, max_size=8), st.randoms())
def test_the_sum_does_not_depend_on_the_order(parts: list[float], chance: object) -> None:
    norms = [ShardNorm(DIGEST, part) for part in parts]
    agreed = agree(norms)
    chance.shuffle(norms)  # type: ignore[attr-defined]
    other = agree(norms)
    assert agreed is not None
    assert other is not None
    assert {repr(one.total) for one in (*agreed, *other)} == {repr(agreed[0].total)}
    assert [repr(one.own.sum_of_squares) for one in agreed] == [repr(part) for part in parts]


@given(st.lists(any_squares, min_size=1, max_size=4))
def test_a_norm_survives_its_header_exactly(parts: list[float]) -> None:
    for one in agree([ShardNorm(DIGEST, part) for part in parts]) or ():
        header = one.to_header()
        assert len(header) <= MAX_TEXT
        back = AgreedNorm.from_header(header)
        assert back.own.is_same(one.own)
        assert repr(back.total) == repr(one.total)
        assert math.isnan(back.norm) or back.norm >= 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        DIGEST,
        f"{DIGEST} 1.0 2.0 3.0",
        " 1.0 2.0",
        "di/gest 1.0 2.0",
        f"{DIGEST} 1.0 zwei",
        f"{DIGEST} -1.0 2.0",
        f"{DIGEST} 2.0 1.0",  # a sum that is smaller than its part
        f"{DIGEST} nan 1.0",
        f"{DIGEST} nan inf",
        f"{DIGEST} 1.0 -inf",
        f"{DIGEST} 1.0 {'2' * MAX_TEXT}",
        f"{DIGEST} 1.0 ²",
    ],
)
def test_a_malformed_norm_is_a_bad_header(text: str) -> None:
    with raises_code("bad_header", match="gradpost-norm"):
        AgreedNorm.from_header(text)


def test_norms_of_different_contributions_are_not_added() -> None:
    assert agree([ShardNorm("a", 1.0), ShardNorm("b", 1.0)]) is None
    assert not ShardNorm("a", 1.0).is_same(ShardNorm("b", 1.0))
    assert not ShardNorm("a", 1.0).is_same(ShardNorm("a", math.nextafter(1.0, 2.0)))
    assert ShardNorm("a", math.nan).is_same(ShardNorm("a", math.nan))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_the_clip_coefficient_is_that_of_torch(values: list[float], max_norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    expected = float(torch.nn.utils.clip_grad_norm_([parameter], max_norm))
    norm = math.sqrt(math.fsum(value * value for value in values))
    assert norm == pytest.approx(expected)
    clipped = torch.tensor(values, dtype=torch.float64) * clip_coefficient(norm, max_norm)
    torch.testing.assert_close(parameter.grad, clipped)


def test_the_clip_coefficient_of_a_norm_that_is_not_finite_or_0_is_that_of_torch() -> None:
    assert clip_coefficient(math.inf, 1.0) == 0.0
    assert math.isnan(clip_coefficient(math.nan, 1.0))
    assert clip_coefficient(0.0, 1e-9) == pytest.approx(1e-3)  # as torch has it: the norm is never quite 0
