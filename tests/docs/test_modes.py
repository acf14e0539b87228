"""The examples of `docs/modes.md`, `docs/overview.md` and the numpy client of `docs/protocol.md` train."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import Counter
from safetensors.numpy import load
from safetensors.torch import save_file

import gradpost
from gradpost import RemoteOptimizer, Session
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.testing import LocalCluster

from ..cluster.training import run_trainers
from ..cluster.up_support import ROOT, RunningUp
from .apps import read_bytes
from .conftest import NUM_PSERVERS, NUM_TRAINERS
from .markdown import codes, examples, read, section, tables
from .stage import run_shell

OVERVIEW, MODES = read("overview.md"), read("modes.md")
DILOCO, SCHEDULE, EMBEDDINGS, SCALER = (block.text for block in examples(MODES, "python"))
ON_HOST, PLAN = (block.text for block in examples(MODES, "sh"))
examples(MODES, "console")  # test_pages.py checks torchrun's options


def test_the_example_of_slicing() -> None:
    slicing = section(OVERVIEW, "Slicing and placement")
    [command] = [code for code in codes(slicing) if code.startswith("gradpost plan")]
    parameters = [
        ParameterSpec(name, tuple(int(size) for size in shape.split("x")))
        for name, shape in re.findall(r"--param (\w+):(\w+)", command)
    ]
    num_pservers = re.search(r"--pservers (\d+)", command)
    assert num_pservers
    plan = make_plan(parameters, int(num_pservers[1]))
    assert [list(row.values()) for row in tables(slicing)[0]] == [
        [f"`{block.name}`", f"{block.begin} to {block.end}", str(block.pserver)] for block in plan.blocks
    ]


@pytest.mark.cluster
def test_a_step_costs_the_documented_requests_and_bytes(cluster: LocalCluster) -> None:
    measured = re.search(
        r"with (\d) trainers, (\d) pservers, SGD and the one parameter `w1` \((\d+) bytes\), a step takes each trainer "
        r"(\d+) requests, (\d+) bytes out and (\d+) bytes in",
        section(OVERVIEW, "What a step costs"),
    )
    assert measured
    trainers, pservers, parameter_bytes, *costs = map(int, measured.groups())
    assert (trainers, pservers) == (NUM_TRAINERS, NUM_PSERVERS)

    def train(session: Session) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(10, 1000))
        assert parameter.nbytes == parameter_bytes
        parameter.grad = torch.ones(10, 1000)
        optimizer = RemoteOptimizer(torch.optim.SGD([("w1", parameter)], lr=0.1), session=session)
        before = count(session)
        optimizer.step()
        return [after - before for before, after in zip(before, count(session), strict=True)]

    assert run_trainers(cluster.address, [train] * NUM_TRAINERS) == [costs, costs]


def count(session: Session) -> list[float]:
    """Return requests without retries, which only wait for other trainers, and bytes pushed and pulled."""

    def total(counter: Counter) -> float:
        samples = [sample for family in counter.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name.endswith("_total"))

    metrics = session.client.metrics
    return [total(metrics.requests) - total(metrics.retries), total(metrics.pushed_bytes), total(metrics.pulled_bytes)]


def test_local_steps_with_an_outer_optimizer_and_a_schedule() -> None:
    model = torch.nn.Linear(4, 2)
    names: dict[str, Any] = {"torch": torch, "gradpost": gradpost, "model": model}
    with gradpost.connect(strategy="local"):
        exec(DILOCO, names)
        optimizer = names["optimizer"]
        names["schedule"] = torch.optim.lr_scheduler.ExponentialLR(names["inner"], 0.9)
        for step in range(50):
            assert optimizer.round == 0, step
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            exec(SCHEDULE, names)
    assert optimizer.round == 1
    assert names["schedule"].get_last_lr() == [pytest.approx(1e-3 * 0.9**50)]


def test_an_embedding_and_a_dense_part_have_their_own_optimizers() -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(9, 2, sparse=True), "dense": torch.nn.Linear(2, 1)})
    before = model.embedding.weight.detach().clone()
    names: dict[str, Any] = {"torch": torch, "gradpost": gradpost, "model": model}
    with gradpost.connect(strategy="local"):
        exec(EMBEDDINGS, names)
        model.dense(model.embedding(torch.tensor([3, 7]))).sum().backward()
        names["table"].step()
        names["dense"].step()
    changed = (model.embedding.weight != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [3, 7]


@pytest.mark.amp
def test_the_loop_with_a_scaler() -> None:
    model = torch.nn.Linear(4, 2)
    with gradpost.connect(strategy="local", nonfinite="skip_round"):
        optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
        names: dict[str, Any] = {"gradpost": gradpost, "torch": torch, "optimizer": optimizer}
        names |= {"model": model, "device": "cpu"}
        exec(SCALER, names | {"loader": [(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))] * 2})
        assert optimizer.round == 2


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.hosts
def test_the_processes_of_a_host_train(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    [_, up, *rest] = shlex.split(ON_HOST)
    assert up == "up"
    with RunningUp("--json", *rest, folder=tmp_path) as running:
        code, stdout, stderr = running.finish()
        assert running.has_left_nothing(), running.left()
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert summary["state"] == "finished"
    assert summary["rounds"] == 8 * 23
    assert summary["results"]["accuracy"] >= 0.97


def test_the_plans(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(300, 200)}, tmp_path / "model.safetensors")
    of_file, of_shapes = PLAN.splitlines()
    assert "fc.weight" in run_shell(tmp_path, of_file)
    plan = json.loads(run_shell(tmp_path, of_shapes))
    assert {block["name"] for block in plan["blocks"]} == {"w1.block0", "w1.block1", "s.block0"}
    assert {block["pserver"] for block in plan["blocks"]} == {0, 1, 2}


# ---------------------------------------------------------------------- numpy client


SECTION = section(read("protocol.md"), "A client in numpy")
CLIENT, REST = [block.text for block in examples(SECTION, "python")]
CODE = f"{CLIENT}\n{REST}"
ROUNDS = 5
NUM_ELEMENTS = 10_000


@pytest.mark.cluster
def test_the_client_imports_nothing_of_ours() -> None:
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


@pytest.mark.cluster
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
