"""The choice of a step engine refuses what does not work together. A cluster test shows that an optimizer asks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadInput, BadModel
from trainer_client import RemoteOptimizer
from trainer_client.client.settings import TrainerSettings
from trainer_client.engines.combined_optimizer import CombinedOptimizer
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
) -> None:
    client = SimpleNamespace(
        settings=TrainerSettings(**settings),
        joined=SimpleNamespace(consistency=Consistency(**rules)),
        is_declared=is_declared,
    )
    session = SimpleNamespace(client=client, host=object() if has_host else None)
    model = SimpleNamespace(module=nn.Linear(2, 2) if has_module else None, parameters={})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    wrapped = CombinedOptimizer({"D": optimizer}) if has_several else optimizer
    check_combination(cast(Any, session), wrapped, cast(Any, model), has_outer=has_outer)


@pytest.mark.parametrize(
    ("settings", "rules", "more", "said"),
    [
        ({"local_steps": 2}, {"strategy": "ring"}, {}, "local_steps and overlap_pulls need pservers"),
        (BOTH, {"strategy": "ring"}, {}, "local_steps and overlap_pulls need pservers"),
        ({}, {}, {"has_outer": True}, "needs local_steps"),
        ({"outer_momentum": 0.9}, {}, {}, "needs local_steps"),
        ({"overlap": True, "local_steps": 2}, {}, {}, "local_steps cannot be used with overlap"),
        ({"local_steps": 2}, {"max_delay": 1}, {}, "local_steps cannot be used with max_delay"),
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
        ({"local_steps": 2, "outer_momentum": 0.9}, {}),
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
