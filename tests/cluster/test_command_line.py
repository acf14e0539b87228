"""The commands that look into a run that trains, and change it, as a person types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..unit.cli.conftest import ROOT, Outcome, RunCommand, run_command, run_process  # noqa: F401 - a fixture
from .faulty_run import FaultyRun
from .training_script import make_model

pytestmark = [pytest.mark.cluster, pytest.mark.extended]
Gradpost = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRun]:
    place = tmp_path_factory.mktemp("checkpoints")
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as run:
        run.place = str(place)
        run.wait_for_round(15)
        yield run


@pytest.fixture
def gradpost(run: FaultyRun, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> Gradpost:  # noqa: F811
    monkeypatch.setenv("GRADPOST_COORDINATOR", run.cluster.address)

    def type_it(*arguments: object, exit_code: int = 0) -> Outcome:
        outcome = run_command(*arguments)
        assert (outcome.exit_code or 0) == exit_code, outcome
        return outcome

    return type_it


def test_parameters(gradpost: Gradpost, tmp_path: Path) -> None:
    listed = gradpost("params").stdout
    assert ": 4 parameters\n" in listed
    assert re.search(r"^0\.weight +64x20 +F32 +5,120 +0, 1$", listed, re.MULTILINE), listed
    names = [one["name"] for one in json.loads(gradpost("params", "--json").stdout)["parameters"]]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    shown = gradpost("params", "0.weight").stdout.splitlines()
    assert shown[0].startswith("0.weight  64x20  round ")
    assert any(line.startswith("  norm ") for line in shown)
    counts = shown[shown.index("     from    values") + 1 :]
    assert sum(int(line.split()[1].replace(",", "")) for line in counts) == 1280
    document = json.loads(gradpost("params", "0.weight", "--json").stdout)
    assert document["num_elements"] == 1280
    assert gradpost("params", "0.weight", "-o", tmp_path / "w.npy").stdout.startswith(f"{tmp_path}/w.npy: ")
    assert np.load(tmp_path / "w.npy", allow_pickle=False).shape == (64, 20)


def test_the_whole_model_that_trains(gradpost: Gradpost, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    said = gradpost("params", "-o", target).stdout
    assert said.startswith(f"{target}: 4 tensors of round ")
    make_model().load_state_dict(load_file(target), strict=True)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    said = gradpost("params", "-o", tmp_path / "nowhere" / "m.safetensors", exit_code=1).stderr
    assert said.endswith("m.safetensors cannot be written: No such file or directory\n")
    assert "is written as FILE.safetensors" in gradpost("params", "-o", tmp_path / "m.npy", exit_code=2).stderr
    assert "there is no parameter 'x'" in gradpost("params", "x", exit_code=2).stderr


def test_checkpoints(run: FaultyRun, gradpost: Gradpost, tmp_path: Path) -> None:
    created = json.loads(gradpost("checkpoint", "create", "--json").stdout)
    asked = json.loads(gradpost("checkpoint", "list", "--json").stdout)
    place = run.place
    found = json.loads(gradpost("checkpoint", "list", "--checkpoints", place, "--json").stdout)
    assert created in asked
    assert {one["round"] for one in asked} == {one["round"] for one in found}
    target = tmp_path / "m.safetensors"
    gradpost("checkpoint", "export", target, "--checkpoints", place, "--round", created["round"])
    make_model().load_state_dict(load_file(target), strict=True)
    said = gradpost("checkpoint", "export", target, "--checkpoints", place, "--round", 3, exit_code=1).stderr
    assert f"there is no complete checkpoint of round 3 in {place}; there are those of rounds " in said
    said = gradpost("checkpoint", "export", tmp_path / "no" / "m", "--checkpoints", place, exit_code=1).stderr
    assert "cannot be written" in said
    assert said.count("\n") == 1
    said = gradpost("checkpoint", "restore", "--round", 3, exit_code=2).stderr
    assert "gradpost checkpoint list prints the complete ones" in said
    said = gradpost("checkpoint", "restore", "--round", created["round"]).stdout
    assert f"goes on from round {created['round'] + 1:,} (attempt 1)" in said
    run.wait_for_line(f"the next one is {created['round'] + 1}", of="trainer 0")
    nothing = gradpost("checkpoint", "list", "--checkpoints", tmp_path / "none").stdout
    assert nothing == f"there is no complete checkpoint in {tmp_path}/none\n"


def test_events_are_followed_over_a_restart_of_the_coordinator(run: FaultyRun, gradpost: Gradpost) -> None:
    assert "trainer 0 has joined" in gradpost("events").stdout
    newest = json.loads(gradpost("events", "--json").stdout.splitlines()[-1])["id"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "gradpost", "events", "--follow", "--json", "--coordinator", run.cluster.address],
        env=run.cluster.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as follow:  # fmt: skip
        assert follow.stdout is not None
        assert follow.stderr is not None
        for line in follow.stdout:
            if json.loads(line)["id"] == newest:
                break
        run.cluster.coordinator.signal(SIGKILL)
        assert "is unreachable; trying again until Ctrl-C" in follow.stderr.readline()
        run.cluster.restart_coordinator()
        assert json.loads(follow.stdout.readline())["id"] > newest  # by the next life of the coordinator
        follow.send_signal(SIGINT)
        assert follow.wait(30) == 0
        assert follow.stderr.read() == ""


TENSORBOARD = "tensorboard.backend.event_processing.event_accumulator"
NUM_STEPS = 20


def read(folder: Path) -> Any:
    """Return all that TensorBoard finds in a folder."""
    accumulator = pytest.importorskip(TENSORBOARD, reason="pip install 'gradpost[tensorboard]'")
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
    for step in range(NUM_STEPS):
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
    assert len(curves["loss"]["0"]["round"]) == 2 * NUM_STEPS
    assert f"{4 * NUM_STEPS} points of curves" in last

    parameters = read(run / "parameters")
    newest = parameters.Histograms("w.x")[-1]
    assert newest.step == statistics["version"] == 2 * NUM_STEPS
    histogram, value = statistics["histogram"], newest.histogram_value
    edges = [histogram["begin"] + (i + 1) * histogram["width"] for i in range(len(histogram["counts"]))]
    assert (value.bucket_limit, value.bucket) == (edges, histogram["counts"])
    assert (value.min, value.max, value.num) == (statistics["minimum"], statistics["maximum"], 1000)
    assert value.sum == pytest.approx(statistics["mean"] * 1000)
    assert value.sum_squares == pytest.approx(statistics["norm"] ** 2)
    assert parameters.Scalars("norm/w.x")[-1].value == pytest.approx(statistics["norm"])
