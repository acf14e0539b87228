"""A run whose processes die around its end, or when it is resumed: nothing of it is lost, and nobody gets its place."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_client.testing.local_cluster import find_our_packages

from ..soaking import parametrize_sampled
from .faulty_run import SCRIPT, FaultyRun, expected_result

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(180)]

FIRST_ROUNDS = 20


def begin(folder: Path, **settings: Any) -> None:
    with FaultyRun(FIRST_ROUNDS, pservers=1, state_dir=str(folder), **settings) as run:
        run.results()
        run.cluster.summary()  # answered when the last checkpoint is written


def resumed(folder: Path, rounds: int = 60, pservers: int = 2, **settings: Any) -> FaultyRun:
    """It cannot take over the disks of one pserver, and begins with the checkpoint."""
    return FaultyRun(rounds, pservers=pservers, state_dir=str(folder), resume=True, **settings)


@parametrize_sampled("is_told_again", [False, True], [True])
def test_everybody_dies_before_the_checkpoint_is_installed(tmp_path: Path, is_told_again: bool) -> None:
    begin(tmp_path)
    with resumed(tmp_path, failpoints="open.before=kill") as run:
        for pserver in run.cluster.pservers:
            pserver.wait(60)
        run.kill(run.cluster.coordinator)
        # A supervisor starts it again with the environment that it had.
        run.cluster.restart_coordinator(GRADPOST_FAILPOINTS="", GRADPOST_RESUME=str(is_told_again).lower())
        for index in range(2):
            run.cluster.start_pserver(index, GRADPOST_FAILPOINTS="")
        assert run.results() == [expected_result(60)] * 2
        assert "begin 20" in run.wait_for_line("begin 20")


@parametrize_sampled("is_told_again", [False, True], [False])
def test_the_coordinator_dies_when_the_run_begins_and_a_pserver_later(tmp_path: Path, is_told_again: bool) -> None:
    begin(tmp_path)
    with resumed(tmp_path, rounds=200) as run:
        run.kill(run.cluster.coordinator)
        again = {"GRADPOST_RESUME": str(is_told_again).lower()}
        run.cluster.restart_coordinator(GRADPOST_FAILPOINTS="begin.before=kill", **again)
        run.cluster.coordinator.wait(60)
        run.cluster.restart_coordinator(**again)
        run.wait_for_round(60)
        run.kill(run.cluster.pservers[0])
        run.cluster.start_pserver(0)
        assert run.results() == [expected_result(200)] * 2


def test_who_was_done_is_not_awaited_by_a_coordinator_that_is_told_again_to_resume(tmp_path: Path) -> None:
    begin(tmp_path)
    with resumed(tmp_path, rounds=FIRST_ROUNDS + 10, pservers=1, rejoin_timeout_seconds=5) as run:
        run.kill(run.cluster.trainers[0])
        run.rounds = 400  # its next life has more to do than the other
        run.start_trainer(0)
        assert run.cluster.trainers[1].wait(60) == 0
        run.kill(run.cluster.coordinator)
        run.cluster.restart_coordinator(GRADPOST_RESUME="true")
        assert run.cluster.trainers[0].wait(60) == 0


def test_whoever_comes_first_to_a_finished_run_waits_for_the_others(tmp_path: Path) -> None:
    begin(tmp_path)
    with resumed(tmp_path, pservers=1) as run:
        run.kill(run.cluster.trainers[0])  # it has hardly begun
        run.wait_for_line("trainer 1] begin 20")
        run.start_trainer(0)
        assert run.results() == [expected_result(60)] * 2


def test_a_run_without_anything_to_go_back_to_ends(tmp_path: Path) -> None:
    """What its trainers have is no beginning: the slots are gone, and round 0 is."""
    with FaultyRun(2000, pservers=1, state_dir=str(tmp_path)) as run:
        run.wait_for_round(40)
        run.kill(run.cluster.pservers[0])
        shutil.rmtree(tmp_path / "pserver-0")
        shutil.rmtree(tmp_path / "checkpoints")
        run.cluster.start_pserver(0)
        assert [child.wait(60) for child in run.cluster.trainers] == [1, 1]
        run.wait_for_line("Ended: pservers [0] have lost their shards", of="trainer 0")


def start_stranger(run: FaultyRun, rounds: int) -> subprocess.Popen[str]:
    """A script that does not say which rank it has."""
    return subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), str(rounds)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=find_our_packages(run.cluster.environment(), first=False),
    )  # fmt: skip


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not in {lines}")


def test_a_script_that_waits_for_the_next_run_takes_nobodys_place(tmp_path: Path) -> None:
    """It asks four times a second, and whoever trains says once a second that it lives."""
    with FaultyRun(300, trainers=1, pservers=1, state_dir=str(tmp_path), lease_seconds=4) as run:
        run.wait_for_round(5)
        with start_stranger(run, 5) as stranger:
            try:
                read_until(stranger, "under way")
                run.kill(run.cluster.coordinator)
                run.cluster.restart_coordinator(GRADPOST_RESUME="true")
                assert run.results() == [expected_result(300, trainers=1)]
                assert read_until(stranger, "result")[-1] == f"result {expected_result(5, trainers=1)}"
                assert stranger.wait(20) == 0
            finally:
                stranger.kill()


def _rounds_of(folder: Path) -> list[int]:
    """Checkpoints that are whole."""
    return sorted(int(manifest.parent.name) for manifest in folder.glob("checkpoints/*/*/manifest.json"))


def test_the_result_of_a_run_is_kept_though_its_pservers_die_while_they_write_it(tmp_path: Path) -> None:
    """The scripts have been told that all is well, and the next run would begin by deleting the log."""
    with FaultyRun(20, state_dir=str(tmp_path), failpoints="checkpoint.shard=kill@2") as run:
        assert run.results() == [expected_result(20)] * 2
        for index, pserver in enumerate(list(run.cluster.pservers)):
            pserver.wait(30)
            run.cluster.start_pserver(index, GRADPOST_FAILPOINTS="")
        with start_stranger(run, 0) as stranger:  # it is to wait for this
            try:
                # On the disk, since the next run may begin as soon as they are there.
                run.wait_for(lambda: _rounds_of(tmp_path) == [0, 20], "the checkpoint of the last round")
            finally:
                stranger.kill()
