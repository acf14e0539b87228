"""`torch.amp.GradScaler` works as in one process, and an overflow on one trainer skips the step of all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session

from .conftest import StartCluster
from .training import run_all, seeded, wrap_weight

pytestmark = [pytest.mark.cluster, pytest.mark.amp, pytest.mark.timeout(300)]

STEPS = 8
OVERFLOW = 4  # the step in which the gradients of trainer 1 overflow


def train(session: Session | None, **arguments: Any) -> tuple[list[Tensor], list[float]]:
    """Return the parameters and the scale after each step, of a trainer, or of one process that has its overflow."""
    model = seeded(nn.Linear(20, 10))
    optimizer: Optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.02, fused=True)
    if session is not None:
        optimizer = RemoteOptimizer(optimizer, session=session, **arguments)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    values, scales = [], []
    for step in range(STEPS):
        overflows = step == OVERFLOW and (session is None or session.rank == 1)
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean() * (float("inf") if overflows else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        values.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
        scales.append(scaler.get_scale())
    return values, scales


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ring), "ps"])
def test_all_trainers_have_the_bits_of_one_process_and_skip_the_step_that_it_skips(
    shared_cluster: StartCluster, strategy: str
) -> None:
    cluster = shared_cluster(strategy=strategy, nonfinite="skip_round", on_trainer_loss="fail")
    (one, scales_of_one), (other, scales_of_other) = run_all(cluster, train)
    expected, scales = train(None)
    assert torch.equal(expected[OVERFLOW], expected[OVERFLOW - 1])
    assert torch.equal(torch.stack(one), torch.stack(expected))
    assert torch.equal(torch.stack(other), torch.stack(expected))
    assert scales_of_other == scales == [64.0, 64.0, 128.0, 128.0, 64.0, 64.0, 64.0, 128.0]
    assert scales_of_one == [64.0, 64.0, 128.0, 128.0, 128.0, 256.0, 256.0, 256.0]  # its own gradients were finite


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({}, {}, "Set GRADPOST_NONFINITE=skip_round, or use bfloat16"),
        ({"nonfinite": "skip_round"}, {"overlap": True}, "Use bfloat16.*or overlap=False"),
        ({"mode": "async"}, {"overlap": True}, "Use bfloat16.*or overlap=False"),
    ],
    ids=str,
)
def test_a_scaler_that_could_not_skip_a_step_on_all_trainers_is_refused_with_the_remedy(
    own_cluster: StartCluster, settings: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadModel, match=said):
        run_all(own_cluster(trainers=1, on_trainer_loss="fail", **settings), partial(train, **arguments))


def test_a_trainer_of_an_asynchronous_run_skips_alone(own_cluster: StartCluster) -> None:
    def work(session: Session) -> list[float]:
        weight, optimizer = wrap_weight(session, 4)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0
        return weight.tolist()

    assert run_all(own_cluster(trainers=1, mode="async"), work) == [[-2.0] * 4]
