"""docs/cli.md: its commands run as they stand there."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ..cluster.faulty_run import FaultyRun
from .markdown import ROOT, code_blocks, read


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_every_command_works(tmp_path: Path) -> None:
    program = tmp_path / "gradpost"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m gradpost "$@"\n')
    program.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    place = tmp_path / "checkpoints"
    script = "\n".join(block.text for block in code_blocks(read("cli.md"), "sh"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free_port = taken.getsockname()[1]
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as run:
        run.wait_for_round(15)
        done = subprocess.run(
            ["bash", "-eux"], input=script, text=True, cwd=tmp_path, capture_output=True, timeout=280,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "GRADPOST_COORDINATOR": run.cluster.address,
                "GRADPOST_PORT": str(free_port),  # the doctor warns if the usual one is taken, as it may be here
                "PLACE": str(place),
                "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (64, 20)
