"""`docs/cli.md` and the first example of README.md run as they are printed, but for the port."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from ..cluster.faulty_run import FaultyRun
from .markdown import ROOT, examples, read, section
from .stage import environment, needs_curl, run_shell

TEXT = read("cli.md")
COMMANDS = "\n".join(block.text for block in examples(TEXT[: TEXT.index("## TensorBoard")], "sh"))
examples(section(TEXT, "TensorBoard"), "sh")  # tests/cluster/test_administration.py exports


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_every_command_works(tmp_path: Path) -> None:
    program = tmp_path / "gradpost"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m gradpost "$@"\n')
    program.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    place = tmp_path / "checkpoints"
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as run:
        run.wait_for_round(15)
        done = subprocess.run(
            ["bash", "-eux"], input=COMMANDS, text=True, cwd=tmp_path, capture_output=True, timeout=280,
            env=environment({
                "PATH": f"{tmp_path}:{os.environ['PATH']}", "GRADPOST_COORDINATOR": run.cluster.address,
                "PLACE": str(place), "OMP_NUM_THREADS": "1",
            }),
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (64, 20)


@contextmanager
def start(words: list[str], folder: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and kill it at the end."""
    with subprocess.Popen(
        words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


# ---------------------------------------------------------------- README.md

USE_IT = section((ROOT / "README.md").read_text(), "Use it")
[SCRIPT] = examples(USE_IT, "python")
[SHELL] = examples(USE_IT, "sh")
MODEL_AND_DATA = """
import collections, torch
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(100_000, 8), torch.randint(3, (100_000,)))
make_model = lambda: torch.nn.Sequential(collections.OrderedDict(fc=torch.nn.Linear(8, 3)))
"""


@pytest.mark.cluster
@pytest.mark.extended
@needs_curl
def test_the_first_example_trains_and_can_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL_AND_DATA + SCRIPT.text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    up, status, curl = SHELL.text.replace("7070", port).splitlines()
    address = f"http://127.0.0.1:{port}"
    variables = {"GRADPOST_COORDINATOR": address, "GRADPOST_STATE_DIR": str(tmp_path / "state")}
    with start(shlex.split(up), tmp_path, **variables) as training:
        try:
            assert training.stdout is not None
            assert port in training.stdout.readline()  # the coordinator is there
            with httpx.stream("GET", f"{address}/v1/events/stream", timeout=60) as events:
                next(line for line in events.iter_lines() if line.endswith('"facts":{"state":"training"}}'))
            assert "training" in run_shell(tmp_path, status, **variables)
            run_shell(tmp_path, curl)
            assert load_file(tmp_path / "fc.safetensors")["fc.weight"].shape == (3, 8)
            page = httpx.get(address, timeout=30)
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        finally:
            training.send_signal(signal.SIGINT)
            training.wait(60)
