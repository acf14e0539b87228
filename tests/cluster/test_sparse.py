"""Two towers with sparse tables train in every mode, and all trainers end with the values of the pservers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradpost import RemoteOptimizer, Session, wrap_optimizers
from ps_protocol.encodings import TORCH_DTYPES
from trainer_client.client.inspection import ClusterView
from trainer_client.engines.script_optimizers import CombinedOptimizer
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .faulty_run import FaultyRun
from .trainer_processes import NUM_HOSTS, PROCESSES, WORLD, free_port, torchrun
from .training import SMALL, assert_identical, average, gradients_of, run_all, seeded, set_average, values
from .training_script import digest_of, loss_of_tables, make_tables

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # torch's own Adagrad
]

STEPS, WIDTH, POISONED = 20, 8, 5
USERS, ITEMS = 300, 101


class Towers(nn.Module):
    """The scores of users and bags of items."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", sparse=True)
        self.out = nn.Linear(2 * WIDTH, 1)
        seeded(self, seed)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([self.users(users), self.items(items)], 1))
        return found


def loss_of(model: Towers, step: int, rank: int) -> Tensor:
    """The loss of a batch, which has no examples in some steps of trainer 1."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    size = 0 if step % 7 == 3 and rank == 1 else 16
    users, items = (torch.randint(most, (size, n), generator=generator) for most, n in ((USERS, 1), (ITEMS, 3)))
    return (model(users[:, 0], items) - 1).square().sum() / 16


def make_optimizers(kind: str, model: Towers, **fused: bool) -> dict[str, Optimizer]:
    """Return optimizers of the dense and of the sparse parameters; `fused` is for the dense ones."""
    dense, sparse = list(model.out.parameters()), [model.users.weight, model.items.weight]
    if kind == "SparseAdam":
        return {"dense": torch.optim.Adam(dense, lr=0.01, **fused), "sparse": torch.optim.SparseAdam(sparse, lr=0.01)}
    optimizer = getattr(torch.optim, kind)
    return {"dense": optimizer(dense, lr=0.1, **fused), "sparse": optimizer(sparse, lr=0.1)}


def train_locally(kind: str, num_trainers: int, *, fused: bool, poisoned: int | None = None) -> dict[str, Tensor]:
    """Train in one process, without the poisoned step."""
    model = Towers()
    optimizer = CombinedOptimizer(make_optimizers(kind, model, fused=fused))
    for step in range(STEPS):
        set_average(optimizer, [partial(loss_of, model, step, rank) for rank in range(num_trainers)])
        if step != poisoned:
            optimizer.step()
    return values(model)


def wrap(kind: str, model: Towers, session: Session, **arguments: Any) -> list[Optimizer]:
    if kind == "SparseAdam":
        return list(wrap_optimizers(model=model, session=session, **make_optimizers(kind, model)))
    wrapped = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    return [RemoteOptimizer(wrapped, model=model, session=session, **arguments)]


def train(kind: str, done: Barrier, session: Session, *, poisoned: int | None = None) -> dict[str, Tensor]:
    """Train, and compare the parameters with the pservers' own, once no trainer takes a step."""
    model = Towers(seed=session.rank)
    optimizers = wrap(kind, model, session)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, session.rank).backward()
        if (step, session.rank) == (poisoned, 1):
            model.users.weight.grad._values()[3, 0] = float("nan")  # of one row alone
        for optimizer in optimizers:
            optimizer.step()
    remote = getattr(optimizers[0], "remote", optimizers[0])
    remote.synchronize()
    done.wait()
    if session.client.joined.consistency.is_async:  # a step without a gradient pulls what the others have pushed last
        remote.zero_grad()
        remote.step()
        remote.synchronize()
        done.wait()
    with ClusterView(session.client.settings.coordinator) as view:
        stored = safetensors.torch.load(b"".join(view.model()))
    done.wait()
    pulled = TORCH_DTYPES[session.client.run.plan.pulled("users.weight")]
    assert_identical(values(model), {name: value.to(pulled).float() for name, value in stored.items()})
    return values(model)


SYNC = [
    ("SGD", {}),
    ("Adagrad", {}),
    ("SparseAdam", {}),
    ("SGD", {"overlap": True, "overlap_pulls": True}),
    ("SGD", {"nonfinite": "skip_round"}),
    ("Adagrad", {"push_type": "bfloat16", "pull_type": "bfloat16"}),
    ("SGD", {"max_grad_norm": 0.5}),
]


@pytest.mark.parametrize(("kind", "settings"), SYNC, ids=str)
def test_trainers_in_rounds_have_the_bits_of_one_process(
    pair: LocalCluster, kind: str, settings: dict[str, Any]
) -> None:
    poisoned = POISONED if "nonfinite" in settings else None
    work = partial(train, kind, Barrier(2, timeout=30), poisoned=poisoned)
    one, other = run_all(pair, work, **settings, **SMALL)
    assert_identical(one, other)
    if not settings.keys() - {"overlap", "overlap_pulls", "nonfinite"}:  # the others change bits
        assert_identical(one, train_locally(kind, 2, fused=True, poisoned=poisoned))


@pytest.mark.extended
@pytest.mark.parametrize(
    "settings",
    [
        {"max_delay": 2},
        {"mode": "async"},
        {"mode": "async", "max_delay": 1, "read_consistency": "shard"},
        {"mode": "ssp", "max_staleness": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_trainers_end_with_the_values_of_the_pservers_in_other_modes(
    shared_cluster: StartCluster, settings: dict[str, Any], kind: str
) -> None:
    cluster = shared_cluster(min_block_size=100, **settings)
    assert_identical(*run_all(cluster, partial(train, kind, Barrier(2, timeout=30)), **SMALL))


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_a_script_without_a_cluster_has_the_bits_of_torch(kind: str) -> None:
    with Session(strategy="local") as session:
        model = Towers()
        optimizers = wrap(kind, model, session)
        for step in range(STEPS):
            optimizers[0].zero_grad()
            optimizers[-1].zero_grad()
            loss_of(model, step, 0).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert_identical(values(model), train_locally(kind, 1, fused=False))


@pytest.mark.extended
def test_a_killed_pserver_and_the_standby_in_place_of_another_change_no_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kind": "tables", "min_block_size": 100}
    with FaultyRun(50, round_seconds=0, **settings) as run:
        expected = run.results()
    with FaultyRun(50, round_seconds=0.1, **settings) as run:
        run.wait_for_round(10)
        run.restart_pserver(1)
        assert run.results() == expected
    replicated = {"num_standbys": 1, "durability": "replicated", "state_dir": tmp_path}
    with FaultyRun(50, round_seconds=0.1, **replicated, **settings) as run:
        run.wait_for_sync()
        run.wait_for_round(run.round_of(0) + 3)
        run.kill(run.cluster.pservers[0])
        assert run.results() == expected


@pytest.mark.extended
@pytest.mark.hosts
def test_the_processes_of_hosts_have_the_bits_of_one_process() -> None:
    model, port = make_tables(), free_port()
    optimizer = CombinedOptimizer({
        "sparse": torch.optim.Adagrad(model[0].parameters(), lr=0.1),
        "dense": torch.optim.Adagrad(model[1].parameters(), lr=0.1, fused=True),
    })  # fmt: skip
    for step in range(STEPS):
        ranks = [range(host * PROCESSES, (host + 1) * PROCESSES) for host in range(NUM_HOSTS)]
        losses = [[partial(loss_of_tables, model, rank, step) for rank in its] for its in ranks]
        means = average([average([gradients_of(optimizer, loss) for loss in its]) for its in losses])
        for parameter, mean in zip(model.parameters(), means, strict=True):
            parameter.grad = mean
        optimizer.step()
    run = FaultyRun(STEPS, kind="tables", min_block_size=100)
    run.prefix = {host: torchrun(host, port) for host in range(NUM_HOSTS)}
    with run:
        run.results(90)
        found = [line.split("result ")[1] for line in run.lines if "] result " in line]
    assert found == [f"{digest_of(model)} {STEPS}"] * WORLD
