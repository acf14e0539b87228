"""Once a run is over the cluster is idle, and ready for the next one, however it ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ps_protocol.vocabulary import ParameterSpec
from trainer_client import Session
from trainer_client.testing import LocalCluster
from trainer_client.wrapped_optimizer import describe_optimizer

from .conftest import Carrier
from .parity_model import run_trainers, train_remotely

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=1, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.mark.extended
def test_a_run_may_end_before_it_has_initial_values(cluster: LocalCluster) -> None:
    def declare_only(session: Session) -> None:
        optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
        session.io.run(session.client.declare([ParameterSpec("w", (3,))], describe_optimizer(optimizer)))

    run_trainers(cluster.address, [declare_only])
    run_trainers(cluster.address, [lambda session: train_remotely("SGD", session)], retry_seconds=20)
