"""Float buffers, such as the statistics of batch norm, become their mean over all trainers in every step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import assert_close, run_all, seeded

pytestmark = pytest.mark.cluster
STEPS = 4
ROUNDING = 1e-6
LOCAL = "1.num_batches_tracked"


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(min_block_size=2, on_trainer_loss="fail")


def make_model() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), 1, 1.0)


def compute(model: nn.Module, step: int, rank: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)) + 3 * rank
    model(inputs).square().sum().backward()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_as_expected(found: list[list[dict[str, Tensor]]]) -> None:
    """Compare with models in one process, whose buffers are averaged after each step; the weights stand still."""
    models = [make_model() for _ in range(2)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            compute(model, step, rank)
        for name, _ in models[0].named_buffers():
            if name != LOCAL:
                every = [dict(model.named_buffers())[name] for model in models]
                mean = torch.stack(every).mean(0)
                for one in every:
                    one.copy_(mean)
        for rank, model in enumerate(models):
            assert_close(found[rank][step], buffers_of(model), ROUNDING, ROUNDING)


def train(session: Session, **arguments: Any) -> list[dict[str, Tensor]]:
    model = make_model()
    optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session, **arguments)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        compute(model, step, session.rank)
        optimizer.step()
        found.append(buffers_of(model))
    return found


@pytest.mark.parametrize("arguments", [{"overlap": True}, {"push_type": "topk"}], ids=str)
def test_buffers_become_their_mean_in_every_step(cluster: LocalCluster, arguments: dict[str, Any]) -> None:
    assert_as_expected(run_all(cluster, partial(train, **arguments), bucket_bytes=50))


@pytest.mark.ring
def test_they_become_their_mean_in_a_ring(ring: LocalCluster) -> None:
    assert_as_expected(run_all(ring, train))


def test_the_state_of_an_optimizer_leaves_them_out(cluster: LocalCluster) -> None:
    def work(session: Session) -> dict[str, Any]:
        model = make_model()
        optimizer = RemoteOptimizer(torch.optim.Adam(model.parameters()), model=model, session=session)
        compute(model, 0, session.rank)
        optimizer.step()
        return optimizer.state_dict()

    fresh = torch.optim.Adam(make_model().parameters())
    for saved in run_all(cluster, work):
        assert list(saved["state"]) == saved["param_groups"][0]["params"]
        fresh.load_state_dict(saved)


@pytest.mark.clip
def test_they_are_no_part_of_the_norm_and_not_clipped(cluster: LocalCluster) -> None:
    def work(session: Session) -> tuple[float | None, float]:
        model = make_model()
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session, max_grad_norm=0.5
        )
        compute(model, 0, 0)
        own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm().item()
        optimizer.step()
        return optimizer.grad_norm, own

    for norm, own in run_all(cluster, work):
        assert norm == pytest.approx(own)


def mean_of_the_exported(cluster: LocalCluster, **arguments: Any) -> float:
    """Train with inputs whose mean is 1 on one trainer and 3 on the other, and read the mean from the model."""
    exported: list[dict[str, Tensor]] = []

    def work(session: Session) -> None:
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5))
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model=model, session=session, **arguments
        )
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.tensor([[-1.0], [1.0]]) + 1 + 2 * session.rank).square().sum().backward()
            optimizer.step()
        optimizer.synchronize()
        session.report(done=1)
        exported.append(load(b"".join(cluster.view.model())))

    run_all(cluster, work)
    return exported[-1]["0.running_mean"].item()


@pytest.mark.parametrize(
    "arguments", [{"local_steps": 2}, {"overlap": True, "overlap_pulls": True}, {"pull_type": "int8"}], ids=str
)
def test_a_model_that_is_read_has_statistics_of_its_weights(cluster: LocalCluster, arguments: dict[str, Any]) -> None:
    assert mean_of_the_exported(cluster, **arguments) == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize(
    "settings",
    [{"max_delay": 2}, {"mode": "async", "compensation": "dc"}, {"mode": "ssp", "max_staleness": 1}],
    ids=str,
)
def test_such_a_model_comes_of_every_mode(own_cluster: StartCluster, settings: dict[str, Any]) -> None:
    # In asynchronous modes the last steps may be those of one trainer.
    assert 0.9 < mean_of_the_exported(own_cluster(**settings)) < 3.1


def test_a_skipped_round_leaves_the_means_of_the_round_before(own_cluster: StartCluster) -> None:
    def work(session: Session) -> list[dict[str, Tensor]]:
        model, found = make_model(), []
        optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session)
        for step in range(3):
            optimizer.zero_grad()
            compute(model, step, session.rank)
            if step == 1 and session.rank == 1:
                model[0].weight.grad.fill_(float("nan"))
            optimizer.step()
            found.append({name: buffer for name, buffer in buffers_of(model).items() if name != LOCAL})
        return found

    cluster = own_cluster(nonfinite="skip_round", on_trainer_loss="fail")
    for first, skipped, third in run_all(cluster, work):
        for name in first:
            assert torch.equal(skipped[name], first[name])
            assert not torch.equal(third[name], first[name])


def test_buffers_that_are_replaced_infinite_or_of_16_bits(cluster: LocalCluster) -> None:
    def work(session: Session) -> list[Tensor]:
        model = nn.Linear(2, 1)
        model.register_buffer("level", torch.zeros(3))
        model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        model.register_buffer("short", torch.zeros(2, dtype=torch.bfloat16))
        optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            model.level = model.level + (float("nan") if (session.rank, step) == (1, 2) else session.rank + 1.0)
            model.short.add_(session.rank)
            optimizer.step()
        return [model.level, model.mask, model.short]

    for level, mask, short in run_all(cluster, work):
        assert level.tolist() == [1.5 + 1.5 + 0.5] * 3  # the one that is not a number counts as it was before
        assert mask.tolist() == [[0, -torch.inf], [0, 0]]
        assert short.tolist() == [1.5, 1.5]


def test_a_buffer_that_becomes_another_one_is_refused(cluster: LocalCluster) -> None:
    def work(session: Session) -> None:
        model = make_model()
        optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session)
        model[1].running_mean = torch.zeros(5)
        with pytest.raises(BadModel, match=r"1\.running_mean.*has become another tensor"):
            optimizer.step()

    run_all(cluster, work)
