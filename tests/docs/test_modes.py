"""docs/modes.md: its examples run, its commands are those of their programs, its figures are those of the code."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.run import get_args_parser

import gradpost
from services.pserver.async_run import HOLD_SECONDS
from trainer_client import RemoteOptimizer, Session, connect
from trainer_client.testing import LocalCluster

from ..cluster.up_support import ROOT, RunningUp
from .markdown import examples, read, section
from .stage import run_shell

TEXT = read("modes.md")
DILOCO, SCHEDULE, SCALER = (block.text for block in examples(TEXT, "python"))
ON_HOST, PLAN = (block.text for block in examples(TEXT, "sh"))
[MACHINES] = (block.text for block in examples(TEXT, "console"))


def test_how_long_a_push_waits_for_room_in_a_queue() -> None:
    assert f"delays the push for up to {HOLD_SECONDS:g} seconds" in section(TEXT, "Which mode and strategy")


@pytest.mark.cluster
def test_local_steps_with_an_outer_optimizer_and_a_schedule() -> None:
    model = torch.nn.Linear(4, 2)
    before = model.weight.detach().clone()
    names: dict[str, Any] = {"torch": torch, "gradpost": gradpost, "model": model}
    with LocalCluster(pservers=1, trainers=1) as cluster, connect(cluster.address):
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
    assert not torch.equal(model.weight, before)


@pytest.mark.cluster
@pytest.mark.amp
def test_the_loop_with_a_scaler() -> None:
    model = torch.nn.Linear(4, 2)
    before = model.weight.detach().clone()
    with (
        LocalCluster(pservers=1, trainers=1, nonfinite="skip_round") as cluster,
        Session(coordinator=cluster.address) as session,
    ):
        optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), session=session)
        names: dict[str, Any] = {"gradpost": gradpost, "torch": torch, "optimizer": optimizer}
        names |= {"model": model, "device": "cpu"}
        exec(SCALER, names | {"loader": [(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))] * 2})
        assert optimizer.round == 2
    assert not torch.equal(model.weight, before)


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


@pytest.mark.hosts
def test_torchrun_knows_the_options() -> None:
    hosts = []
    for line in MACHINES.splitlines():
        if line.startswith("$ torchrun "):
            options = get_args_parser().parse_args(shlex.split(line)[2:])
            hosts.append(options.node_rank)
            assert (options.nnodes, options.nproc_per_node, options.training_script) == ("2", "8", "train.py")
    assert hosts == [0, 1]


def test_the_plans(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(300, 200)}, tmp_path / "model.safetensors")
    of_file, of_shapes = PLAN.splitlines()
    assert "fc.weight" in run_shell(tmp_path, of_file)
    plan = json.loads(run_shell(tmp_path, of_shapes))
    assert {block["name"] for block in plan["blocks"]} == {"w1.block0", "w1.block1", "s.block0"}
    assert {block["pserver"] for block in plan["blocks"]} == {0, 1, 2}
