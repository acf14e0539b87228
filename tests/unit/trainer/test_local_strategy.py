"""With `strategy="local"` a script trains in its own process, without services, as torch.optim alone does."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradpost
from ps_protocol.errors import BadInput, Conflict, Unreachable
from trainer_client.session.session import ALONE

STEPS = 6


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": True},
        {"overlap": True, "overlap_pulls": True},
        {"expect": {"max_delay": 2}},
        {"expect": {"mode": "async"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_script_trains_as_with_its_own_optimizer(settings: dict[str, Any]) -> None:
    alone = make_model()
    expected = train(alone, torch.optim.Adam(alone.parameters(), lr=0.01))
    model = make_model()
    local = torch.optim.Adam(model.parameters(), lr=0.01)
    with gradpost.connect(strategy="local", **settings) as session:
        optimizer = gradpost.RemoteOptimizer(local, model=model)
        assert_same(train(model, optimizer), expected)
        assert (session.rank, session.world_size, session.strategy) == (0, 1, "local")
        assert (optimizer.round, optimizer.summary().rounds) == (STEPS, STEPS)
        assert len(optimizer.state_dict()["state"]) == 6
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["Adafactor", "Rprop", "ASGD", "Muon"])
def test_a_script_of_a_ring_trains_without_a_cluster(name: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model()
        parameters = [parameter for parameter in model.parameters() if name != "Muon" or parameter.dim() == 2]
        return model, getattr(torch.optim, name)(parameters, lr=0.01)

    expected = train(*make())
    model, optimizer = make()
    with gradpost.connect(strategy="local"):
        assert_same(train(model, gradpost.RemoteOptimizer(optimizer, model=model)), expected)


def test_gradients_are_clipped_to_the_norm() -> None:
    model = make_model()
    weight = model[0].weight
    before = weight.detach().clone()
    with gradpost.connect(strategy="local", max_grad_norm=0.5):
        optimizer = gradpost.RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        weight.grad = torch.full_like(weight, 3.0)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(3 * math.sqrt(weight.numel()))
        assert (before - weight).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_several_trainers_need_a_cluster() -> None:
    with pytest.raises(Conflict, match="without a cluster"):
        gradpost.connect(strategy="local", world_size=2)


SCRIPT = """
import torch, gradpost
torch.set_num_threads(1)
model = torch.nn.Embedding(2, 2, sparse=True, _weight=torch.zeros(2, 2))
model.bias = torch.nn.Parameter(torch.zeros(2))
optimizer = gradpost.RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
rank = optimizer.session.rank
for _ in range(3):
    optimizer.zero_grad()
    ((1 + 2 * rank) * (model(torch.tensor(rank)).sum() + model.bias.sum())).backward()
    optimizer.step()
print(f"{optimizer.session.world_size} {model.weight.tolist()} {model.bias.tolist()};", flush=True)
"""


def run_script(folder: Path, launcher: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script)]
    environ = {**{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")}, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)


def test_a_script_without_a_coordinator_trains_alone_and_says_so(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert (done.returncode, done.stdout) == (0, "1 [[-3.0, -3.0], [0.0, 0.0]] [-3.0, -3.0];\n")
    assert done.stderr == ALONE + "\n"


def test_a_script_with_a_coordinator_never_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:  # bound and not listening
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("GRADPOST_COORDINATOR", f"localhost:{nobody.getsockname()[1]}")
        monkeypatch.setenv("GRADPOST_RETRY_SECONDS", "0.2")
        with pytest.raises(Unreachable, match=r"did not answer for 0\.2 s \(ConnectError.*gradpost up -- python train"):
            gradpost.connect()


@pytest.mark.extended
def test_the_processes_of_a_host_train_together(tmp_path: Path) -> None:
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    done = run_script(tmp_path, launcher, GRADPOST_STRATEGY="local")
    # Three steps with the means of 1 and 0, of 0 and 3, and of 1 and 3.
    assert done.stdout.count("2 [[-1.5, -1.5], [-4.5, -4.5]] [-6.0, -6.0];") == 2


def test_only_embeddings_have_sparse_gradients_and_a_step_may_have_none() -> None:
    class Model(nn.Module):
        sparse = True  # which means something else here

        def __init__(self) -> None:
            super().__init__()
            self.table, self.weight = nn.Embedding(10, 4, sparse=True), nn.Parameter(torch.ones(4))

    model = Model()
    optimizer = gradpost.RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, strategy="local")
    optimizer.step()
    (model.table(torch.tensor([3])) * model.weight).sum().backward()
    optimizer.step()
    assert torch.equal(model.table.weight.grad.coalesce().indices(), torch.tensor([[3]]))
    optimizer.session.close()


@pytest.mark.parametrize(
    ("name", "options", "has_model", "said"),
    [
        (
            "SGD",
            {"momentum": 0.9},
            True,
            r"SGD with momentum cannot step sparse parameters: .* or create the Embedding",
        ),
        ("AdamW", {}, False, r"AdamW does not support sparse gradients, such as that of .* Use SparseAdam"),
    ],
)
def test_steps_of_tables_that_the_optimizer_cannot_take_are_refused(
    name: str, options: dict[str, Any], has_model: bool, said: str
) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    wrapped = getattr(torch.optim, name)(model.parameters(), lr=1.0, **options)
    with gradpost.connect(strategy="local"):
        optimizer = gradpost.RemoteOptimizer(wrapped, model=model if has_model else None)
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(BadInput, match=said):
            optimizer.step()


def test_a_step_of_a_table_is_unscaled_and_clipped_and_may_have_no_gradient() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = gradpost.RemoteOptimizer(sgd, model=model, strategy="local", max_grad_norm=1.0, nonfinite="skip_round")
    optimizer.step()
    assert optimizer.grad_norm == 0.0
    expected, scaler = model.weight.detach().clone(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected[3] -= 0.5  # its gradient is 2 in each of 4 columns
    scaler.scale(model(torch.tensor([3, 3])).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.grad_norm == 4.0
    torch.testing.assert_close(model.weight.detach(), expected)
    optimizer.session.close()
