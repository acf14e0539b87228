"""The process with the newest folder leads, when each process of a shard has a disk of its own, as a pod has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from trainer_client.testing import Child, LocalCluster

from ..soaking import parametrize_sampled
from . import faulty_run
from .faulty_run import FaultyRun
from .up_support import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Pods(LocalCluster):
    """A cluster whose pserver processes have a state folder each."""

    def start_pserver(self, index: int, **env: Any) -> Child:
        volume = Path(self._settings["GRADPOST_STATE_DIR"]) / f"volume-{index}"
        return super().start_pserver(index, GRADPOST_STATE_DIR=str(volume), **env)


@contextmanager
def running_pods(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRun]:
    """Two pservers and two standbys, which only their indices distinguish. The standbys are in sync."""
    monkeypatch.setattr(faulty_run, "LocalCluster", Pods)
    with FaultyRun(800, standbys=1, checkpoints=folder) as run:
        for index in (2, 3):
            run.cluster.start_pserver(index)
        run.wait_for_sync()
        yield run


def fail_over(run: FaultyRun, former: str) -> None:
    """Kill pserver 0, which the process with index 2 replaces. Its former process follows, or stays dead."""
    run.kill(run.cluster.pservers[0])
    run.wait_for_incarnation(2)
    run.wait_for_round(run.round_of(0) + 20)
    if former == "following":
        run.cluster.start_pserver(0)
        run.wait_for_sync()


def kill_all(run: FaultyRun) -> None:
    for child in run.cluster.pservers:
        child.signal(SIGKILL)
    for child in run.cluster.pservers:
        child.wait(10)


def check_results(run: FaultyRun) -> None:
    run.check_results()
    assert not [line for line in run.lines if "the run is rolled back" in line]


@parametrize_sampled("former", ["dead", "following"], ["following"])
def test_the_promoted_process_leads_again_after_a_restart_of_all(
    former: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_pods(tmp_path, monkeypatch) as run:
        fail_over(run, former)
        kill_all(run)
        for index in (0, 1, 2, 3):
            run.cluster.start_pserver(index)
        run.wait_for_line("the newest folder of a lost pserver is here", of="pserver 2")
        check_results(run)


@parametrize_sampled("former", ["dead", "following"], ["dead"])
def test_a_process_with_an_older_folder_waits_for_the_promoted_one(
    former: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_pods(tmp_path, monkeypatch) as run:
        fail_over(run, former)
        kill_all(run)
        assert wait_until(lambda: all(p.index != 0 for p in run.cluster.status().pservers), 30)
        for index in (0, 1, 3):
            run.cluster.start_pserver(index)
        run.wait_for_line("this process has an older state and waits for it", of="pserver 0")
        before = run.round_of(0)
        time.sleep(1)
        assert run.round_of(0) == before
        run.cluster.start_pserver(2)
        run.wait_for_round(before + 20)
        run.wait_for_sync()  # the first process follows now
        check_results(run)
