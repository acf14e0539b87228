from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.optimizers import OptimizerSpec
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.pserver.aggregation import PIECE, Aggregator
from services.pserver.layout import ShardLayout

from .oracle import DTYPES, average


def make_aggregator(*sizes: int, dtype: str = "F32") -> tuple[Aggregator, ShardLayout]:
    parameters = [ParameterSpec(f"p{i}", (size,), dtype) for i, size in enumerate(sizes)]
    layout = ShardLayout(make_plan(parameters, 1), 0)
    return Aggregator(layout, torch.zeros(layout.num_elements)), layout


def aggregate(aggregator, layout, contributions):
    gradient, present = aggregator.aggregate(contributions)
    return {name: gradient[layout.place[name].begin : layout.place[name].end] for name in present}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_contributions", [1, 2, 3, 5])
def test_the_mean_is_summed_in_rank_order_in_float32(dtype, num_contributions):
    aggregator, layout = make_aggregator(3, 2 * PIECE + 7, dtype=dtype)
    names = list(layout.place)
    contributions = [
        {name: torch.randn(layout.place[name].block.num_elements).mul(10.0**rank).to(DTYPES[dtype]) for name in names}
        for rank in range(num_contributions)
    ]
    before = [{name: part.clone() for name, part in blocks.items()} for blocks in contributions]
    actual = aggregate(aggregator, layout, contributions)
    expected = average(contributions)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in names)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(contributions, before, strict=True) for n in names)


def test_the_order_of_the_ranks_is_the_order_of_the_sum():
    aggregator, layout = make_aggregator(1)
    parts = [{"p0.block0": torch.tensor([value])} for value in (1e8, -1e8, 1.0)]
    assert aggregate(aggregator, layout, parts)["p0.block0"].item() == pytest.approx(1 / 3)
    assert aggregate(aggregator, layout, parts[1:] + parts[:1])["p0.block0"].item() == 0.0


def test_a_contribution_that_lacks_a_buffer_counts_the_values_it_has():
    optimizer = OptimizerSpec("SGD", ({"maximize": False, "nesterov": False},)).with_means()
    parameters = [ParameterSpec("w", (2,)), ParameterSpec("mean", (2,), group=1), ParameterSpec("other", (2,), group=1)]
    layout = ShardLayout(make_plan(parameters, 1, optimizer=optimizer), 0)
    values = torch.zeros(layout.num_elements)
    values[layout.place["mean.block0"].begin] = 4.0
    aggregator = Aggregator(layout, values)
    contributions = [
        {"w.block0": torch.tensor([3.0, 4.0]), "mean.block0": torch.tensor([2.0, 6.0])},
        {"w.block0": torch.tensor([3.0, 4.0]), "other.block0": torch.tensor([5.0, 7.0])},
    ]
    actual = aggregate(aggregator, layout, contributions)
    assert {name: block.tolist() for name, block in actual.items()} == {
        "w.block0": [3.0, 4.0], "mean.block0": [3.0, 3.0], "other.block0": [2.5, 3.5],
    }  # fmt: skip
    assert aggregator.sum_of_squares(list(actual)) == 25.0
    aggregator.scale(0.5)
    gradient = aggregator.aggregate([])[0]
    assert [gradient[layout.place[name].begin].item() for name in actual] == [1.5, 3.0, 2.5]


def test_a_block_that_some_lack_counts_zeros_for_them():
    aggregator, layout = make_aggregator(2, 2, 2)
    contributions = [
        {"p0.block0": torch.tensor([3.0, 6.0])},
        {},
        {"p0.block0": torch.tensor([3.0, 0.0]), "p2.block0": torch.tensor([3.0, -3.0])},
    ]
    actual = aggregate(aggregator, layout, contributions)
    assert {name: block.tolist() for name, block in actual.items()} == {
        "p0.block0": [2.0, 2.0],
        "p2.block0": [1.0, -1.0],
    }


def test_no_contributions_and_empty_ones_have_nothing_present():
    aggregator, layout = make_aggregator(2)
    assert aggregate(aggregator, layout, []) == {}
    assert aggregate(aggregator, layout, [{}, {}]) == {}


@pytest.mark.parametrize("num_contributions", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_survives(dtype, num_contributions):
    aggregator, layout = make_aggregator(4, dtype=dtype)
    parts = [{"p0.block0": torch.full((4,), -0.0, dtype=DTYPES[dtype])}] * num_contributions
    assert torch.signbit(aggregate(aggregator, layout, parts)["p0.block0"]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_contributions_may_lie_at_any_address(dtype, offset):
    aggregator, layout = make_aggregator(1001, dtype=dtype)
    parts = [torch.randn(1001).to(DTYPES[dtype]) for _ in range(3)]
    unaligned = []
    for part in parts:
        data = part.view(torch.uint8).numpy().tobytes()
        body = bytearray(bytes(offset) + data)
        unaligned.append(torch.frombuffer(body, dtype=part.dtype, count=1001, offset=offset))
    actual = aggregate(aggregator, layout, [{"p0.block0": part} for part in unaligned])
    assert torch.equal(actual["p0.block0"], average([{"": part} for part in parts])[""])


def test_the_gradient_is_one_kept_buffer_and_padding_stays_zero():
    aggregator, layout = make_aggregator(70, 70)
    first, _ = aggregator.aggregate([{name: torch.ones(70) for name in layout.place}] * 2)
    second, present = aggregator.aggregate([{"p1.block0": torch.full((70,), 5.0)}])
    assert first.data_ptr() == second.data_ptr()
    assert present == ("p1.block0",)
    assert second[layout.place["p1.block0"].begin] == 5.0
    padding = torch.ones(layout.num_elements, dtype=torch.bool)
    for place in layout.places:
        padding[place.begin : place.end] = False
    assert not second[padding].any()


def test_a_shape_that_would_be_broadcast_is_refused():
    aggregator, _ = make_aggregator(5)
    with pytest.raises(ValueError, match=r"'p0.block0' has shape \(1,\), expected \(5,\)"):
        aggregator.aggregate([{"p0.block0": torch.ones(5)}, {"p0.block0": torch.ones(1)}])


SIZES = [PIECE - 3, 1, 65, PIECE, 130, PIECE + 1, 2 * PIECE, 7, 8]


@pytest.mark.parametrize("num_contributions", [1, 3])
@pytest.mark.parametrize("absent", [None, *range(len(SIZES))])
def test_blocks_of_all_sizes_are_scaled_once(num_contributions, absent):
    aggregator, layout = make_aggregator(*SIZES)
    names = list(layout.place)
    means = {}
    for value, present in ((1.0, names), (3.0, [name for index, name in enumerate(names) if index != absent])):
        parts = {name: torch.full((layout.place[name].block.num_elements,), value) for name in present}
        assert list(aggregate(aggregator, layout, [parts] * num_contributions)) == present
        means |= dict.fromkeys(present, average([{"": torch.tensor([value])}] * num_contributions)[""].item())
    gradient, _ = aggregator.aggregate([])
    for name, place in layout.place.items():  # an absent block's left-over is not scaled again and again
        assert (gradient[place.begin : place.end] == means[name]).all(), name


@given(num_contributions=st.integers(1, 4), data=st.data())
def test_any_presence_equals_the_definition(num_contributions, data):
    aggregator, layout = make_aggregator(1, 65, 130, 64, 5)
    presence = st.frozensets(st.sampled_from(list(layout.place)))
    contributions = [
        {name: torch.randn(layout.place[name].block.num_elements) for name in data.draw(presence)}
        for _ in range(num_contributions)
    ]
    actual, expected = aggregate(aggregator, layout, contributions), average(contributions)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
