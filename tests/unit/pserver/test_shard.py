from __future__ import annotations

import pytest
import safetensors.torch
import torch

from ps_protocol.frames import parse_frame
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.pserver.reply_chunks import CHUNK_BYTES
from services.pserver.shard import Shard

from ...raising import raises_code
from .oracle import DTYPES, make_numbers, make_options, make_spec

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


# ---------------------------------------------------------------- initial values


def test_a_shard_is_initialised_once_every_block_and_buffer_is_set():
    shard = make_shard(("a", 5, "F32"), ("b", 7, "BF16"), buffers=BUFFERS, fill=False)
    assert not shard.is_initialised
    shard.set_initial("a.block0", torch.arange(5.0))
    shard.set_initial("a.block0", torch.arange(5.0))  # again counts once
    shard.set_initial_buffer("num_batches", bytes(8))
    shard.set_initial("b.block0", torch.arange(7, dtype=torch.bfloat16))
    assert not shard.is_initialised
    shard.set_initial_buffer("running_mean", memoryview(bytearray(24)))
    assert shard.is_initialised
    assert shard.block("a.block0").tolist() == [0, 1, 2, 3, 4]
    assert shard.block("b.block0").dtype == torch.float32
    assert shard.version == 0


def test_a_shard_without_blocks_is_initialised_and_encodes_an_empty_frame():
    shard = Shard(make_plan([ParameterSpec("w", (3,))], 2, optimizer=SPEC), 1)
    assert shard.is_initialised
    gradient, present = shard.aggregator.aggregate([{}, {}])
    shard.apply(gradient, present, NUMBERS)
    assert shard.version == 1
    assert safetensors.torch.load(b"".join(shard.encode())) == {}


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("x.block0", torch.zeros(5), "unknown_block"),
        ("a", torch.zeros(5), "unknown_block"),
        ("a.block0", torch.zeros(4), "wrong_shape"),
        ("a.block0", torch.zeros(1), "wrong_shape"),
        ("a.block0", torch.zeros(1, 5), "wrong_shape"),
        ("a.block0", torch.zeros(5, dtype=torch.bfloat16), "wrong_dtype"),
        ("a.block0", torch.zeros(5, dtype=torch.float64), "wrong_dtype"),
    ],
)
def test_initial_values_that_do_not_fit_are_refused(name, source, error):
    shard = make_shard(("a", 5, "F32"), fill=False)
    with raises_code(error, match=name):
        shard.set_initial(name, source)
    assert not shard.is_initialised


def test_buffers_that_do_not_fit_are_refused():
    shard = make_shard(("a", 5, "F32"), buffers=BUFFERS)
    with raises_code("wrong_shape", match="running_mean"):
        shard.set_initial_buffer("running_mean", bytes(23))
    with raises_code("unknown_block", match="other"):
        shard.set_initial_buffer("other", b"")
    assert not shard.is_initialised


def test_buffers_of_other_pservers_are_not_ours():
    plan = make_plan([ParameterSpec("w", (3,))], 2, buffers=BUFFERS, optimizer=SPEC)
    shard = Shard(plan, 1)
    with raises_code("unknown_block"):
        shard.set_initial_buffer("running_mean", bytes(24))
    shard.set_initial_buffer("num_batches", bytes(8))
    assert shard.is_initialised


# ---------------------------------------------------------------- steps


def test_versions_count_applies_of_the_shard_and_of_each_block():
    shard = make_shard(("a", 5, "F32"), ("b", 7, "F32"))
    step(shard, a=1.0)
    step(shard, a=1.0, b=1.0)
    assert shard.version == 2
    assert shard.versions == {"a.block0": 2, "b.block0": 1}


def test_a_block_without_a_gradient_keeps_its_values():
    shard = make_shard(("a", 5, "F32"), ("b", 7, "F32"))
    before = shard.block("b.block0").clone()
    step(shard, a=1.0)
    assert torch.equal(shard.block("b.block0"), before)


def test_a_plan_without_an_optimizer_cannot_be_stepped():
    shard = make_shard(("a", 5, "F32"), optimizer=None)
    with raises_code("unsupported_optimizer"):
        step(shard, a=1.0)


# ---------------------------------------------------------------- frames

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
    chunks = shard.encode(metadata={"round": "7"})
    frame = parse_frame(b"".join(chunks))
    assert frame.metadata == {"round": "7"}
    assert [entry.name for entry in frame.tensors] == list(shard.layout.place)
    assert len(chunks[0]) == frame.data_begin  # the header comes first, then data
    assert all(len(chunk) <= CHUNK_BYTES for chunk in chunks[1:])
    assert all(len(chunk) > CHUNK_BYTES - 4 for chunk in chunks[1:-1])
    assert all(type(chunk) is bytes for chunk in chunks)
    loaded = safetensors.torch.load(b"".join(chunks))
    for name, place in shard.layout.place.items():
        assert loaded[name].dtype == DTYPES[place.dtype]
        assert torch.equal(loaded[name], shard.block(name).to(DTYPES[place.dtype])), name


def test_a_frame_of_some_blocks_has_them_in_plan_order():
    shard = make_shard(*MODELS["small"])
    loaded = parse_frame(b"".join(shard.encode(["d.block0", "b.block0", "d.block0"])))
    assert [entry.name for entry in loaded.tensors] == ["b.block0", "d.block0"]
    assert parse_frame(b"".join(shard.encode([]))).tensors == ()
    with raises_code("unknown_block", match="x"):
        shard.encode(["a.block0", "x.block0"])


def test_a_frame_stays_when_the_shard_goes_on():
    shard = make_shard(("a", 5, "F32"), ("b", 7, "F32"))
    chunks = shard.encode()
    before = [bytes(bytearray(chunk)) for chunk in chunks]
    step(shard, a=1.0, b=1.0)
    shard.encode()
    assert chunks == before
    assert shard.encode() != before


def test_special_values_pass_through_a_frame():
    shard = make_shard(("a", 6, "F32"), ("b", 6, "BF16"), ("c", 6, "F16"))
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-40, 1.0])
    for name, place in shard.layout.place.items():
        shard.set_initial(name, special.to(DTYPES[place.dtype]))
    for name, loaded in safetensors.torch.load(b"".join(shard.encode())).items():
        expected = special.to(loaded.dtype)
        assert torch.equal(loaded.view(torch.uint8), expected.view(torch.uint8)), name


def test_buffers_come_back_as_they_went_in():
    shard = make_shard(("a", 5, "F32"), buffers=BUFFERS)
    mean = torch.randn(2, 3)
    shard.set_initial_buffer("num_batches", torch.tensor([12], dtype=torch.int64).numpy().tobytes())
    assert safetensors.torch.load(b"".join(shard.encode_buffers())).keys() == {"num_batches"}
    body = bytearray(mean.numpy().tobytes())
    shard.set_initial_buffer("running_mean", memoryview(body))
    body[:] = bytes(24)  # a received body's memory is used again
    chunks = shard.encode_buffers({"round": "1"})
    loaded = safetensors.torch.load(b"".join(chunks))
    assert torch.equal(loaded["running_mean"], mean)
    assert loaded["num_batches"].shape == ()
    assert loaded["num_batches"].item() == 12
    assert parse_frame(b"".join(chunks)).metadata == {"round": "1"}


# ---------------------------------------------------------------- digest


def make_stepped() -> Shard:
    shard = make_shard(("a", 5, "F32"), ("b", 70, "F32"), buffers=BUFFERS)
    shard.set_initial_buffer("running_mean", bytes(24))
    step(shard, a=1.0, b=2.0)
    return shard


def test_equal_shards_have_equal_digests():
    assert make_stepped().digest() == make_stepped().digest()
    assert make_shard(("a", 5, "F32"), optimizer=None).digest() == make_shard(("a", 5, "F32"), optimizer=None).digest()


def _change_value(shard):
    shard.block("b.block0")[-1] += 1


def _change_slot(shard):
    place = shard.layout.place["b.block0"]
    shard.optimizer.slots()["exp_avg_sq"][place.end - 1] += 1


def _change_buffer(shard):
    shard.set_initial_buffer("running_mean", bytes(23) + b"\1")


def _add_buffer(shard):
    shard.set_initial_buffer("num_batches", bytes(8))


def _change_step(shard):
    # a step that changes neither values nor, once they are put back, slots
    numbers = [{**NUMBERS[0], "lr": 0.0, "weight_decay": 0.0}]
    slots = {name: slot.clone() for name, slot in shard.optimizer.slots().items()}
    shard.apply(*shard.aggregator.aggregate([{"a.block0": torch.zeros(5)}]), numbers)
    for name, slot in shard.optimizer.slots().items():
        slot.copy_(slots[name])


@pytest.mark.parametrize("change", [_change_value, _change_slot, _change_buffer, _add_buffer, _change_step])
def test_any_difference_changes_the_digest(change):
    shard = make_stepped()
    before = shard.digest()
    change(shard)
    assert shard.digest() != before


def test_padding_is_not_part_of_the_digest():
    shard = make_stepped()
    before = shard.digest()
    place = shard.layout.place["a.block0"]
    shard.values[place.end : place.padded_end] = float("nan")
    assert shard.digest() == before


def test_a_block_that_is_named_twice_is_answered_once():
    """By blocks and slots alike: a frame has no place for two entries of a name."""
    shard = make_shard(("a", 5, "F32"), ("b", 7, "F32"))
    step(shard, a=1.0, b=1.0)
    for encode in (shard.encode, shard.encode_slots):
        assert b"".join(map(bytes, encode(["b.block0", "b.block0"]))) == b"".join(map(bytes, encode(["b.block0"])))
