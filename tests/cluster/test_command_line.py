"""The commands that look into a run that trains, and change it, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ..unit.cli.conftest import ROOT, Outcome, run_process
from .fault_script import make_model
from .faulty_run import FaultyRun

pytestmark = [pytest.mark.cluster, pytest.mark.extended]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRun]:
    place = tmp_path_factory.mktemp("checkpoints")
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as run:
        run.place = str(place)  # type: ignore[attr-defined]
        run.wait_for_round(15)
        yield run


def gradpost(run: FaultyRun, *arguments: object, exit_code: int = 0) -> Outcome:
    outcome = run_process("-m", "gradpost", *map(str, arguments), GRADPOST_COORDINATOR=run.cluster.address)
    assert outcome.exit_code == exit_code, outcome
    return outcome


def test_parameters(run: FaultyRun, tmp_path: Path) -> None:
    listed = gradpost(run, "params").stdout
    assert ": 4 parameters\n" in listed
    assert "0.weight   64x20  F32" in listed
    shown = gradpost(run, "params", "0.weight").stdout.splitlines()
    assert shown[0].startswith("0.weight  64x20  round ")
    assert (
        sum(int(line.split()[1].replace(",", "")) for line in shown[shown.index("     from    values") + 1 :]) == 1280
    )
    document = json.loads(gradpost(run, "params", "0.weight", "--json").stdout)
    assert document["num_elements"] == 1280
    assert gradpost(run, "params", "0.weight", "-o", tmp_path / "w.npy").stdout.startswith(f"{tmp_path}/w.npy: ")
    assert np.load(tmp_path / "w.npy", allow_pickle=False).shape == (64, 20)


def test_the_whole_model_that_trains(run: FaultyRun, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    said = gradpost(run, "params", "-o", target).stdout
    assert said.startswith(f"{target}: 4 tensors of round ")
    make_model().load_state_dict(load_file(target), strict=True)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    said = gradpost(run, "params", "-o", tmp_path / "nowhere" / "m.safetensors", exit_code=1).stderr
    assert said.endswith("m.safetensors cannot be written: No such file or directory\n")
    assert "is written as FILE.safetensors" in gradpost(run, "params", "-o", tmp_path / "m.npy", exit_code=2).stderr
    assert "there is no parameter 'x'" in gradpost(run, "params", "x", exit_code=2).stderr


def test_checkpoints(run: FaultyRun, tmp_path: Path) -> None:
    created = json.loads(gradpost(run, "checkpoint", "create", "--json").stdout)
    asked = json.loads(gradpost(run, "checkpoint", "list", "--json").stdout)
    place = run.place  # type: ignore[attr-defined]
    found = json.loads(gradpost(run, "checkpoint", "list", "--checkpoints", place, "--json").stdout)
    assert created in asked
    assert {one["round"] for one in asked} == {one["round"] for one in found}
    target = tmp_path / "m.safetensors"
    gradpost(run, "checkpoint", "export", target, "--checkpoints", place, "--round", created["round"])
    make_model().load_state_dict(load_file(target), strict=True)
    said = gradpost(run, "checkpoint", "export", target, "--checkpoints", place, "--round", 3, exit_code=1).stderr
    assert f"there is no complete checkpoint of round 3 in {place}; there are those of rounds " in said
    said = gradpost(run, "checkpoint", "export", tmp_path / "no" / "m", "--checkpoints", place, exit_code=1).stderr
    assert "cannot be written" in said
    assert said.count("\n") == 1
    said = gradpost(run, "checkpoint", "restore", "--round", 3, exit_code=2).stderr
    assert "gradpost checkpoint list says which there are" in said
    said = gradpost(run, "checkpoint", "restore", "--round", created["round"]).stdout
    assert f"goes on from round {created['round']:,} (attempt " in said
    torch.testing.assert_close(load_file(target)["0.weight"].shape, (64, 20))
    nothing = gradpost(run, "checkpoint", "list", "--checkpoints", tmp_path / "none").stdout
    assert nothing == f"there is no complete checkpoint in {tmp_path}/none\n"


def test_events_are_followed_over_a_restart_of_the_coordinator(run: FaultyRun) -> None:
    assert "trainer 0 has joined" in gradpost(run, "events").stdout
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "gradpost", "events", "--follow", "--coordinator", run.cluster.address],
        env=run.cluster.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as follow:  # fmt: skip
        assert follow.stdout is not None
        assert follow.stderr is not None
        for line in follow.stdout:
            if "has joined" in line:
                break
        run.cluster.coordinator.signal(SIGKILL)
        assert "is gone; waiting for it, until Ctrl-C" in follow.stderr.readline()
        run.cluster.restart_coordinator()
        again = time.strftime("%H:%M")
        for line in follow.stdout:
            if "is training" in line or "is here" in line:
                break
        assert again[:2] in line
        follow.send_signal(SIGINT)
        assert follow.wait(30) == 0
        assert follow.stderr.read() == ""
