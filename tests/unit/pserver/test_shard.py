"""A shard: initial values, steps, frames, digests, aggregation and layout."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.encodings import is_finite
from ps_protocol.frames import parse_frame
from ps_protocol.optimizers import LOWEST_RANK, MEAN, OptimizerSpec, StepState
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import PARAMETER_DTYPES, PLACEMENTS, WINDOW, ParameterSpec
from ps_protocol.wire_types import WireTypes
from services.coordinator.settings import RECORD_BYTES
from services.pserver.run.script_warnings import AbsentGradients
from services.pserver.shard.aggregation import PIECE, Aggregator
from services.pserver.shard.bodies import BufferPool
from services.pserver.shard.layout import ShardLayout
from services.pserver.shard.reply import CHUNK_BYTES, FrameCopy, VersionedBlocks
from services.pserver.shard.shard import Shard
from tests.unit.coordinator.support import defaults

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
            shard.set_initial(name, values.to(DTYPES[place.dtype]))
    return shard


def step(shard: Shard, **gradients: float) -> None:
    pushed = {
        f"{name}.block0": torch.full((shard.layout.place[f"{name}.block0"].block.num_elements,), value)
        for name, value in gradients.items()
    }
    gradient, present = shard.aggregator.aggregate([pushed])
    shard.apply(gradient, present, NUMBERS)


def test_a_shard_is_initialised_once_every_block_and_buffer_is_set():
    shard = make_shard(("a", 5, "F32"), ("b", 7, "BF16"), buffers=BUFFERS, fill=False)
    shard.set_initial("a.block0", torch.arange(5.0))
    shard.set_initial("a.block0", torch.arange(5.0))  # again counts once
    shard.set_initial_buffer("num_batches", bytes(8))
    shard.set_initial("b.block0", torch.arange(7, dtype=torch.bfloat16))
    assert not shard.is_initialised
    shard.set_initial_buffer("running_mean", memoryview(bytearray(24)))
    assert shard.is_initialised
    assert shard.block("a.block0").tolist() == [0, 1, 2, 3, 4]
    assert shard.block("b.block0").dtype == torch.float32


def test_a_shard_without_blocks_is_initialised_and_encodes_an_empty_frame():
    shard = Shard(make_plan([ParameterSpec("w", (3,))], 2, optimizer=SPEC), 1)
    assert shard.is_initialised
    gradient, present = shard.aggregator.aggregate([{}, {}])
    shard.apply(gradient, present, NUMBERS)
    assert shard.version == 1
    assert safetensors.torch.load(b"".join(shard.encode())) == {}


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


def test_versions_count_applies_of_the_shard_and_of_each_block():
    shard = make_shard(("a", 5, "F32"), ("b", 7, "F32"))
    before = shard.block("b.block0").clone()
    step(shard, a=1.0)
    assert torch.equal(shard.block("b.block0"), before)
    step(shard, a=1.0, b=1.0)
    assert (shard.version, shard.versions) == (2, {"a.block0": 2, "b.block0": 1})


LARGE = CHUNK_BYTES // 4 + 1000
MODELS = {
    "one": [("a", 5, "F32")],
    "exact": [("a", CHUNK_BYTES // 4, "F32"), ("b", CHUNK_BYTES // 2, "BF16")],
    "small": [("a", 5, "F32"), ("b", 70, "BF16"), ("c", 1, "F16"), ("d", 64, "F32")],
    "large": [
        ("a", 3 * LARGE, "F32"),
        ("b", 5 * LARGE, "BF16"),
        ("c", 3, "F16"),
        ("d", LARGE, "F32"),
        ("e", 9, "BF16"),
    ],
    "odd": [("h", 1, "BF16"), ("a", LARGE, "F32"), ("b", LARGE, "F16")],  # a float32 cannot fill the chunk's rest
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
    assert all(type(chunk) is bytes and len(chunk) <= CHUNK_BYTES for chunk in chunks[1:])
    assert all(len(chunk) > CHUNK_BYTES - 4 for chunk in chunks[1:-1])
    loaded = safetensors.torch.load(b"".join(chunks))
    for name, place in shard.layout.place.items():
        assert loaded[name].dtype == DTYPES[place.dtype]
        expected = shard.block(name).to(DTYPES[place.dtype])
        assert torch.equal(loaded[name].view(torch.uint8), expected.view(torch.uint8)), name
    before = [bytes(bytearray(chunk)) for chunk in chunks]
    shard.block(shard.layout.places[0].name).fill_(3.0)
    assert (chunks == before, shard.encode(metadata={"round": "7"}) == before) == (True, False)


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

    def copy(names):
        frame = FrameCopy(shard.layout.find_places(names), metadata, BufferPool())
        frame.fill(shard.values)
        return bytes(frame.buffer)

    expected = b"".join(shard.encode(metadata=metadata, pulled=True))
    for copied in (False, True):
        pulled = shard.view_pulled().read(copied=copied)
        versioned = VersionedBlocks(pulled, dict.fromkeys(shard.layout.place, 3), metadata, 2)
        assert b"".join(versioned.parts()) == expected
    assert copy(None) == expected
    names = [name for i, name in enumerate(shard.layout.place) if i in chosen]
    assert copy(names) == b"".join(shard.encode(names, metadata, pulled=True))


def test_a_frame_of_some_blocks_has_them_in_plan_order():
    shard = make_shard(*MODELS["small"])
    loaded = parse_frame(b"".join(shard.encode(["d.block0", "b.block0", "d.block0"])))
    assert [entry.name for entry in loaded.tensors] == ["b.block0", "d.block0"]
    assert parse_frame(b"".join(shard.encode([]))).tensors == ()
    assert b"".join(shard.encode(["b.block0", "b.block0"])) == b"".join(shard.encode(["b.block0"]))


def test_buffers_come_back_as_they_went_in():
    shard = make_shard(("a", 5, "F32"), buffers=BUFFERS)
    mean = torch.randn(2, 3)
    shard.set_initial_buffer("num_batches", torch.tensor([12], dtype=torch.int64).numpy().tobytes())
    assert safetensors.torch.load(b"".join(shard.encode([], with_buffers=True))).keys() == {"num_batches"}
    body = bytearray(mean.numpy().tobytes())
    shard.set_initial_buffer("running_mean", memoryview(body))
    body[:] = bytes(24)  # a received body's memory is used again
    chunks = shard.encode([], {"round": "1"}, with_buffers=True)
    loaded = safetensors.torch.load(b"".join(chunks))
    assert torch.equal(loaded["running_mean"], mean)
    assert loaded["num_batches"].shape == ()
    assert loaded["num_batches"].item() == 12
    assert parse_frame(b"".join(chunks)).metadata == {"round": "1"}


def make_stepped() -> Shard:
    shard = make_shard(("a", 5, "F32"), ("b", 70, "F32"), buffers=BUFFERS)
    shard.set_initial_buffer("running_mean", bytes(24))
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
        lambda: shard.set_initial_buffer("running_mean", bytes(23) + b"\1"),
        lambda: shard.set_initial_buffer("num_batches", bytes(8)),
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
        "w.block0": [3.0, 4.0], "mean.block0": [3.0, 3.0], "other.block0": [2.5, 3.5],
        "lowest.block0": pytest.approx([0.1, 0.2]), "kept.block0": [0.0, 0.0],
    }  # fmt: skip
    assert aggregator.sum_of_squares(list(actual)) == 25.0
    aggregator.scale(0.5)
    gradient = aggregator.aggregate([])[0]
    assert [gradient[layout.place[name].begin].item() for name in actual] == pytest.approx([1.5, 3.0, 2.5, 0.1, 0.0])


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


SIZES = [PIECE - 3, 1, 65, PIECE, 130, PIECE + 1, 2 * PIECE, 7, 8]


@pytest.mark.parametrize("num_contributions", [1, 3])
def test_blocks_of_all_sizes_are_scaled_once(num_contributions):
    aggregator, layout = make_aggregator(*SIZES)
    names = list(layout.place)
    for absent in (None, *names):
        means = {}
        for value, present in ((1.0, names), (3.0, [name for name in names if name != absent])):
            parts = {name: torch.full((layout.place[name].block.num_elements,), value) for name in present}
            assert list(aggregate(aggregator, layout, [parts] * num_contributions)) == present
            means |= dict.fromkeys(present, average([{"": torch.tensor([value])}] * num_contributions)[""].item())
        gradient, _ = aggregator.aggregate([])
        for name, place in layout.place.items():  # the rest of an absent block is not scaled again
            assert (gradient[place.begin : place.end] == means[name]).all(), name


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


@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=50), num_pservers=st.integers(1, 3))
def test_the_coordinator_counts_the_padding_of_blocks_when_it_bounds_the_log(sizes, num_pservers):
    parameters = [ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(sizes)]
    plan = make_plan(parameters, num_pservers, min_block_size=10)
    largest = max(ShardLayout(plan, index).num_elements for index in range(num_pservers))
    interval = defaults(durability="log", max_log_bytes=1 << 20).checkpoint_interval(plan)
    assert interval == (1 << 20) // (4 * largest + RECORD_BYTES)


@given(
    sizes=st.lists(st.integers(0, 500), max_size=6),
    groups=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    dtypes=st.lists(st.sampled_from(PARAMETER_DTYPES), min_size=6, max_size=6),
    num_pservers=st.integers(1, 5),
    min_block_size=st.integers(1, 200),
    placement=st.sampled_from(PLACEMENTS),
)
def test_every_element_keeps_its_place_in_its_window(sizes, groups, dtypes, num_pservers, min_block_size, placement):
    parameters = [
        ParameterSpec(f"p{i}", (size,), dtypes[i], groups[i]) for i, size in enumerate(sizes)
    ]  # fmt: skip
    plan = make_plan(parameters, num_pservers, min_block_size=min_block_size, placement=placement)
    for pserver in range(num_pservers):
        layout = ShardLayout(plan, pserver)
        assert list(layout.place) == [block.name for block in plan.shards[pserver]]
        assert set(layout.places) == set(layout.place.values())
        at = 0
        for place in layout.places:
            block, parameter = place.block, plan.parameter[place.block.parameter]
            assert (place.name, place.group, place.dtype) == (block.name, parameter.group, parameter.dtype)
            assert place.end - place.begin == block.num_elements
            # the flat tensor is tiled by whole windows
            assert place.step_begin == at
            assert place.step_begin % WINDOW == place.padded_end % WINDOW == 0
            at = place.padded_end
            # the block lies within its windows, each element where it lies in its parameter's window
            assert place.begin % WINDOW == block.begin % WINDOW
            assert place.step_begin <= place.begin < place.step_begin + WINDOW
            assert place.padded_end == place.end + -place.end % WINDOW
            # windows are stepped whole, but not beyond the parameter's end
            stepped_to = place.step_end - place.begin + block.begin  # in elements of the parameter
            assert stepped_to == min(block.end + -block.end % WINDOW, parameter.num_elements)
        assert layout.num_elements == at
    assert [p.group for p in layout.places] == sorted(p.group for p in layout.places)


def test_a_parameter_without_gradients_is_searched_for_on_one_pserver() -> None:
    plan = make_plan([ParameterSpec("w", (64,))], 2, min_block_size=32)
    assert [AbsentGradients(ShardLayout(plan, pserver))._trained for pserver in (0, 1)] == [{"w.block0"}, set()]


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
