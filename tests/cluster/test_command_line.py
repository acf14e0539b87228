"""The commands that look into a run that trains, and change it, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL

import numpy as np
import pytest
from safetensors.torch import load_file

from ..unit.cli.conftest import ROOT, Outcome, RunCommand, run_command  # noqa: F401 - a fixture
from .fault_script import make_model
from .faulty_run import FaultyRun

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

Gradpost = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRun]:
    place = tmp_path_factory.mktemp("checkpoints")
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as run:
        run.place = str(place)  # type: ignore[attr-defined]
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
    assert "0.weight   64x20  F32" in listed
    shown = gradpost("params", "0.weight").stdout.splitlines()
    assert shown[0].startswith("0.weight  64x20  round ")
    assert (
        sum(int(line.split()[1].replace(",", "")) for line in shown[shown.index("     from    values") + 1 :]) == 1280
    )
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
    place = run.place  # type: ignore[attr-defined]
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
    assert f"goes on from round {created['round'] + 1:,} (attempt " in said
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
