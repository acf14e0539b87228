"""Processes die around the end of a run, or when it is resumed; `gradpost up` starts again what has died."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.coordinator.history import RunHistory

from .faulty_run import SCRIPT, FaultyRun
from .training import expected_result
from .training_script import digest_of, make_model
from .up_support import (
    ROOT,
    RunningUp,
    clean_environment,
    wait_until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]


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
        assert wait_until(lambda: rounds_of(tmp_path) == [0, 20], 60)


# ---------------------------------------------------------------------- `gradpost up`

ROUNDS = 60


def train(folder: Path, *arguments: object, rounds: int = ROUNDS, trouble: str = "", **environ: str) -> tuple[int, str]:
    command = ["--", "python", SCRIPT, rounds, 0.005, trouble]
    with RunningUp("--lease-seconds", 5, *arguments, *command, folder=folder, **environ) as up:
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


def test_a_checkpoint_is_resumed_on_other_pservers_and_another_placement(tmp_path: Path) -> None:
    """The place is one of fsspec's that processes share; `file://` alone is a folder to us."""
    place = f"dir://shared::file://{tmp_path}"
    code, output = train(tmp_path, GRADPOST_CHECKPOINTS=place)
    assert code == 0, output
    assert (tmp_path / "shared").is_dir()
    more = ("--resume", "--pservers", 3, "--placement", "hash")
    code, output = train(tmp_path, *more, rounds=2 * ROUNDS, GRADPOST_CHECKPOINTS=place)
    assert code == 0, output
    assert output.count(f"begin {ROUNDS}") == 2, output
    assert output.count(f"result {expected_result(2 * ROUNDS)}") == 2, output
