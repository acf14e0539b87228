"""A trainer's optimizer: what it refuses, warns of, measures and pushes with its first step."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import torch
from torch import nn

from gradpost import RemoteOptimizer, connect
from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadInput, BadModel
from ps_protocol.optimizers import StepState
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.client.pserver_group import DeclaredRun
from trainer_client.client.settings import TrainerSettings
from trainer_client.client.telemetry import StepMeasures
from trainer_client.engines.model_tensors import BufferAverages, stored_tensors
from trainer_client.engines.script_optimizers import CombinedOptimizer
from trainer_client.engines.state_transfer import Loading
from trainer_client.engines.torch_state import ParameterState, read_state
from trainer_client.optimizer.choice import check_combination
from trainer_client.optimizer.wrapped_optimizer import describe_optimizer

BOTH = {"overlap": True, "overlap_pulls": True}


def check(
    settings: dict[str, Any],
    rules: dict[str, Any],
    *,
    has_module: bool = True,
    has_host: bool = False,
    has_outer: bool = False,
    is_declared: bool = False,
    has_several: bool = False,
    buffer_rules: tuple[str, ...] = (),
    sparse: tuple[str, ...] = (),
) -> None:
    client = SimpleNamespace(
        settings=TrainerSettings(**settings),
        joined=SimpleNamespace(consistency=Consistency(**rules)),
        is_declared=is_declared,
    )
    session = SimpleNamespace(client=client, host=object() if has_host else None)
    module, averages = nn.Linear(2, 2) if has_module else None, SimpleNamespace(groups=buffer_rules)
    model = SimpleNamespace(module=module, parameters={}, averages=averages, sparse=sparse)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    wrapped = CombinedOptimizer({"D": optimizer}) if has_several else optimizer
    check_combination(cast(Any, session), wrapped, cast(Any, model), has_outer=has_outer)


@pytest.mark.parametrize(
    ("settings", "rules", "more", "said"),
    [
        ({"local_steps": 2}, {"strategy": "ring"}, {}, "local_steps and overlap_pulls need pservers"),
        (BOTH, {"strategy": "ring"}, {}, "local_steps and overlap_pulls need pservers"),
        ({}, {}, {"has_outer": True}, "needs local_steps"),
        ({"overlap": True, "local_steps": 2}, {}, {}, "local_steps cannot be used with overlap"),
        ({"local_steps": 2}, {"max_delay": 1}, {}, "local_steps cannot be used with max_delay"),
        ({"local_steps": 2}, {}, {"sparse": ("w",)}, "local_steps do not support sparse gradients"),
        ({}, {"mode": "async"}, {"buffer_rules": ("lowest_rank",)}, "lowest_rank of buffers needs rounds"),
        (
            {"overlap": True, "max_grad_norm": 1.0},
            {"mode": "async"},
            {},
            "max_grad_norm cannot be used with overlap in ",
        ),
        (BOTH, {}, {"has_module": False}, "needs RemoteOptimizer"),
        ({"overlap_pulls": True}, {}, {}, "needs overlap=True"),
        (BOTH, {}, {"has_host": True}, "overlap_pulls needs trainers of one process"),
        (BOTH, {"max_delay": 1}, {}, "overlap_pulls cannot be used with max_delay"),
        (
            {},
            {"mode": "async"},
            {"has_several": True},
            "several optimizers need mode sync .* Use gradpost up --mode sync",
        ),
        ({}, {"max_delay": 1}, {"has_several": True}, "several optimizers need mode sync or strategy ring"),
        ({}, {}, {"is_declared": True}, r"a session has one RemoteOptimizer.* optimizer\.session\.close"),
    ],
    ids=str,
)
def test_what_does_not_work_together_is_refused(
    settings: dict[str, Any], rules: dict[str, Any], more: dict[str, bool], said: str
) -> None:
    with pytest.raises(BadModel, match=said):
        check(settings, rules, **more)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (BOTH, {}),
        ({"overlap": True, "max_grad_norm": 1.0}, {}),
        ({"local_steps": 2}, {"has_outer": True}),
        ({"overlap": True}, {"has_host": True}),
        ({}, {"has_several": True, "has_host": True}),
    ],
    ids=str,
)
def test_what_works_together_is_accepted(settings: dict[str, Any], more: dict[str, bool]) -> None:
    check(settings, {}, **more)


def test_parameters_are_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"not a generator; write RemoteOptimizer\(torch\.optim\.SGD\(model"):
        RemoteOptimizer(nn.Linear(2, 2).parameters(), lr=0.1)


def test_an_optimizer_of_another_package_is_sent_to_a_ring() -> None:
    class Lion(torch.optim.SGD):
        pass

    with pytest.raises(BadInput, match=r"Lion cannot run on a pserver: .*gradpost up --strategy ring runs it"):
        describe_optimizer(Lion(nn.Linear(2, 2).parameters()))


def test_a_module_that_is_replaced_after_the_wrap_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with connect(strategy="local"):
        optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
        model[1] = nn.Linear(8, 2)
        with pytest.raises(BadModel, match=r"'1\.bias' was replaced in the model"):
            optimizer.step()


def test_garbage_is_not_collected_while_many_parameters_join() -> None:
    """Each collection looks at all of them, and finds nothing."""
    wrapped = torch.optim.SGD([nn.Parameter(torch.zeros(1)) for _ in range(3000)], lr=1.0)
    phases: list[str] = []
    with connect(strategy="local"):
        gc.collect()
        gc.callbacks.append(lambda phase, _: phases.append(phase))
        try:
            RemoteOptimizer(wrapped)
        finally:
            gc.callbacks.pop()
    assert phases.count("start") <= 2  # what was put off comes at once
    assert gc.isenabled()


# ---------------------------------------------------------------------- unfinished step


# ---------------------------------------------------------------------- the warning of averaged buffers that trainers


@pytest.mark.parametrize(
    ("choices", "mean", "expected"),
    [({}, 2.0, ["warning"]), ({}, 1.0, []), ({"queue": "average"}, 2.0, [])],
    ids=["other values", "the same values", "chosen"],
)
def test_a_buffer_that_trainers_write_differently_is_named_once(
    choices: dict[str, str], mean: float, expected: list[str]
) -> None:
    model = nn.Module()
    model.register_buffer("queue", torch.zeros(4))
    model.norm = nn.BatchNorm1d(2)  # whose statistics differ in any case
    averages = BufferAverages(model, stored_tensors(model, {}), choices)
    with structlog.testing.capture_logs() as logs:
        for value in (1.0, 3.0):
            with torch.no_grad():
                for buffer in averages.means:
                    model.get_buffer(buffer).fill_(value)
            averages.changed_values()
            for name in averages.means:
                averages.means[name].fill_(mean * value if name == "queue" else 9.0)
            averages.warn_of_differences(structlog.get_logger())
            averages.write_back()
    assert [entry["log_level"] for entry in logs] == expected
    assert all("buffers={'queue': 'lowest_rank'}" in entry["event"] for entry in logs)


# ---------------------------------------------------------------------- the measures of a step


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25), None])
def test_a_step_is_measured_at_most_once_a_second(rate: Any) -> None:
    gradients = {"large": torch.ones(192), "empty": torch.ones(0)}
    reported: list[dict[str, float]] = []
    measures = StepMeasures(reported.append)
    for _ in range(3):
        with measures.step(gradients, rate):
            pass
    [measured] = reported
    assert measured["gradpost/gradient_norm"] == pytest.approx(math.sqrt(192))
    assert measured.get("gradpost/learning_rate") == (None if rate is None else 0.25)
    assert measured["gradpost/waiting_share"] == 0.0


# ---------------------------------------------------------------------- optimizer state between torch and pservers: i


PLAN = make_plan([ParameterSpec("a", (300,)), ParameterSpec("b", (40_000,)), ParameterSpec("c", (7,))], 2)
SLOTS = {
    name: ParameterState(StepState(steps=3), {slot: torch.rand(PLAN.parameter[name].num_elements) for slot in "xy"})
    for name in ("a", "b")
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_that_adagrad_has_filled_are_no_state(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    wrapped = torch.optim.Adagrad([weight], initial_accumulator_value=0.1)
    spec, names = describe_optimizer(wrapped), {id(weight): "weight"}
    groups = [{**group, "initial_accumulator_value": 0.1} for group in wrapped.param_groups]
    assert read_state(spec, groups, names, wrapped.state_dict()) == {}
    wrapped.state[weight]["sum"][1] = 0.2
    with pytest.raises(BadModel, match="before the first step, the sum must be initial_accumulator_value"):
        read_state(spec, groups, names, wrapped.state_dict())


def test_loaded_state_is_pushed_with_the_first_step_until_that_is_pulled() -> None:
    client = SimpleNamespace(
        uploader=0, run=DeclaredRun(PLAN), settings=SimpleNamespace(chosen_bucket_bytes=1000),
        joined=SimpleNamespace(rank=0, consistency=SimpleNamespace(is_async=False)),
    )  # fmt: skip
    one = Loading(client, {})  # type: ignore[arg-type]
    one.load_states(SLOTS.keys(), SLOTS, 0)
    frames = one.frames_for(1)
    assert frames
    assert one.frames_for(2) is None
    one.note_rollback(0)
    assert one.frames_for(1) is frames
    one.note_pulled(1)
    assert not one.states
    assert one.frames_for(2) is None
