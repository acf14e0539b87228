"""`docs/inspection.md`: its commands run against a cluster that trains, and one of them serves the dashboard."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT

import httpx
import pytest
import torch
from safetensors.torch import load_file

from ..cluster.faulty_run import FaultyRun
from ..cluster.training_script import make_model
from ..cluster.up_support import RunningUp, wait_until
from .markdown import ROOT, examples, read
from .stage import Stage, needs_curl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.extended,
    needs_curl,
]

TEXT = read("inspection.md")
FIRST, UP, *SHELL = [block.text for block in examples(TEXT, "sh")]
[PYTHON] = [block.text for block in examples(TEXT, "python")]


@pytest.fixture(scope="module")
def run() -> Iterator[FaultyRun]:
    with FaultyRun(100_000, min_block_size=64) as run:
        run.wait_for_round(15)
        yield run


def environment(run: FaultyRun) -> dict[str, str]:
    return {**os.environ, "URL": run.cluster.address}


def test_with_a_token(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with stage.cluster:
        status = json.loads(stage.shell(FIRST.replace("http://127.0.0.1:7070", stage.cluster.address)))
    assert status["state"] == "gathering"


def test_the_dashboard_is_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    command, _, page = UP.replace("7070", port).partition("# then open ")
    gradpost, up, *arguments = shlex.split(command)
    assert (gradpost, up) == ("gradpost", "up")
    with RunningUp(*arguments, folder=ROOT, GRADPOST_STATE_DIR=str(tmp_path)) as running:

        def trains() -> bool:
            try:
                return httpx.get(f"{page.strip()}/v1/status").json()["state"] == "training"
            except httpx.TransportError:
                return False

        assert wait_until(trains, 90)
        assert "<title>" in httpx.get(page.strip()).raise_for_status().text
        running.signal(SIGINT)
        running.finish()


def test_every_command_works(run: FaultyRun, tmp_path: Path) -> None:
    script = "\n".join(SHELL)
    done = subprocess.run(
        ["bash", "-e"], input=f'curl() {{ command curl --fail-with-body "$@"; echo; }}\n{script}', text=True,
        cwd=tmp_path, env=environment(run), capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert load_file(tmp_path / "weight.safetensors")["0.weight"].shape == (64, 20)
    documents = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    assert [entry["action"] for entry in documents[-1] if entry["outcome"] == "done"] == [
        "set rate", "freeze", "unfreeze", "pause", "resume", "checkpoint",
    ]  # fmt: skip


def test_the_exported_model_is_loaded(run: FaultyRun, tmp_path: Path) -> None:
    code = f"{PYTHON}\nimport torch\ntorch.save(state, {str(tmp_path / 'state.pt')!r})\n"
    subprocess.run([sys.executable, "-c", code], env=environment(run), check=True, timeout=60)
    make_model().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
