"""What OptimizerBlocks keeps, and in how few calls it steps. That it steps rightly: `test_optimizer_rules`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ps_protocol.optimizers import RULES
from ps_protocol.plan import make_plan
from ps_protocol.slots import StepState
from ps_protocol.vocabulary import WINDOW, ParameterSpec
from services.pserver import optimizer_rules
from services.pserver.layout import ShardLayout
from services.pserver.optimizer_blocks import OptimizerBlocks

from .oracle import FUSED, make_numbers, make_options, make_spec


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


def test_adjacent_blocks_of_a_group_are_one_run(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four(groups=(0, 1, 0, 1)), [make_options("Adam")] * 2)
    assert recorder.apply("a", "b", "c", "d") == [(0, [(0, 128)]), (0, [(128, 256)])]


def test_a_parameter_that_ends_within_a_window_ends_the_run(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four((64, 70, 64, 64)), [make_options("Adam")])
    assert recorder.apply("a", "b", "c", "d") == [(0, [(0, 134), (192, 320)])]


def test_an_absent_block_ends_the_run_and_is_later_stepped_apart(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four(), [make_options("Adam")])
    assert recorder.apply("a", "c", "d") == [(0, [(0, 64), (128, 256)])]
    assert recorder.apply("a", "b", "c", "d") == [(1, [(0, 64), (128, 256)]), (0, [(64, 128)])]
    assert recorder.apply("b") == [(1, [(64, 128)])]
    assert recorder.apply("a", "b", "c", "d") == [(2, [(0, 256)])]  # level again
    assert {name: state.steps for name, state in recorder.blocks.states().items()} == dict.fromkeys(
        ("a.block0", "b.block0", "c.block0", "d.block0"), 3
    )


def test_sgd_has_no_steps_to_tell_blocks_apart(monkeypatch):
    recorder = Recorder(monkeypatch, "SGD", four(), [make_options("SGD")])
    recorder.apply("a")
    assert recorder.apply("a", "b", "c", "d") == [(0, [(0, 256)])]


def test_a_step_without_a_counter_counts_for_every_counter(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four(), [make_options("Adam")])
    for counter, before in [(0, 0), (0, 1), (1, 0), (None, 1), (0, 2), (1, 2), (1, 3)]:
        assert recorder.apply("a", "b", "c", "d", counter=counter) == [(before, [(0, 256)])]
    states = [set(recorder.blocks.states(counter).values()) for counter in (0, 1, 2, None)]
    assert states == [{StepState(steps)} for steps in (3, 4, 4, 4)]


def test_counts_of_an_earlier_version_had_begun_with_nothing(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four(), [make_options("Adam")])
    states = {f"{name}.block0": StepState(5) for name in "abcd"}
    recorder.blocks.load({}, states, {(0, name): state for name, state in states.items()})
    assert recorder.apply("a", "b", "c", "d", counter=1) == [(0, [(0, 256)])]
    assert recorder.apply("a", "b", "c", "d", counter=0) == [(5, [(0, 256)])]


def test_nothing_present_steps_nothing(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four(), [make_options("Adam")])
    assert recorder.apply() == []
    assert recorder.blocks.slots() == {}
    assert set(recorder.blocks.states().values()) == {StepState()}


@pytest.mark.parametrize("name", RULES)
def test_rules_without_a_fused_kernel_are_run_in_pieces(monkeypatch, name):
    piece = optimizer_rules.PIECE
    assert piece % WINDOW == 0
    end = 2 * piece + 5
    recorder = Recorder(monkeypatch, name, [ParameterSpec("a", (end,))], [make_options(name)])
    pieces = [(0, end)] if name in FUSED else [(0, piece), (piece, 2 * piece), (2 * piece, end)]
    assert recorder.apply("a") == [(0, pieces)]


@pytest.mark.parametrize(
    ("name", "options", "slots"),
    [
        ("SGD", {}, set()),
        ("SGD", {"momentum": 0.9}, {"momentum_buffer"}),
        ("Adam", {}, {"exp_avg", "exp_avg_sq"}),
        ("AdamW", {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        ("Adagrad", {}, {"sum"}),
        ("RMSprop", {}, {"square_avg"}),
        ("RMSprop", {"centered": True}, {"square_avg", "grad_avg"}),
        ("RMSprop", {"momentum": 0.5}, {"square_avg", "momentum_buffer"}),
        ("Adadelta", {}, {"square_avg", "acc_delta"}),
        ("Adamax", {}, {"exp_avg", "exp_inf"}),
        ("NAdam", {}, {"exp_avg", "exp_avg_sq"}),
        ("RAdam", {}, {"exp_avg", "exp_avg_sq"}),
    ],
)
def test_slots_are_allocated_when_first_needed(monkeypatch, name, options, slots):
    recorder = Recorder(monkeypatch, name, four(), [make_options(name, **options)])
    assert recorder.blocks.num_bytes == 0
    recorder.apply("a")
    assert recorder.blocks.slots().keys() == slots
    assert all(slot.shape == (256,) and slot.dtype == torch.float32 for slot in recorder.blocks.slots().values())
    assert recorder.blocks.num_bytes == len(slots) * 256 * 4
    before = {name: slot.data_ptr() for name, slot in recorder.blocks.slots().items()}
    recorder.apply("a", "b", "c", "d")
    assert {name: slot.data_ptr() for name, slot in recorder.blocks.slots().items()} == before


def test_the_accumulator_of_adagrad_starts_at_its_initial_value_in_a_block_that_comes_late(monkeypatch):
    recorder = Recorder(monkeypatch, "Adagrad", four(), [make_options("Adagrad", initial_accumulator_value=2.0)])
    recorder.apply("a")
    recorder.apply("a", "b")
    assert recorder.blocks.slots()["sum"][[0, 64]].tolist() == [4.0, 3.0]


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_is_only_read(monkeypatch, name):
    options = make_options(name, weight_decay=0.1, maximize=True)
    recorder = Recorder(monkeypatch, name, four(), [options])
    before = recorder.gradient.clone()
    recorder.values.fill_(1.0)
    recorder.apply("a", "b", "c", "d")
    recorder.apply("a", "b", "c", "d")
    assert torch.equal(recorder.gradient, before)


def test_loaded_blocks_have_what_was_loaded_and_no_more(monkeypatch):
    recorder = Recorder(monkeypatch, "Adam", four((64, 30, 64, 64)), [make_options("Adam")])
    recorder.apply("a", "b", "c", "d")
    before = {name: slot.clone() for name, slot in recorder.blocks.slots().items()}
    loaded = torch.arange(30, dtype=torch.float32) + 1
    states = {"a.block0": StepState(), "b.block0": StepState(steps=7)}
    recorder.blocks.load_blocks(states, {"exp_avg/b.block0": loaded})
    slots = recorder.blocks.slots()
    assert torch.equal(slots["exp_avg"][64:94], loaded)
    assert not slots["exp_avg"][:64].any()
    assert not slots["exp_avg_sq"][:128].any()
    for name, slot in slots.items():
        assert torch.equal(slot[128:], before[name][128:])
    assert recorder.apply("a", "b", "c", "d") == [(0, [(0, 64)]), (7, [(64, 94)]), (1, [(128, 256)])]


def test_a_buffer_moves_to_the_pushed_mean():
    spec = make_spec("Adam", [make_options("Adam")])
    parameters = [ParameterSpec("w", (3,)), ParameterSpec("mean", (3,), group=1)]
    layout = ShardLayout(make_plan(parameters, 1, optimizer=spec.with_means()), 0)
    blocks = OptimizerBlocks(layout, spec.with_means())
    begin, end = layout.place["mean.block0"].begin, layout.place["mean.block0"].end
    values, pushed = torch.zeros(layout.num_elements), torch.zeros(layout.num_elements)
    values[begin:end] = torch.tensor([1.0, 0.1, -torch.inf])
    pushed[begin:end] = torch.tensor([2.0, 0.7, 5.0])
    numbers = make_numbers(spec, [make_options("Adam")])
    blocks.apply(values, pushed, ["mean.block0"], [*numbers, {"lr": 0.25}])
    torch.testing.assert_close(values[begin:end], torch.tensor([1.25, 0.25, 5.0]))
    blocks.apply(values, pushed, ["mean.block0"], [*numbers, {"lr": 1.0}])
    assert torch.equal(values[begin:end], pushed[begin:end])
    assert blocks.num_bytes == 0
    assert blocks.states()["mean.block0"] == StepState()
