"""Combinations of settings, changes of a model, and gradients after a failed step, which the run would lose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from gradpost import RemoteOptimizer, connect
from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadInput, BadModel, ContributionConflict, Ended, NonFiniteGradient, Unreachable
from trainer_client.client.settings import TrainerSettings
from trainer_client.engines.engine import StepGradients
from trainer_client.engines.script_optimizers import CombinedOptimizer
from trainer_client.engines.unfinished_step import UnfinishedStep
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
) -> None:
    client = SimpleNamespace(
        settings=TrainerSettings(**settings),
        joined=SimpleNamespace(consistency=Consistency(**rules)),
        is_declared=is_declared,
    )
    session = SimpleNamespace(client=client, host=object() if has_host else None)
    module, averages = nn.Linear(2, 2) if has_module else None, SimpleNamespace(groups=buffer_rules)
    model = SimpleNamespace(module=module, parameters={}, averages=averages)
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


# ---------------------------------------------------------------------- unfinished step


def failed(error: BaseException, *, has_several_steps: bool = False) -> UnfinishedStep:
    """Return the state after a step with the gradient 1.0 failed; the script has changed the gradient since then."""
    step, gradient = UnfinishedStep(leads_host=False), torch.ones(2)
    step.contribution = None if has_several_steps else StepGradients({"w": gradient})
    step.note_failure(error)
    gradient.fill_(5.0)
    return step


def allows(step: UnfinishedStep, value: float | None) -> bool:
    try:
        step.require_same_gradients(3, {} if value is None else {"w": torch.full((2,), value)}, ["w"])
    except ContributionConflict:
        return False
    return True


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Unreachable("pserver 0"), RuntimeError("CUDA")], ids=repr)
def test_a_step_that_may_have_been_counted_allows_its_own_gradients_only(error: BaseException) -> None:
    step = failed(error)
    assert [allows(step, value) for value in (1.0, 2.0, None)] == [True, False, False]
    step.note_failure(error)  # the repetition failed, too
    assert not allows(step, 2.0)
    step.note_pulled()
    assert allows(step, 2.0)


@pytest.mark.parametrize("error", [NonFiniteGradient("NaN"), ContributionConflict("another"), Ended("over")], ids=repr)
def test_a_refused_step_allows_other_gradients(error: BaseException) -> None:
    assert allows(failed(error), 2.0)


def test_lost_gradients_allow_no_step_until_a_rollback() -> None:
    step = failed(KeyboardInterrupt(), has_several_steps=True)
    step.note_pulled()
    assert not allows(step, 1.0)
    step.note_rollback()
    assert allows(step, 2.0)
