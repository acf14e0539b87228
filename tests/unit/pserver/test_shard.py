"""A shard: initial values, steps, frames, digests, aggregation and statistics."""

from __future__ import annotations

import math
from collections import Counter
from functools import reduce

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.encodings import is_finite
from ps_protocol.frames import parse_frame
from ps_protocol.optimizers import LOWEST_RANK, MEAN, OptimizerSpec, StepState
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import WireTypes
from services.pserver.inspection import describe_values
from services.pserver.shard.aggregation import PIECE, Aggregator
from services.pserver.shard.layout import ShardLayout
from services.pserver.shard.reply import VersionedBlocks
from services.pserver.shard.shard import Shard
from services.runtime.statistics import Statistics

from .oracle import DTYPES, assert_same_bits, average, make_numbers, make_options, make_spec

GROUPS = [make_options("AdamW")]
SPEC = make_spec("AdamW", GROUPS)
NUMBERS = make_numbers(SPEC, GROUPS)
BUFFERS = [("running_mean", (2, 3), "F32"), ("num_batches", (), "I64")]


def make_shard(*parameters: tuple[str, int, str], buffers=(), optimizer=SPEC, fill=True) -> Shard:
    plan = make_plan([ParameterSpec(name, (size,), dtype) for name, size, dtype in parameters], 1,
                     min_block_size=100, buffers=buffers, optimizer=optimizer)  # fmt: skip
    shard = Shard(plan, 0)
    if fill:
        generator = torch.Generator().manual_seed(3)
        for name, place in shard.layout.place.items():
            values = torch.randn(place.block.num_elements, generator=generator)
            shard.set_initial({name: values.to(DTYPES[place.dtype])}, {})
    return shard


def step(shard: Shard, **gradients: float) -> None:
    pushed = {
        f"{name}.block0": torch.full((shard.layout.place[f"{name}.block0"].block.num_elements,), value)
        for name, value in gradients.items()
    }
    gradient, present = shard.aggregator.aggregate([pushed])
    shard.apply(gradient, present, NUMBERS)


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    optimizer=st.sampled_from(["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"]),
    dtypes=st.lists(st.sampled_from(["F32", "BF16"]), min_size=12, max_size=12),
    steps=st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 11), min_size=1)), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_blocks_stepped_together_have_the_bits_of_blocks_stepped_one_by_one(sizes, optimizer, dtypes, steps):
    groups = [make_options(optimizer, weight_decay=0.1, **({"momentum": 0.9} if optimizer == "SGD" else {}))]
    spec = make_spec(optimizer, groups)
    numbers = make_numbers(spec, groups)
    together, alone = (
        make_shard(*((f"p{i}", size, dtypes[i]) for i, size in enumerate(sizes)), optimizer=spec) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(4)
    for counter, wanted in steps:
        names = [f"p{i}.block0" for i in sorted(wanted) if i < len(sizes)]
        gradients = {
            name: torch.randn(together.layout.place[name].block.num_elements, generator=generator).bfloat16()
            for name in names
        }
        together.apply_blocks(gradients, numbers, counter=counter)
        for name in reversed(names):
            alone.apply_blocks({name: gradients[name]}, numbers, counter=counter)
        assert together.digest() == alone.digest()
        assert together.versions == alone.versions


LARGE = (1 << 18) + 1000
MODELS = {
    "one": [("a", 5, "F32")],
    "small": [("a", 5, "F32"), ("b", 70, "BF16"), ("c", 1, "F16"), ("d", 64, "F32")],
    "large": [
        ("a", 3 * LARGE, "F32"),
        ("b", 5 * LARGE, "BF16"),
        ("c", 3, "F16"),
        ("d", LARGE, "F32"),
        ("e", 9, "BF16"),
    ],
    "odd": [("h", 1, "BF16"), ("a", LARGE, "F32"), ("b", LARGE, "F16")],  # at odd offsets
    "many": [(f"p{i}", 1000 + i, ("F32", "BF16", "F16")[i % 3]) for i in range(300)],
}


@pytest.mark.parametrize("model", MODELS)
def test_a_frame_is_a_safetensors_file_of_the_blocks_in_their_own_dtype(model):
    shard = make_shard(*MODELS[model])
    for place in shard.layout.places:
        shard.block(place.name)[0] = float("-inf")
        shard.block(place.name)[-1] = -0.0
    chunks = shard.encode(metadata={"round": "7"})
    frame = parse_frame(b"".join(chunks))
    assert frame.metadata == {"round": "7"}
    assert [entry.name for entry in frame.tensors] == list(shard.layout.place)
    assert len(chunks[0]) == frame.data_begin  # the header comes first, then data
    loaded = safetensors.torch.load(b"".join(chunks))
    for name, place in shard.layout.place.items():
        assert loaded[name].dtype == DTYPES[place.dtype]
        expected = shard.block(name).to(DTYPES[place.dtype])
        assert torch.equal(loaded[name].view(torch.uint8), expected.view(torch.uint8)), name
    before = [bytes(bytearray(chunk)) for chunk in chunks]
    shard.block(shard.layout.places[0].name).fill_(3.0)
    assert (chunks == before, shard.encode(metadata={"round": "7"}) == before) == (True, False)


def read_frame(data: bytes) -> dict[str, bytes]:
    frame = parse_frame(data)
    return {e.name: data[frame.data_begin + e.begin : frame.data_begin + e.end] for e in frame.tensors}


@given(
    sizes=st.lists(
        st.tuples(st.sampled_from([0, 1, 63, 64, 128, 200, 20_000]), st.sampled_from(sorted(DTYPES))), max_size=8
    ),
    pull=st.sampled_from(["float32", "bfloat16", "float16"]),
    chosen=st.sets(st.integers(0, 7)),
)
def test_a_pulled_frame_is_the_same_in_one_copy_and_in_pieces(sizes, pull, chosen):
    parameters = [ParameterSpec(f"p{i}", (size,), dtype) for i, (size, dtype) in enumerate(sizes)]
    plan = make_plan(parameters, 1, min_block_size=8192, optimizer=SPEC, wire=WireTypes(pull=pull))
    shard, metadata = Shard(plan, 0), {"round": "3"}
    shard.values.copy_(torch.randn(len(shard.values)))

    expected = b"".join(shard.encode(metadata=metadata, pulled=True))
    for copied in (False, True):
        pulled = shard.view_pulled().read(copied=copied)
        versioned = VersionedBlocks(pulled, dict.fromkeys(shard.layout.place, 3), metadata, 2)
        assert b"".join(versioned.parts()) == expected
    names = [name for i, name in enumerate(shard.layout.place) if i in chosen]
    some = read_frame(b"".join(shard.encode(names, metadata, pulled=True)))
    assert some == {name: data for name, data in read_frame(expected).items() if name in names}


def make_stepped() -> Shard:
    shard = make_shard(("a", 5, "F32"), ("b", 70, "F32"), buffers=BUFFERS)
    shard.set_initial({}, {"running_mean": bytes(24)})
    step(shard, a=1.0, b=2.0)
    return shard


def test_any_difference_but_padding_changes_the_digest():
    shard = make_stepped()
    digests = [make_stepped().digest()]
    a, b = shard.layout.places
    shard.values[a.end : a.padded_end] = float("nan")
    assert shard.digest() == digests[0]
    changes = [
        lambda: shard.values[b.end - 1].add_(1),
        lambda: shard.optimizer.state.slots["exp_avg_sq"][b.end - 1].add_(1),
        lambda: shard.optimizer.state.steps.update({"a.block0": StepState(2)}),
        lambda: shard.optimizer.state.counted.update({(0, "a.block0"): StepState(2)}),
        lambda: shard.set_initial({}, {"running_mean": bytes(23) + b"\1"}),
        lambda: shard.set_initial({}, {"num_batches": bytes(8)}),
    ]
    for change in changes:
        change()
        digests.append(shard.digest())
    assert len(set(digests)) == len(changes) + 1


def make_aggregator(*sizes: int, dtype: str = "F32") -> tuple[Aggregator, ShardLayout]:
    parameters = [ParameterSpec(f"p{i}", (size,), dtype) for i, size in enumerate(sizes)]
    layout = ShardLayout(make_plan(parameters, 1), 0)
    return Aggregator(layout, torch.zeros(layout.num_elements)), layout


def aggregate(aggregator, layout, contributions):
    gradient, present = aggregator.aggregate(contributions)
    return {name: gradient[layout.place[name].begin : layout.place[name].end] for name in present}


def test_a_contribution_that_lacks_a_buffer_counts_the_values_it_has():
    optimizer = OptimizerSpec("SGD", ({"maximize": False, "nesterov": False},)).with_buffers((MEAN, LOWEST_RANK))
    groups = {"w": 0, "mean": 1, "other": 1, "lowest": 2, "kept": 2}
    parameters = [ParameterSpec(name, (2,), group=group) for name, group in groups.items()]
    layout = ShardLayout(make_plan(parameters, 1, optimizer=optimizer), 0)
    values = torch.zeros(layout.num_elements)
    values[layout.place["mean.block0"].begin] = 4.0
    values[layout.place["other.block0"].begin] = math.inf  # as in a mask that a trainer has replaced
    aggregator = Aggregator(layout, values)
    contributions = [
        {
            "w.block0": torch.tensor([3.0, 4.0]), "mean.block0": torch.tensor([2.0, 6.0]),
            "lowest.block0": torch.tensor([0.1, 0.2]),
        },
        {
            "w.block0": torch.tensor([3.0, 4.0]), "other.block0": torch.tensor([5.0, 7.0]),
            "lowest.block0": torch.tensor([8.0, 9.0]), "kept.block0": torch.tensor([8.0, 9.0]),
        },
    ]  # fmt: skip
    actual = aggregate(aggregator, layout, contributions)
    assert {name: block.tolist() for name, block in actual.items()} == {
        "w.block0": [3.0, 4.0], "mean.block0": [3.0, 3.0], "other.block0": [math.inf, 3.5],
        "lowest.block0": pytest.approx([0.1, 0.2]), "kept.block0": [0.0, 0.0],
    }  # fmt: skip
    assert aggregator.sum_of_squares(list(actual)) == 25.0
    aggregator.scale(0.5)
    gradient = aggregator.aggregate([])[0]
    firsts = [gradient[layout.place[name].begin].item() for name in actual]
    assert firsts == pytest.approx([1.5, 3.0, math.inf, 0.1, 0.0])


@settings(deadline=None)
@given(st.integers(0, 5), st.sampled_from(list(DTYPES)), st.integers(0, 3), st.data())
def test_the_mean_is_summed_in_rank_order_in_float32(num_contributions, dtype, offset, data):
    aggregator, layout = make_aggregator(1, 65, 130, 2 * PIECE + 7, 5, dtype=dtype)
    contributions = []
    for rank in range(num_contributions):
        blocks = {}
        for name in data.draw(st.frozensets(st.sampled_from(list(layout.place)))):
            count = layout.place[name].block.num_elements
            part = torch.randn(count).mul(10.0**rank).to(DTYPES[dtype])
            part[-1] = -0.0
            body = bytearray(bytes(offset) + part.view(torch.uint8).numpy().tobytes())
            blocks[name] = torch.frombuffer(body, dtype=part.dtype, count=count, offset=offset)
        contributions.append(blocks)
    before = [{name: part.clone() for name, part in blocks.items()} for blocks in contributions]
    actual, expected = aggregate(aggregator, layout, contributions), average(contributions)
    assert actual.keys() == expected.keys()
    for name, block in expected.items():
        assert_same_bits(actual[name], block, name)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(contributions, before, strict=True) for n in a)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_one_bad_element_is_found_wherever_it_is_and_large_numbers_are_finite(dtype):
    largest = torch.finfo(dtype).max
    for size in (1, 2, 7, 8, 9, 31, 33, 64, 1000, 200_000):
        tensor = torch.full((size,), largest, dtype=dtype)  # its sum overflows
        assert is_finite(tensor)
        for at in sorted({0, size // 3, size // 2, size - 2, size - 1}):
            for bad in (float("nan"), float("inf"), float("-inf")):
                tensor[at] = bad
                assert not is_finite(tensor), (size, at)
            tensor[at] = -largest
    assert is_finite(torch.empty(0, dtype=dtype))
    data = torch.cat([torch.ones(99), torch.tensor([float("inf")])]).to(dtype).view(torch.uint8).numpy().tobytes()
    unaligned = torch.frombuffer(bytearray(b"\0" + data), dtype=dtype, offset=1, count=100)
    assert not is_finite(unaligned)
    assert is_finite(unaligned[:99])


FLOATS = st.floats(width=32)  # NaN, infinities and what is below the normal numbers included


def merged(pieces: list[list[float]]) -> Statistics:
    return reduce(Statistics.merge, (describe_values(torch.tensor(piece), 7) for piece in pieces))


@given(st.lists(st.lists(FLOATS, max_size=20), min_size=1, max_size=5))
def test_pieces_make_the_whole(pieces: list[list[float]]) -> None:
    found = Statistics.model_validate_json(merged(pieces).model_dump_json()).describe()
    values = np.array([value for piece in pieces for value in piece], dtype=np.float64)
    finite = values[np.isfinite(values)]
    assert (found["num_elements"], found["num_zero"]) == (len(values), int((values == 0).sum()))
    assert (found["num_nan"], found["num_infinite"]) == (int(np.isnan(values).sum()), int(np.isinf(values).sum()))
    assert found["norm"] == pytest.approx(math.hypot(*finite), rel=1e-9)
    if not len(finite):
        assert found["minimum"] is found["maximum"] is found["mean"] is found["deviation"] is None
        return
    size = float(np.abs(finite).max())
    assert (found["minimum"], found["maximum"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12 * size)
    assert found["deviation"] == pytest.approx(finite.std(), rel=1e-6, abs=1e-7 * size)
    inner = [end if end < 0 else begin for begin, end, _ in found["histogram"]]
    assert inner == sorted(inner)
    normal = [x if abs(x) >= 2**-126 else 0.0 for x in finite.tolist()]
    powers = Counter(math.copysign(math.ldexp(1, math.frexp(x)[1] - 1), x) if x else 0.0 for x in normal)
    assert dict(zip(inner, (count for *_, count in found["histogram"]), strict=True)) == powers
