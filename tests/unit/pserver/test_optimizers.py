"""Every update rule equals `torch.optim` in one process, bit for bit, for any slicing and number of threads."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.frames import parse_frame
from ps_protocol.optimizers import BUFFER_RULES, LOWEST_RANK, MEAN, RULES, SPARSE_NUMBERS, OptimizerSpec, StepState
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import PLACEMENTS, ParameterSpec
from ps_protocol.wire_types import WireTypes
from services.pserver.shard.aggregation import Aggregator
from services.pserver.shard.layout import ShardLayout
from services.pserver.shard.optimizer import PIECE, UPDATE_RULES
from services.pserver.shard.reply import VersionedBlocks
from services.pserver.shard.shard import Shard

from ...soaking import examples, parametrize_sampled
from .oracle import (
    DTYPES,
    Options,
    Shards,
    TorchOracle,
    assert_equal,
    average,
    make_numbers,
    make_options,
    make_spec,
    num_threads,
)

CASES: dict[str, tuple[str, Options]] = {
    "sgd": ("SGD", {}),
    "sgd-weight-decay-maximize": ("SGD", {"weight_decay": 0.1, "maximize": True}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "sgd-nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd-dampening-maximize": ("SGD", {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    "adam": ("Adam", {}),
    "adam-amsgrad-maximize": ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "adam-decoupled": ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "adamw": ("AdamW", {}),
    "adamw-amsgrad-maximize": ("AdamW", {"amsgrad": True, "maximize": True}),
    "adagrad": ("Adagrad", {}),
    "adagrad-everything": (
        "Adagrad", {"initial_accumulator_value": 0.5, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True},
    ),
    "rmsprop": ("RMSprop", {}),
    "rmsprop-everything": ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    "adadelta": ("Adadelta", {}),
    "adadelta-everything": ("Adadelta", {"weight_decay": 0.1, "maximize": True}),
    "adamax": ("Adamax", {}),
    "adamax-everything": ("Adamax", {"weight_decay": 0.1, "maximize": True}),
    "nadam": ("NAdam", {}),
    "nadam-maximize": ("NAdam", {"weight_decay": 0.1, "maximize": True}),
    "nadam-decoupled": ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
    "radam": ("RAdam", {}),
    "radam-maximize": ("RAdam", {"weight_decay": 0.1, "maximize": True}),
    "radam-decoupled": ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
}  # fmt: skip
SHAPES = [(5,), (63,), (64,), (7, 11), (1003,), (), (130,), (3, 8192), (200, 100), (1,)]  # odd, even, small, large


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


def make_parameters(shapes: list[tuple[int, ...]] = SHAPES) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", shape, group=i % 2) for i, shape in enumerate(shapes)]


def make_groups(case: str, step: int = 0) -> list[Options]:
    """Two groups; learning rates and betas change with the step, as schedulers do."""
    name, options = CASES[case]
    first = make_options(name, **options)
    first["lr"] *= 1 + step / 7
    if "betas" in first and step > 6:
        first["betas"] = [0.85, 0.99]
    return [first, {**first, "lr": first["lr"] / 3, "weight_decay": 0.02}]


def random_gradients(parameters: list[ParameterSpec], step: int, absent: bool = True) -> dict[str, torch.Tensor]:
    """One parameter in three lacks a gradient, another one at each step."""
    generator = torch.Generator().manual_seed(1000 + step)
    gradients = {p.name: torch.randn(p.shape, generator=generator) for p in parameters}
    return {name: g for i, (name, g) in enumerate(gradients.items()) if not absent or (i + step) % 3}


def start(
    case: str, parameters: list[ParameterSpec], num_pservers: int, min_block_size: int, **plan: Any
) -> tuple[Shards, TorchOracle]:
    name, groups = CASES[case][0], make_groups(case)
    generator = torch.Generator().manual_seed(7)
    initial = {p.name: torch.randn(p.shape, generator=generator) for p in parameters}
    spec = make_spec(name, groups)
    slice_plan = make_plan(parameters, num_pservers, min_block_size=min_block_size, optimizer=spec, **plan)
    return Shards(slice_plan, initial), TorchOracle(spec, parameters, groups, initial)


def test_every_optimizer_of_the_protocol_has_a_rule_and_a_case():
    cases = {name for name, _ in CASES.values()} | SPARSE_NUMBERS.keys()  # these are in test_rows.py
    assert UPDATE_RULES.keys() - BUFFER_RULES.keys() == RULES.keys() == cases


@parametrize_sampled(
    ("case", "threads"),
    product([case for case in CASES if "-" not in case or "momentum" in case], (1, 2)),
    sample=[("sgd-momentum", 2), ("adamw", 1), ("rmsprop", 2)],
)
@pytest.mark.extended
def test_tensors_larger_than_a_piece_and_a_grain_equal_torch(case, threads):
    # torch gives each thread a part of what exceeds 32768 elements; the oracle gets as many threads
    parameters = make_parameters([(PIECE + 64 * 3,), (PIECE + 40_007,), (33, 1000)])
    with num_threads(threads):
        shards, oracle = start(case, parameters, 2, 8192)
        for step in range(7):  # RAdam changes its formula at the sixth
            gradients = random_gradients(parameters, step, absent=False)
            shards.step([gradients], make_groups(case, step))
            oracle.step(gradients, make_groups(case, step))
        assert_equal(shards, oracle, f"with {threads} threads")


@pytest.mark.parametrize("case", ["sgd-momentum", "adamw", "rmsprop-everything"])
def test_the_number_of_threads_does_not_matter(case):
    parameters = make_parameters([(100_003,), (70_001,)])
    results = []
    for threads in (1, 2, 3):
        with num_threads(threads):
            shards, _ = start(case, parameters, 3, 8192)
            for step in range(5):
                shards.step([random_gradients(parameters, step)], make_groups(case, step))
            results.append([shards.values(p.name).clone() for p in parameters])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_momentum_that_is_switched_on_later_starts_with_the_gradient():
    parameters = make_parameters()
    shards, oracle = start("sgd-dampening-maximize", parameters, 2, 100)
    for step in range(6):
        groups = make_groups("sgd-dampening-maximize", step)
        groups[0]["momentum"] = 0.0 if step in (0, 1, 4) else 0.9
        gradients = random_gradients(parameters, step)
        shards.step([gradients], groups)
        oracle.step(gradients, groups)
        assert_equal(shards, oracle, f"after step {step}")


@st.composite
def _models(draw):
    parameters = [
        ParameterSpec(
            f"p{i}", (draw(st.integers(1, 300)),), draw(st.sampled_from(list(DTYPES))), draw(st.integers(0, 1))
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    names = [p.name for p in parameters]
    steps = draw(
        st.lists(st.lists(st.frozensets(st.sampled_from(names)), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    return parameters, steps


@settings(max_examples=examples(150), deadline=None)
@given(
    model=_models(),
    case=st.sampled_from(list(CASES)),
    num_pservers=st.integers(1, 5),
    min_block_size=st.integers(1, 200),
    placement=st.sampled_from(PLACEMENTS),
    slice_parameters=st.booleans(),
)
def test_any_model_cut_and_presence_equals_torch(
    model, case, num_pservers, min_block_size, placement, slice_parameters
):
    parameters, steps = model
    shards, oracle = start(
        case, parameters, num_pservers, min_block_size, placement=placement, slice_parameters=slice_parameters
    )
    for parameter in parameters:  # bfloat16 and float16 parameters start from what the trainer sent
        oracle.parameters[parameter.name].data.copy_(shards.values(parameter.name))
    for step, pushed in enumerate(steps):
        contributions = []
        for rank, present in enumerate(pushed):
            gradients = random_gradients(parameters, 10 * step + rank, absent=False)
            contributions.append(
                {p.name: gradients[p.name].to(DTYPES[p.dtype]) for p in parameters if p.name in present}
            )
        shards.step(contributions, make_groups(case, step))
        oracle.step(average(contributions), make_groups(case, step))
        assert_equal(shards, oracle, f"after step {step}")


@pytest.mark.extended
def test_stepping_imports_no_dynamo():
    script = """
import sys, torch
from ps_protocol.encodings import Rows
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.pserver.shard.shard import Shard
from tests.unit.pserver.oracle import DEFAULTS, make_numbers, make_options, make_spec
for name in DEFAULTS:
    groups = [make_options(name)]
    spec = make_spec(name, groups)
    is_sparse = name == "SparseAdam"
    shard = Shard(make_plan([ParameterSpec("w", (100,), is_sparse=is_sparse)], 1, optimizer=spec), 0)
    shard.set_initial({"w.block0": torch.ones(100)}, {})
    rows = {"w.block0": Rows(torch.arange(100), torch.ones(100, 1))} if is_sparse else {}
    dense = {} if is_sparse else {"w.block0": torch.ones(100)}
    shard.apply(*shard.aggregator.aggregate([dense] * 2, [rows] * 2), make_numbers(spec, groups))
    assert shard.block("w.block0").sum() != 100, name
print([name for name in sys.modules if name.startswith("torch._dynamo")])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


# ---------------------------------------------------------------------- the shard


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

    exact = safetensors.torch.load(b"".join(shard.encode()))
    assert all(torch.equal(exact[p.name], shard.block(p.name).to(DTYPES[p.dtype])) for p in shard.layout.places)
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
