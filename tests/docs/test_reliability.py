"""`docs/reliability.md`: its examples run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from signal import SIGINT
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..cluster.trainer_processes import free_port
from ..cluster.training import assert_identical, run_trainers
from ..cluster.up_support import RunningUp, wait_until
from .conftest import NUM_TRAINERS
from .markdown import examples, read, section
from .stage import arguments_of_up, run_shell, status_of

TEXT = read("reliability.md")
[LOOP] = examples(section(TEXT, "A loop that continues"), "python")
[SHELL] = examples(section(TEXT, "Restart, resume, roll back, export"), "sh")
[LOAD] = examples(section(TEXT, "Restart, resume, roll back, export"), "python")
SAVE, LOAD_OWN = examples(section(TEXT, "A script's own checkpoints"), "python")

BEFORE = """
import os, pathlib, time, gradpost, torch
torch.set_num_threads(1)
session, total_rounds = gradpost.connect(), 1_000_000
model = torch.nn.Linear(8, 3)
def batch_of(rank, round_):
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
"""
STEP = """
    print("computes round", optimizer.round + 1, flush=True)
    if session.rank == 1 and optimizer.round == 4 and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os._exit(1)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    time.sleep(0.02)
"""


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(150)
def test_one_machine(tmp_path: Path) -> None:
    assert LOOP.text.count("    ...\n") == 1
    (tmp_path / "train.py").write_text(BEFORE + LOOP.text.replace("    ...\n", STEP))
    port = str(free_port())
    up, resume, *look = SHELL.text.replace("7070", port).splitlines(keepends=True)

    with RunningUp(*arguments_of_up(up), folder=tmp_path) as running:
        running.wait_for("[trainer 1] computes round 5")  # where it is killed once
        running.wait_for("[trainer 1] computes round 10")
        running.signal(SIGINT)
        _, first, _ = running.finish()
    with RunningUp("--port", port, *arguments_of_up(resume), folder=tmp_path) as running:
        assert wait_until(lambda: status_of(f"http://127.0.0.1:{port}").get("round", 0) > 100, 60)
        printed = run_shell(tmp_path, *look)
        running.signal(SIGINT)
        _, second, _ = running.finish()
    assert computed(second)[0] - max([10, *computed(first)]) in (0, 1)  # an unfinished round is repeated
    assert "checkpoint of round" in printed

    names = {"safetensors": safetensors, "model": torch.nn.Linear(8, 3)}
    exec(LOAD.text.replace("model.safetensors", str(tmp_path / "model.safetensors")), names)


@pytest.mark.cluster
def test_a_checkpoint_of_the_script(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def take_steps(optimizer: RemoteOptimizer, model: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step + rank)
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def train(session: Session) -> dict[str, torch.Tensor]:
        model = torch.nn.Linear(8, 3)
        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3), session=session, model=model)
        take_steps(optimizer, model, session.rank)
        if session.rank == 0:
            exec(SAVE.text, {"torch": torch, "model": model, "optimizer": optimizer})
        return take_steps(optimizer, model, session.rank)

    def resume(session: Session) -> dict[str, torch.Tensor]:
        model = torch.nn.Linear(8, 3)
        names: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "gradpost": SimpleNamespace(RemoteOptimizer=partial(RemoteOptimizer, session=session)),
        }
        exec(LOAD_OWN.text, names)
        return take_steps(names["optimizer"], model, session.rank)

    expected, *_ = run_trainers(cluster.address, [train] * NUM_TRAINERS)
    for actual in run_trainers(cluster.address, [resume] * NUM_TRAINERS):
        assert_identical(actual, expected)


def computed(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"computes round (\d+)", output)]
