"""All step engines follow the contract of `StepEngine`; those of hosts do in test_hosts.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session
from trainer_client.engines.engine import Contribution, StepProgress
from trainer_client.testing import LocalCluster

from .training import run_all

pytestmark = pytest.mark.cluster


def follow_contract(session: Session) -> dict[str, Tensor]:
    """Call each method of an engine, and check what all of them promise. All processes return the same."""
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
    engine, mean = optimizer._engine, (session.world_size + 1) / 2
    gradient = torch.full((12,), session.rank + 1.0)
    contribution = Contribution({"weight": gradient}, optimizer._work.hyperparameters())
    assert engine.progress == StepProgress()

    engine.step(contribution)
    assert engine.progress == StepProgress(begun=1, version=1)
    assert weight.unique().tolist() == [-mean]
    assert not engine.synchronize()  # no step is on its way

    engine.add_gradient("weight", gradient)
    engine.step(contribution)
    assert weight.unique().tolist() == [-2 * mean]

    weight.data = weight.data.clone()
    engine.follow_parameters()
    engine.step(contribution)
    assert weight.unique().tolist() == [-3 * mean]  # the new memory

    values = weight.data
    weight.data = values.double()
    with pytest.raises(BadModel, match="'weight' has become another tensor"):
        optimizer.step()
    weight.data = values.fill_(5.0)
    engine.replace_values({"weight"})
    engine.step(contribution)
    assert weight.unique().tolist() == [5 - mean]
    assert engine.progress == StepProgress(begun=4, version=4)
    return {"weight": weight.detach().clone()}


def test_the_engine_of_pservers(pair: LocalCluster) -> None:
    run_all(pair, follow_contract)


@pytest.mark.ring
def test_the_engine_of_a_ring(ring: LocalCluster) -> None:
    run_all(ring, follow_contract)
