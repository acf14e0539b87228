"""docs/cli.md: its commands run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ..cluster.faulty_run import FaultyRun
from ..cluster.up_support import wait_until
from .markdown import ROOT, examples, read, section
from .stage import environment

TEXT = read("cli.md")
SCRIPT = "\n".join(block.text for block in examples(TEXT[: TEXT.index("## TensorBoard")], "sh"))
[TENSORBOARD] = examples(section(TEXT, "TensorBoard"), "sh")


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
            ["bash", "-eux"], input=SCRIPT, text=True, cwd=tmp_path, capture_output=True, timeout=280,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "GRADPOST_COORDINATOR": run.cluster.address,
                "PLACE": str(place),
                "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (64, 20)


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_tensorboard(tmp_path: Path) -> None:
    """Both go on until Ctrl-C."""
    pytest.importorskip("tensorboard", reason="pip install 'gradpost[tensorboard]'")
    export, show = (shlex.split(line, comments=True) for line in TENSORBOARD.text.splitlines())
    with (
        FaultyRun(100_000, lease_seconds=30) as run,
        start(export, tmp_path, GRADPOST_COORDINATOR=run.cluster.address) as exporting,
    ):
        assert exporting.stdout is not None
        assert exporting.stdout.readline().endswith(f": {shlex.join(show)}\n")
        assert wait_until(lambda: any(tmp_path.glob("runs/*/parameters/*")), 90)
        exporting.send_signal(signal.SIGINT)
        assert exporting.wait(60) == 0
    with start(show, tmp_path) as showing:
        assert showing.stdout is not None
        assert any(re.search(r"TensorBoard [\d.]+ at http://", line) for line in showing.stdout)


@contextmanager
def start(words: list[str], folder: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command, which is killed in the end."""
    with subprocess.Popen(
        words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
