"""The first example of the README, as it stands there but for the port: train, look who is here, read a parameter."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from signal import SIGINT

import httpx
import pytest
from safetensors.torch import load_file

from .markdown import ROOT, examples, section

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.extended,
    pytest.mark.skipif(shutil.which("curl") is None, reason="the example wants curl (apt-get install curl)"),
]

USE_IT = section((ROOT / "README.md").read_text(), "Use it")
[SCRIPT] = examples(USE_IT, "python")
[SHELL] = examples(USE_IT, "sh")
MODEL_AND_DATA = """
import collections, torch
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(100_000, 8), torch.randint(3, (100_000,)))
make_model = lambda: torch.nn.Sequential(collections.OrderedDict(fc=torch.nn.Linear(8, 3)))
"""


def test_it_trains_and_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL_AND_DATA + SCRIPT.text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    up, status, curl = SHELL.text.replace("7070", port).splitlines()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GRADPOST_COORDINATOR": f"http://127.0.0.1:{port}",  # what 7070 is without being said
        "GRADPOST_STATE_DIR": str(tmp_path / "state"),
    }
    with subprocess.Popen(
        ["/bin/sh", "-c", f"exec {up}"],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as training:
        try:
            assert training.stderr is not None
            assert port in training.stderr.readline()  # the coordinator is there
            with httpx.stream("GET", f"http://127.0.0.1:{port}/v1/events/stream", timeout=60) as events:
                next(line for line in events.iter_lines() if line.endswith('"facts":{"state":"training"}}'))
            shown = subprocess.run(
                status, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
            ).stdout
            assert "training" in shown, shown
            subprocess.run(curl, shell=True, cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True)
            assert load_file(tmp_path / "fc.safetensors")["fc.weight"].shape == (3, 8)
            page = httpx.get(f"http://127.0.0.1:{port}/", timeout=30)
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        finally:
            training.send_signal(SIGINT)
