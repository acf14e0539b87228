"""`docs/inspection.md`: its commands run against a cluster that trains. test_shell.py starts the same dashboard."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ..cluster.faulty_run import FaultyRun
from ..cluster.training_script import make_model
from .markdown import examples, read
from .stage import Stage, needs_curl, run_shell

pytestmark = [pytest.mark.cluster, pytest.mark.extended, needs_curl]

TEXT = read("inspection.md")
FIRST, _, *SHELL = [block.text for block in examples(TEXT, "sh")]
[PYTHON] = [block.text for block in examples(TEXT, "python")]


@pytest.fixture(scope="module")
def run() -> Iterator[FaultyRun]:
    with FaultyRun(100_000, min_block_size=64) as run:
        run.wait_for_round(15)
        yield run


def test_with_a_token(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with stage.cluster:
        status = json.loads(stage.shell(FIRST.replace("http://127.0.0.1:7070", stage.cluster.address)))
    assert status["state"] == "gathering"


def test_every_command_works(run: FaultyRun, tmp_path: Path) -> None:
    printed = run_shell(tmp_path, "\n".join(SHELL), URL=run.cluster.address)
    assert load_file(tmp_path / "weight.safetensors")["0.weight"].shape == (64, 20)
    documents = [json.loads(line) for line in printed.splitlines() if line.startswith(("{", "["))]
    requests = [event["facts"] for event in documents[-1] if event["by"]]
    assert [facts["action"] for facts in requests if facts["outcome"] == "done"] == [
        "set rate", "freeze", "unfreeze", "pause", "resume", "checkpoint",
    ]  # fmt: skip


def test_the_exported_model_is_loaded(run: FaultyRun, tmp_path: Path) -> None:
    code = f"{PYTHON}\nimport torch\ntorch.save(state, {str(tmp_path / 'state.pt')!r})\n"
    run_shell(tmp_path, shlex.join(["python", "-c", code]), URL=run.cluster.address)
    make_model().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
