"""Processes die around the end of a run, or when it is resumed; `gradpost up` starts again what has died."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.coordinator.history import RunHistory
from trainer_client.testing.local_cluster import find_our_packages

from .faulty_run import SCRIPT, FaultyRun
from .training import assert_identical, expected_result
from .training_script import digest_of, make_model
from .up_support import (
    ROOT,
    RunningUp,
    clean_environment,
    train_script,
)

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]

FIRST_ROUNDS = 20


def test_a_script_that_ends_while_the_coordinator_is_away_is_not_lost() -> None:
    """It leaves when the interpreter ends, where no thread of a pool looks up a name any more."""
    with FaultyRun(60, trainers=1, pservers=1, rejoin_timeout_seconds=30) as run:
        run.environment = {"GRADPOST_COORDINATOR": run.cluster.address.replace("127.0.0.1", "localhost")}
        run.restart_trainer(0)
        run.wait_for_round(10)
        run.kill(run.cluster.coordinator)
        run.wait_for_line("waiting for the coordinator")
        run.cluster.restart_coordinator()
        run.check_results()
        assert run.cluster.summary().state == "finished"


def begin(folder: Path, **settings: Any) -> None:
    with FaultyRun(FIRST_ROUNDS, pservers=1, state_dir=str(folder), **settings) as run:
        run.results()
        run.cluster.summary()  # answered when the last checkpoint is written


def resumed(folder: Path, rounds: int = 60, pservers: int = 2, **settings: Any) -> FaultyRun:
    """Resume the run; it cannot take over the disks of one pserver, and begins with the checkpoint."""
    return FaultyRun(rounds, pservers=pservers, state_dir=str(folder), resume=True, **settings)


def test_all_processes_die_before_the_checkpoint_is_installed(tmp_path: Path) -> None:
    begin(tmp_path)
    with resumed(tmp_path, failpoints="open.before=kill") as run:
        for pserver in run.cluster.pservers:
            pserver.wait(60)
        run.kill(run.cluster.coordinator)
        # A supervisor starts it again with the environment that it had.
        run.cluster.restart_coordinator(GRADPOST_FAILPOINTS="", GRADPOST_RESUME="true")
        for index in range(2):
            run.cluster.start_pserver(index, GRADPOST_FAILPOINTS="")
        run.check_results()
        assert "begin 20" in run.wait_for_line("begin 20")


def start_stranger(run: FaultyRun, rounds: int) -> subprocess.Popen[str]:
    """Start a script without a rank."""
    return subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), str(rounds)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=find_our_packages(run.cluster.environment(), first=False),
    )  # fmt: skip


def rounds_of(folder: Path) -> list[int]:
    """Return the rounds of complete checkpoints."""
    return sorted(int(manifest.parent.name) for manifest in folder.glob("checkpoints/*/*/manifest.json"))


def test_the_result_of_a_run_is_kept_though_its_pservers_die_while_they_write_it(tmp_path: Path) -> None:
    """The scripts have ended without an error, and the next run would begin by deleting the log."""
    with FaultyRun(20, state_dir=str(tmp_path), failpoints="checkpoint.shard=kill@2") as run:
        run.check_results()
        for index, pserver in enumerate(list(run.cluster.pservers)):
            pserver.wait(30)
            run.cluster.start_pserver(index, GRADPOST_FAILPOINTS="")
        with start_stranger(run, 0) as stranger:  # it is to wait for this
            try:
                # On the disk, since the next run may begin as soon as they are there.
                run.wait_for(lambda: rounds_of(tmp_path) == [0, 20], "the checkpoint of the last round")
            finally:
                stranger.kill()


# ---------------------------------------------------------------------- `gradpost up`

ROUNDS = 60


def train(folder: Path, *arguments: object, rounds: int = ROUNDS, trouble: str = "", **environ: str) -> tuple[int, str]:
    command = ["--", "python", SCRIPT, rounds, 0.005, trouble]
    with RunningUp("--lease-seconds", 1, *arguments, *command, folder=folder, **environ) as up:
        code, stdout, stderr = up.finish()
        return code, stdout + stderr


def ask(folder: Path, *arguments: object) -> str:
    command = [sys.executable, "-P", "-m", "gradpost", *map(str, arguments)]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_services_and_scripts_that_die_are_started_again(tmp_path: Path) -> None:
    code, output = train(
        tmp_path, "--max-restarts", 3, trouble="1:20:raise-once", GRADPOST_FAILPOINTS="apply.after=kill@25"
    )
    assert code == 0, output
    assert output.count(f"result {expected_result(ROUNDS)}") == 2, output
    assert "trainer 1 failed with exit code 1; starting it again (2 restarts left)" in output
    assert "pserver 0 was ended by SIGKILL (out of memory?); starting it again" in output


def test_a_run_that_failed_is_resumed_and_its_model_exported(tmp_path: Path) -> None:
    code, output = train(tmp_path, trouble="1:20:raise")
    assert code == 1
    assert "no data" in output
    history = RunHistory(tmp_path / ".gradpost" / "history")
    [failed] = history.entries()
    before = history.read(failed.run).curves.curves["gradpost/learning_rate"][0].round
    code, output = train(tmp_path, "--resume")
    assert code == 0, output
    assert "the run fails unless" not in output
    waits = re.findall("waiting for pserver .", output)
    assert len(waits) == len(set(waits)), output
    record = history.read(failed.run)
    rounds = record.curves.curves["gradpost/learning_rate"][0].round
    assert (rounds[: len(before)], rounds) == (before, sorted(set(rounds)))
    assert rounds[-1] > before[-1]
    assert record.entry.earlier_seconds == failed.ended_at - failed.started_at
    assert re.search(r"^trained: .* rounds=60 new_rounds=4[01] seconds=", output, re.MULTILINE), output
    assert "begin 20" in output or "begin 19" in output, output
    assert output.count(f"result {expected_result(ROUNDS)}") == 2, output
    assert json.loads(ask(tmp_path, "checkpoint", "list", "--json"))[0]["round"] == ROUNDS
    assert "of round 60 of run" in ask(tmp_path, "checkpoint", "export", "model.safetensors")
    model = make_model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert f"{digest_of(model)} {ROUNDS}" == expected_result(ROUNDS)

    code, output = train(tmp_path, "--resume")  # nothing is left to train
    assert code == 0, output
    assert history.read(failed.run) == record


@pytest.mark.parametrize(
    ("options", "way_on"),
    [
        ("--mode sync", r"\. Continue: \S*gradpost up --resume .*"),
        ("--mode async", r"\. Continue from the newest checkpoint, if there is one: \S*gradpost up --resume .*"),
        ("--strategy ring", ""),
    ],
)
def test_the_end_of_an_interrupted_run_names_the_way_on(tmp_path: Path, options: str, way_on: str) -> None:
    in_each_round = "time.sleep(0.02); step == 40 and print('trains', flush=True)"
    script = train_script(tmp_path, rounds=20000, in_each_round=in_each_round)
    num_pservers = () if "ring" in options else ("--pservers", 1)
    with RunningUp(*num_pservers, *options.split(), "--", "python", script, folder=tmp_path) as up:
        up.wait_for("[trainer 0] trains", "[trainer 1] trains")
        up.signal(signal.SIGINT)
        code, stdout, stderr = up.finish()
    assert code == 128 + signal.SIGINT, stderr
    assert re.search(rf"(^|\n)gradpost: interrupted \(at round \d+\){way_on}\n$", stderr), stderr
    assert re.search(r"^interrupted: mode=", stdout, re.MULTILINE), stdout


@pytest.mark.parametrize("place", ["", "dir://shared::file://{}"])
def test_a_checkpoint_is_resumed_on_other_pservers_and_another_placement(tmp_path: Path, place: str) -> None:
    """The last place is one of fsspec's that processes share; `file://` is a folder to us."""
    environ = {"GRADPOST_CHECKPOINTS": place.format(tmp_path)} if place else {}
    code, output = train(tmp_path, "--lease-seconds", 5, **environ)
    assert code == 0, output
    assert bool(place) == (tmp_path / "shared").is_dir()
    more = ("--lease-seconds", 5, "--resume", "--pservers", 3, "--placement", "hash")
    code, output = train(tmp_path, *more, rounds=2 * ROUNDS, **environ)
    assert code == 0, output
    assert output.count(f"begin {ROUNDS}") == 2, output
    assert output.count(f"result {expected_result(2 * ROUNDS)}") == 2, output


def test_tied_parameters_and_buffers_are_exported(tmp_path: Path) -> None:
    script = tmp_path / "tied.py"
    script.write_text(
        """
import torch
from trainer_client import RemoteOptimizer

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into = torch.nn.Embedding(12, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 12, bias=False, dtype=torch.float32)
        self.out.weight = self.into.weight

torch.manual_seed(0)
model = Tied()
optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
rank = optimizer.session.rank
for _ in range(3):
    optimizer.zero_grad()
    model.out(model.norm(model.into(torch.arange(6) + 6 * rank))).square().mean().backward()
    optimizer.step()
torch.save(model.state_dict(), f"trained{rank}.pt")
"""
    )
    with RunningUp("--", "python", script, folder=tmp_path) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stdout + stderr
    ask(tmp_path, "checkpoint", "export", "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["norm.running_mean"].any()
    for rank in range(2):
        trained = torch.load(tmp_path / f"trained{rank}.pt", weights_only=True)
        assert tensors.keys() == trained.keys()
        del trained["norm.num_batches_tracked"]  # each trainer counts its own
        assert_identical(tensors, trained)
    assert torch.equal(tensors["into.weight"], tensors["out.weight"])
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64
