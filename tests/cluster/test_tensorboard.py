"""`gradpost tensorboard`: what TensorBoard reads from the files is what the API says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..unit.cli.conftest import ROOT, run_process

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'gradpost[tensorboard]'"
)

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

ROUNDS = 20


def read(folder: Path) -> Any:
    """All that TensorBoard finds in a folder."""
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def scalars(folder: Path, tag: str) -> list[tuple[float, int, float]]:
    return [(event.wall_time, event.step, event.value) for event in read(folder).Scalars(tag)]


def exporting(cluster: LocalCluster, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "gradpost", "tensorboard", "--logdir", str(folder)),
            *("--every-seconds", "0.1", "--coordinator", cluster.address),
        ],
        env=cluster.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def train(session: Session, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    for step in range(ROUNDS):
        parameter.grad = torch.linspace(-1, step, len(parameter))
        optimizer.step()
        session.report(loss=1 / (1 + step), accuracy=0.5)
        session.summary()  # a heartbeat goes before it, so that each is a point


def test_the_files_hold_what_the_api_says(tmp_path: Path) -> None:
    with LocalCluster(trainers=1, min_block_size=300) as cluster, httpx.Client(base_url=cluster.address) as http:
        with Session(coordinator=cluster.address) as session:
            parameter = torch.nn.Parameter(torch.zeros(1000))
            optimizer = RemoteOptimizer(torch.optim.SGD([("w.x", parameter)], lr=0.1), session=session)
            train(session, optimizer, parameter)
            with exporting(cluster, tmp_path) as export:
                assert export.stdout is not None
                first = export.stdout.readline()
                assert first == f"run {session.run} goes to {tmp_path}; to see it: tensorboard --logdir {tmp_path}\n"
                train(session, optimizer, parameter)
                session.close()  # the run is finished, and so is the export
                assert export.wait(60) == 0
                last = export.stdout.read()
        curves = http.get("/v1/curves").json()["curves"]
        statistics = http.get("/v1/statistics/w.x").json()
        run = tmp_path / session.run
        again = run_process(
            "-m", "gradpost", "tensorboard", "--logdir", str(tmp_path), "--coordinator", cluster.address
        )
    assert again.exit_code == 0, again.stderr  # and nothing is there twice
    assert sorted(curves) == ["accuracy", "loss"]
    for name, by_rank in curves.items():
        curve = by_rank["0"]
        values = [float(np.float32(value)) for value in curve["value"]]
        assert scalars(run / "trainer-0", name) == list(zip(curve["at"], curve["round"], values, strict=True))
    assert len(curves["loss"]["0"]["round"]) == 2 * ROUNDS
    assert f"{4 * ROUNDS} points of curves" in last

    parameters = read(run / "parameters")
    newest = parameters.Histograms("w.x")[-1]
    assert newest.step == statistics["version"] == 2 * ROUNDS
    histogram, value = statistics["histogram"], newest.histogram_value
    edges = [histogram["begin"] + (i + 1) * histogram["width"] for i in range(len(histogram["counts"]))]
    assert (value.bucket_limit, value.bucket) == (edges, histogram["counts"])
    assert (value.min, value.max, value.num) == (statistics["minimum"], statistics["maximum"], 1000)
    assert value.sum == pytest.approx(statistics["mean"] * 1000)
    assert value.sum_squares == pytest.approx(statistics["norm"] ** 2)
    assert parameters.Scalars("norm/w.x")[-1].value == pytest.approx(statistics["norm"])
