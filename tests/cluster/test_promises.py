"""The promises that README.md makes of one script, through `gradpost up`: every mode, and the bits of one process.

Killed processes are in test_up.py and test_faults.py, the commands in test_endings.py and tests/docs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from .training import set_average
from .up_support import RunningUp

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

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
for inputs, labels in optimizer.batches(DataLoader(data, batch_size=16, sampler=sampler), epochs=5):
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


@pytest.mark.parametrize(
    ("options", "is_exact"),
    [
        ("", True),
        ("--pservers 3 --min-block-size 1", True),
        ("overlap", True),
        ("--durability none", True),
        ("--strategy ring", False),
        ("--mode async", False),
        ("--mode ssp --max-staleness 2", False),
        ("--max-delay 1", False),
        ("--push-type int8", False),
        ("--push-type bfloat16 --pull-type bfloat16", False),
    ],
)
def test_one_script_trains_in_every_mode(tmp_path: Path, options: str, is_exact: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {"GRADPOST_OVERLAP": "1"} if "overlap" in options else {}
    with RunningUp(
        *options.removeprefix("overlap").split(), "--", "python", "train.py", folder=tmp_path, **environ
    ) as up:
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
