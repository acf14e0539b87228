"""Strategy ring, and trainers with different numbers of batches: the same script and results without pservers."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from gradpost import RemoteOptimizer, Session
from ps_protocol.errors import BadModel
from trainer_client.session.collectives import FlatBucket
from trainer_client.testing import LocalCluster

from .faulty_run import FaultyRun
from .training import (
    assert_identical,
    run_all,
    step_with,
    train_net,
    wrap_weight,
)

pytestmark = [pytest.mark.cluster, pytest.mark.ring]


def test_numbers_that_differ_end_the_run_before_parameters_do(ring: LocalCluster) -> None:
    values = []

    def work(session: Session) -> None:
        weight, optimizer = wrap_weight(session, 10)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        try:
            for step in range(9):
                step_with(optimizer, weight)
                schedule.step(1.0 + step * (session.rank - 0.1))
        finally:
            values.append(weight.unique().tolist())

    with pytest.raises(BadModel, match="hyperparameters differ between trainers in round 3"):
        run_all(ring, work)
    assert values == [[-2.0], [-2.0]]


@pytest.mark.parametrize("cls", [torch.optim.Muon, torch.optim.Adafactor])
def test_optimizers_that_mix_elements_will_do(ring: LocalCluster, cls: Any) -> None:
    def work(session: Session) -> dict[str, Tensor]:
        weight = nn.Parameter(torch.full((6, 4), float(session.rank)))
        optimizer = RemoteOptimizer(cls([("weight", weight)], lr=0.1), session=session)
        for step in range(3):
            weight.grad = torch.arange(24.0).reshape(6, 4) * (session.rank + step)
            optimizer.step()
            if session.rank == 0:  # what has been loaded is compared with what has not
                optimizer.load_state_dict(optimizer.state_dict())
        state = optimizer.state_dict()["state"][0]
        return {"weight": weight.detach(), **{k: v for k, v in state.items() if isinstance(v, Tensor)}}

    weight = nn.Parameter(torch.zeros(6, 4))
    local = cls([("weight", weight)], lr=0.1)
    for step in range(3):
        weight.grad = torch.arange(24.0).reshape(6, 4) * (step + 0.5)
        local.step()
    for actual in run_all(ring, work):
        assert len(actual) > 1
        torch.testing.assert_close(actual["weight"], weight.detach())


def test_training_outlives_the_coordinator_which_shows_it() -> None:
    with FaultyRun(200, pservers=0, strategy="ring") as run:
        run.wait_for_round(10)
        status = run.cluster.status()
        assert (status.state, status.num_pservers) == ("training", 0)
        assert (status.num_parameters, status.parameter_bytes) == (4, 4 * (20 * 64 + 64 + 64 * 3 + 3))
        answer = httpx.post(f"{run.cluster.address}/v1/checkpoints", timeout=10)
        assert (answer.status_code, answer.json()["code"]) == (409, "no_pservers")
        run.kill(run.cluster.coordinator)
        run.wait_for_round(run.round_of(0) + 10)
        run.cluster.restart_coordinator()
        one, other = run.results()
        assert one == other
        assert run.cluster.summary().line().startswith("trained: mode=sync transport=ring rounds=200 ")


@pytest.mark.clip
def test_all_clip_by_one_number(ring: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may add squares up in another order, and parameters that differ in a bit stay different."""
    square, calls = FlatBucket.sum_of_squares, itertools.count()
    monkeypatch.setattr(FlatBucket, "sum_of_squares", lambda bucket: square(bucket) * (1 + 1e-3 * next(calls)))

    def work(session: Session) -> tuple[dict[str, Tensor], list[float | None]]:
        norms: list[float | None] = []
        found = train_net(session, max_grad_norm=0.1, after_step=lambda optimizer: norms.append(optimizer.grad_norm))
        return found, norms

    (one, norms), (other, same) = run_all(ring, work, bucket_bytes=2000)
    assert_identical(one, other)
    assert norms == same
