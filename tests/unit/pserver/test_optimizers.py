"""Every update rule equals `torch.optim` in one process, bit for bit, for any slicing and number of threads."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.optimizers import BUFFER_RULES, MEAN, RULES, StepState
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import PLACEMENTS, WINDOW, ParameterSpec
from services.pserver.shard import optimizer_rules
from services.pserver.shard.layout import ShardLayout
from services.pserver.shard.optimizer_blocks import OptimizerBlocks
from services.pserver.shard.optimizer_rules import PIECE, UPDATE_RULES

from ...soaking import examples, parametrize_sampled
from .oracle import (
    DTYPES,
    FUSED,
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
    slice_plan = make_plan(
        parameters, num_pservers, min_block_size=min_block_size, optimizer=make_spec(name, groups), **plan
    )
    return Shards(slice_plan, initial), TorchOracle(name, parameters, groups, initial)


def test_every_optimizer_of_the_protocol_has_a_rule_and_a_case():
    assert UPDATE_RULES.keys() - BUFFER_RULES.keys() == RULES.keys() == {name for name, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_torch(case):
    parameters = make_parameters()
    shards, oracle = start(case, parameters, 3, 100)
    for step in range(10):
        gradients = random_gradients(parameters, step)
        shards.step([gradients], make_groups(case, step))
        oracle.step(gradients, make_groups(case, step))
        if step in (0, 1, 9):
            assert_equal(shards, oracle, f"after step {step}")


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
from ps_protocol.optimizers import check_optimizer
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.pserver.shard.shard import Shard
from tests.unit.pserver.oracle import DEFAULTS, make_numbers, make_options, make_spec
for name in DEFAULTS:
    groups = [make_options(name)]
    spec = make_spec(name, groups)
    shard = Shard(make_plan([ParameterSpec("w", (100,))], 1, optimizer=spec), 0)
    shard.set_initial("w.block0", torch.ones(100))
    shard.apply(*shard.aggregator.aggregate([{"w.block0": torch.ones(100)}] * 2), make_numbers(spec, groups))
    assert shard.block("w.block0").sum() != 100, name
print([name for name in sys.modules if name.startswith("torch._dynamo")])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


class Recorder:
    """OptimizerBlocks whose rule also says in which runs it was called."""

    def __init__(self, monkeypatch, name, parameters, groups, **plan):
        spec = make_spec(name, groups)
        self.layout = ShardLayout(make_plan(parameters, 1, optimizer=spec, **plan), 0)
        self.calls: list[tuple[int, list[tuple[int, int]]]] = []
        rule = optimizer_rules.UPDATE_RULES[name]

        def step(operands, options):
            offsets = [(v.storage_offset(), v.storage_offset() + len(v)) for v in operands.values]
            self.calls.append((operands.state.steps, offsets))
            return rule.step(operands, options)

        monkeypatch.setitem(optimizer_rules.UPDATE_RULES, name, dataclasses.replace(rule, step=step))
        self.blocks = OptimizerBlocks(self.layout, spec)
        self.values = torch.zeros(self.layout.num_elements)
        self.gradient = torch.ones(self.layout.num_elements)
        self._numbers = make_numbers(spec, groups)

    def apply(self, *present, counter=None):
        self.calls.clear()
        names = [f"{name}.block0" for name in present]
        self.blocks.apply(self.values, self.gradient, names, self._numbers, counter=counter)
        return self.calls


def four(sizes=(64, 64, 64, 64), groups=(0, 0, 0, 0)):
    return [ParameterSpec(name, (size,), group=g) for name, size, g in zip("abcd", sizes, groups, strict=True)]


@pytest.mark.parametrize(
    ("name", "sizes", "groups", "steps"),
    [
        ("Adam", (64, 64, 64, 64), (0, 1, 0, 1), [("abcd", [(0, [(0, 128)]), (0, [(128, 256)])])]),  # by group
        ("Adam", (64, 70, 64, 64), (0, 0, 0, 0), [("abcd", [(0, [(0, 134), (192, 320)])])]),  # b ends within a window
        (
            "Adam", (64, 64, 64, 64), (0, 0, 0, 0),
            [
                ("", []),
                ("acd", [(0, [(0, 64), (128, 256)])]),
                ("abcd", [(1, [(0, 64), (128, 256)]), (0, [(64, 128)])]),  # b is stepped apart
                ("b", [(1, [(64, 128)])]),
                ("abcd", [(2, [(0, 256)])]),
            ],
        ),
        ("SGD", (64, 64, 64, 64), (0, 0, 0, 0), [("a", [(0, [(0, 64)])]), ("abcd", [(0, [(0, 256)])])]),
    ],
)  # fmt: skip
def test_adjacent_blocks_of_a_group_and_of_a_count_are_one_run(monkeypatch, name, sizes, groups, steps):
    recorder = Recorder(monkeypatch, name, four(sizes, groups), [make_options(name)] * 2)
    for present, calls in steps:
        assert recorder.apply(*present) == calls
    expected = sum("a" in present for present, _ in steps) if name == "Adam" else 0
    assert {state.steps for state in recorder.blocks.state.steps.values()} == {expected}


def test_a_step_without_a_counter_counts_for_every_counter(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four(), [make_options("Adam")])
    for counter, before in [(0, 0), (0, 1), (1, 0), (None, 1), (0, 2), (1, 2), (1, 3)]:
        assert recorder.apply("a", "b", "c", "d", counter=counter) == [(before, [(0, 256)])]
    states = [set(recorder.blocks.steps_for(counter).values()) for counter in (0, 1, 2)]
    assert states == [{StepState(steps)} for steps in (3, 4, 4)]
    assert set(recorder.blocks.state.steps.values()) == {StepState(4)}


def test_every_counter_begins_with_loaded_steps(monkeypatch):
    recorder = Recorder(monkeypatch, "NAdam", four(), [make_options("NAdam")])
    recorder.apply("a", "b", counter=0)
    recorder.apply("a", "b", counter=1)
    recorder.blocks.load_blocks({"a.block0": StepState(7, mu_product=0.5)}, {})
    for counter, before in [(1, 7), (0, 7), (2, 7), (0, 8)]:
        assert recorder.apply("a", counter=counter) == [(before, [(0, 64)])]
    assert recorder.apply("b", counter=1) == [(1, [(64, 128)])]


@pytest.mark.parametrize("name", RULES)
def test_rules_without_a_fused_kernel_are_run_in_pieces(monkeypatch, name):
    piece = optimizer_rules.PIECE
    assert piece % WINDOW == 0
    end = 2 * piece + 5
    recorder = Recorder(monkeypatch, name, [ParameterSpec("a", (end,))], [make_options(name)])
    pieces = [(0, end)] if name in FUSED else [(0, piece), (piece, 2 * piece), (2 * piece, end)]
    assert recorder.apply("a") == [(0, pieces)]


def test_slots_are_allocated_once_when_first_needed(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four(), [make_options("Adam")])
    slots = recorder.blocks.state.slots
    assert not slots
    recorder.apply("a")
    assert {name: (slot.shape, slot.dtype) for name, slot in slots.items()} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq"), ((256,), torch.float32)
    )
    before = {name: slot.data_ptr() for name, slot in slots.items()}
    recorder.apply("a", "b", "c", "d")
    assert {name: slot.data_ptr() for name, slot in slots.items()} == before


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_is_only_read(monkeypatch, name):
    options = make_options(name, weight_decay=0.1, maximize=True)
    recorder = Recorder(monkeypatch, name, four(), [options])
    before = recorder.gradient.clone()
    recorder.values.fill_(1.0)
    recorder.apply("a", "b", "c", "d")
    recorder.apply("a", "b", "c", "d")
    assert torch.equal(recorder.gradient, before)


def test_loaded_blocks_have_the_loaded_slots_alone(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four((64, 30, 64, 64)), [make_options("Adam")])
    recorder.apply("a", "b", "c", "d")
    before = {name: slot.clone() for name, slot in recorder.blocks.state.slots.items()}
    loaded = torch.arange(30, dtype=torch.float32) + 1
    states = {"a.block0": StepState(), "b.block0": StepState(steps=7)}
    recorder.blocks.load_blocks(states, {"exp_avg/b.block0": loaded})
    slots = recorder.blocks.state.slots
    assert torch.equal(slots["exp_avg"][64:94], loaded)
    assert not slots["exp_avg"][:64].any()
    assert not slots["exp_avg_sq"][:128].any()
    for name, slot in slots.items():
        assert torch.equal(slot[128:], before[name][128:])
    assert recorder.apply("a", "b", "c", "d") == [(0, [(0, 64)]), (7, [(64, 94)]), (1, [(128, 256)])]


def test_a_buffer_moves_to_the_pushed_mean():
    spec = make_spec("Adam", [make_options("Adam")])
    parameters = [ParameterSpec("w", (3,)), ParameterSpec("mean", (3,), group=1)]
    layout = ShardLayout(make_plan(parameters, 1, optimizer=spec.with_buffers((MEAN,))), 0)
    blocks = OptimizerBlocks(layout, spec.with_buffers((MEAN,)))
    begin, end = layout.place["mean.block0"].begin, layout.place["mean.block0"].end
    values, pushed = torch.zeros(layout.num_elements), torch.zeros(layout.num_elements)
    values[begin:end] = torch.tensor([1.0, 0.1, -torch.inf])
    pushed[begin:end] = torch.tensor([2.0, 0.7, 5.0])
    numbers = make_numbers(spec, [make_options("Adam")])
    blocks.apply(values, pushed, ["mean.block0"], [*numbers, {"lr": 0.25}])
    torch.testing.assert_close(values[begin:end], torch.tensor([1.25, 0.25, 5.0]))
    blocks.apply(values, pushed, ["mean.block0"], [*numbers, {"lr": 1.0}])
    assert torch.equal(values[begin:end], pushed[begin:end])
    assert blocks.state.slots == {}
    assert blocks.state.steps["mean.block0"] == StepState()
