"""The commands of docs/inspection.md, as they stand there, against a cluster that trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ..cluster.fault_script import make_model
from ..cluster.faulty_run import FaultyRun
from .markdown import code_blocks, read

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("curl") is None, reason="the examples want curl (apt-get install curl)"),
]

TEXT = read("inspection.md")
SHELL = [block.text for block in code_blocks(TEXT, "sh")]
[PYTHON] = [block.text for block in code_blocks(TEXT, "python")]


@pytest.fixture(scope="module")
def run() -> Iterator[FaultyRun]:
    with FaultyRun(100_000, min_block_size=64) as run:
        run.wait_for_round(15)
        yield run


def environment(run: FaultyRun) -> dict[str, str]:
    return {**os.environ, "URL": run.cluster.address, "TOKEN": "none is needed here"}


def test_every_command_works(run: FaultyRun, tmp_path: Path) -> None:
    script = "\n".join(line for text in SHELL for line in text.splitlines() if not line.startswith("export "))
    done = subprocess.run(
        ["bash", "-e"], input=f'curl() {{ command curl --fail-with-body "$@"; echo; }}\n{script}', text=True,
        cwd=tmp_path, env=environment(run), capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert load_file(tmp_path / "weight.safetensors")["0.weight"].shape == (64, 20)
    documents = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    assert documents[0]["state"] == "training"
    assert [entry["action"] for entry in documents[-1] if entry["outcome"] == "done"] == [
        "set rate", "freeze", "unfreeze", "pause", "set values", "resume", "checkpoint",
    ]  # fmt: skip


def test_the_model_is_loaded_as_it_says(run: FaultyRun, tmp_path: Path) -> None:
    code = f"{PYTHON}\nimport torch\ntorch.save(state, {str(tmp_path / 'state.pt')!r})\n"
    subprocess.run([sys.executable, "-c", code], env=environment(run), check=True, timeout=60)
    make_model().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
