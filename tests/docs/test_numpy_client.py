"""The numpy client of docs/protocol.md trains with another one and with a RemoteOptimizer, bit for bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .apps import read_bytes
from .markdown import examples, read, section

pytestmark = pytest.mark.cluster

SECTION = section(read("protocol.md"), "A client in numpy")
CLIENT, REST = [block.text for block in examples(SECTION, "python")]
CODE = f"{CLIENT}\n{REST}"
ROUNDS = 5
NUM_ELEMENTS = 10_000


def test_the_client_is_short_and_imports_nothing_of_ours() -> None:
    assert len([line for line in CLIENT.splitlines() if line]) <= 15
    modules = re.findall(r"^(?:import|from) (\w+)", CODE, re.MULTILINE)
    assert set(modules) <= {*sys.stdlib_module_names, "httpx", "numpy"}


def start(cluster: LocalCluster, rank: int, folder: Path) -> subprocess.Popen[str]:
    """Start the code of the document, with one more line that saves its result."""
    script = folder / f"client{rank}.py"
    script.write_text(f"{CODE}\nnp.save({str(folder / f'{rank}.npy')!r}, w)\n")
    env = {**cluster.environment(), "RANK": str(rank)}
    return subprocess.Popen(
        [sys.executable, script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(client: subprocess.Popen[str]) -> None:
    output, _ = client.communicate(timeout=60)
    assert client.returncode == 0, output


def expected() -> np.ndarray:
    """Return the result of halving the distance to the mean target in each round, which is exact in float32."""
    mean_target = np.arange(NUM_ELEMENTS, dtype=np.float32) + np.float32(0.5)
    return mean_target * np.float32(1 - 0.5**ROUNDS)


def test_two_of_them_train_together(cluster: LocalCluster, tmp_path: Path) -> None:
    clients = [start(cluster, rank, tmp_path) for rank in range(2)]
    for client in clients:
        finish(client)
    for rank in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"{rank}.npy"), expected())
    live = load(read_bytes(f"{cluster.address}/v1/parameters/w"))["w"]
    assert live.shape == (10, 1000)
    np.testing.assert_array_equal(live.reshape(-1), expected())
    summary = cluster.summary()
    assert (summary.state, summary.rounds, summary.transport) == ("finished", ROUNDS, "HTTP/1.1")


@pytest.mark.parametrize("numpy_rank", [0, 1], ids=["it uploads", "it only gets"])
def test_beside_a_remote_optimizer(cluster: LocalCluster, tmp_path: Path, numpy_rank: int) -> None:
    client = start(cluster, numpy_rank, tmp_path)
    rank = 1 - numpy_rank
    with Session(coordinator=cluster.address, rank=rank, world_size=2) as session:
        w = torch.nn.Parameter(torch.zeros(10, 1000))
        optimizer = RemoteOptimizer(torch.optim.SGD([("w", w)], lr=0.5), session=session)
        target = torch.arange(NUM_ELEMENTS, dtype=torch.float32).reshape(10, 1000) + rank
        for _ in range(ROUNDS):
            w.grad = w.detach() - target  # of half the squared distance
            optimizer.step()
    finish(client)
    np.testing.assert_array_equal(np.load(tmp_path / f"{numpy_rank}.npy"), expected())
    np.testing.assert_array_equal(w.detach().reshape(-1).numpy(), expected())
