"""Nothing is ever unpickled: every process of a cluster is watched from its first import to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer_client.testing import LocalCluster

from .conftest import Carrier

pytestmark = pytest.mark.cluster

# torch imports the module pickle; what counts is that nobody looks up a class that a pickle names.
WATCH = """
import os, sys

def watch(event, arguments):
    if event == "pickle.find_class":
        os.write(2, f"unpickled {arguments}\\n".encode())
        os._exit(99)

sys.addaudithook(watch)
with open(os.path.join(os.environ["WATCHED"], str(os.getpid())), "w") as file:
    file.write(" ".join(sys.orig_argv))
"""

TRAIN = """
import torch
from trainer_client import RemoteOptimizer, connect
import gradpost.main, gradpost.status

session = connect()
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=0.1), model=model)
for _ in range(2):
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    (tmp_path / "watched").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WATCHED", str(tmp_path / "watched"))
    return tmp_path


@pytest.mark.extended
def test_nothing_is_unpickled(environ: Path, carrier: Carrier) -> None:
    with LocalCluster(pservers=1, trainers=1, **carrier, exit_when_done=True) as cluster:
        assert cluster.run_trainers([sys.executable, str(environ / "train.py")]) == [0], list(cluster.output)
        assert [service.wait(30) for service in cluster.services] == [0, 0], list(cluster.output)
        pids = {str(child.pid) for child in (*cluster.services, *cluster.trainers)}
    assert pids <= {file.name for file in (environ / "watched").iterdir()}
    assert not [line for line in cluster.output if "unpickled" in line]


@pytest.mark.extended
def test_it_would_be_noticed(environ: Path) -> None:
    script = "import collections, pickle; pickle.loads(pickle.dumps(collections.OrderedDict()))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr[:9]) == (99, "unpickled")
