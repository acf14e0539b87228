"""Training scripts use clients, names, low precision, inspection and TLS, and meet refusals."""

from __future__ import annotations

import random
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradpost import RemoteOptimizer, Session
from ps_protocol.errors import TrainerLost
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import (
    assert_identical,
    run_all,
    start_everywhere,
    step_with,
    wrap_weight,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(min_block_size=4, on_trainer_loss="fail")


def test_leaving_in_the_middle_of_a_round_is_failing(cluster: LocalCluster) -> None:
    def work(session: Session) -> None:
        weight, optimizer = wrap_weight(session, 4)
        if session.rank == 0:
            session.client.coordinator.counted_round = 1  # a pserver may have its whole contribution
            return
        with pytest.raises(TrainerLost, match="trainer 0 failed: it left in the middle of round 1"):
            step_with(optimizer, weight)

    run_all(cluster, work)


def test_all_trainers_start_from_the_values_and_buffers_of_rank_0(cluster: LocalCluster) -> None:
    one, other = run_all(cluster, start_everywhere)
    assert_identical(one, other)
    assert {tensor.double().mean().item() for tensor in other.values()} == {5.0, 1.0}


def test_parameters_without_names_are_called_by_position(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(session: Session) -> list[str]:
        RemoteOptimizer(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), session=session)
        return list(session.client.run.plan.parameter)

    assert run_all(cluster, train)[0] == ["group0.parameter0", "group0.parameter1"]
    assert capsys.readouterr().err.count("2 parameters have no names") == 2  # once a trainer


def random_states() -> list[Any]:
    return [
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    ]


def test_repeated_requests_draw_no_random_numbers_of_the_script(own_cluster: StartCluster) -> None:
    cluster, before = own_cluster(pservers=1, trainers=1, durability="log"), random_states()
    with Session(coordinator=cluster.address, rank=0, world_size=1) as session:
        weight, optimizer = wrap_weight(session, 4)
        step_with(optimizer, weight)
        cluster.pservers[0].signal(SIGKILL)
        cluster.pservers[0].wait(10)
        cluster.start_pserver(0)
        step_with(optimizer, weight)
        assert weight.tolist() == [-2.0] * 4
    assert random_states() == before
