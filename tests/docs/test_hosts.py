"""docs/hosts.md: its command is played, those for several machines are ones that torchrun knows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ..cluster.up_support import ROOT, RunningUp
from .markdown import codes, examples, read, without_code

TEXT = read("hosts.md")
[COMMAND] = examples(TEXT, "sh")
[MACHINES] = examples(TEXT, "console")

pytestmark = pytest.mark.hosts


@pytest.mark.cluster
@pytest.mark.extended
def test_the_command_trains(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    [_, up, *rest] = shlex.split(COMMAND.text)
    assert up == "up"
    with RunningUp("--json", *rest, folder=tmp_path) as running:
        code, stdout, stderr = running.finish()
        assert running.has_left_nothing(), running.left()
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert summary["state"] == "finished"
    assert summary["rounds"] == 8 * 23
    assert summary["results"]["accuracy"] >= 0.97


def test_torchrun_knows_the_options() -> None:
    hosts = []
    for line in MACHINES.text.splitlines():
        if line.startswith("$ torchrun "):
            options = get_args_parser().parse_args(shlex.split(line)[2:])
            hosts.append(options.node_rank)
            assert (options.nnodes, options.nproc_per_node, options.training_script) == ("2", "8", "train.py")
    assert hosts == [0, 1]


def test_the_error_is_named() -> None:
    assert "host_broken" in codes(without_code(TEXT))
