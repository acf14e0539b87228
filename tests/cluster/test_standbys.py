"""A standby has the bits of its pserver, whatever dies. With `replicated` it replaces a pserver that is lost."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import httpx
import pytest

from ps_protocol.errors import Unreachable
from ps_protocol.messages import PserverState
from trainer_client.client.inspection import ClusterView
from trainer_client.testing import Child, LocalCluster

from .faulty_run import FaultyRun
from .trainer_processes import free_port
from .up_support import RunningUp, train_script, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def replicated(folder: Path, rounds: int) -> FaultyRun:
    """Return a run with one pserver that lasts for some fail-overs, without many rounds."""
    return FaultyRun(rounds, round_seconds=0.1, pservers=1, num_standbys=1, durability="replicated", state_dir=folder)


def test_a_pserver_that_is_killed_and_wiped_is_replaced_without_a_loss(tmp_path: Path) -> None:
    with replicated(tmp_path, 40) as run:
        run.wait_for_sync()
        run.wait_for_round(run.round_of(0) + 3)
        run.kill(run.cluster.pservers[0])
        shutil.rmtree(tmp_path / "pserver-0")
        run.wait_for_incarnation(2)
        run.check_results()


def test_a_stopped_pserver_follows_its_successor_and_may_be_lost_then(tmp_path: Path) -> None:
    with replicated(tmp_path, 90) as run:
        run.wait_for_sync()
        run.cluster.pservers[0].signal(SIGSTOP)
        run.wait_for_incarnation(2)
        run.wait_for_round(run.round_of(0) + 3)
        run.cluster.pservers[0].signal(SIGCONT)
        run.wait_for_sync()
        run.kill(run.cluster.pservers[0])
        run.wait_for_round(run.round_of(0) + 3)
        run.check_results()


class Pods(LocalCluster):
    """A cluster whose pserver processes have a state folder each, as pods have."""

    def start_pserver(self, index: int, **env: Any) -> Child:
        volume = Path(self._settings["GRADPOST_STATE_DIR"]) / f"volume-{index}"
        return super().start_pserver(index, GRADPOST_STATE_DIR=str(volume), **env)


def test_a_process_with_an_older_folder_waits_for_the_promoted_one(tmp_path: Path) -> None:
    """Processes 2 and 3 are standbys, which only their indices distinguish. Process 2 replaces pserver 0."""
    with FaultyRun(150, round_seconds=0.1, cluster_type=Pods, standbys=1, checkpoints=tmp_path) as run:
        for index in (2, 3):
            run.cluster.start_pserver(index)
        run.wait_for_sync()
        run.kill(run.cluster.pservers[0])
        run.wait_for_incarnation(2)
        run.wait_for_round(run.round_of(0) + 3)
        for child in run.cluster.pservers:
            child.signal(SIGKILL)
        for child in run.cluster.pservers:
            child.wait(10)
        assert wait_until(lambda: all(p.index != 0 for p in run.cluster.status().pservers), 30)
        for index in (0, 1, 3):
            run.cluster.start_pserver(index)
        run.wait_for_line("this process has an older state and waits for it", of="pserver 0")
        before = run.round_of(0)
        time.sleep(1)
        assert run.round_of(0) == before
        run.cluster.start_pserver(2)
        run.wait_for_round(before + 3)
        run.wait_for_sync()  # the first process follows now
        run.check_results()
        assert not [line for line in run.lines if "the run is rolled back" in line]


# ---------------------------------------------------------------------- standbys of a run that does not need them

ENDLESS = 1_000_000  # rounds
CLIPPED: dict[str, Any] = {"kind": "decaying", "environment": {"GRADPOST_MAX_GRAD_NORM": "0.05"}}


def wait_for_standby(run: FaultyRun, index: int, round_: int, *, attempt: int = 0) -> None:
    """Wait until a standby has this round. A killed one is listed until its lease ends."""

    def is_there() -> bool:
        found = [s for s in run.cluster.status().standbys if s.follows == index and s.run is not None]
        return any(s.attempt == attempt and s.round >= round_ for s in found)

    assert wait_until(is_there, 60), run.cluster.status().standbys


def has_bits(run: FaultyRun, index: int) -> bool:
    """Return whether the only standby of a pserver that is idle has its round and its bits."""
    leader = run.cluster.view.pserver_state(index, digest=True)
    found = []
    for standby in (s for s in run.cluster.status().standbys if s.follows == index):
        with suppress(httpx.TransportError):  # a killed one is listed until its lease ends
            answer = httpx.get(f"{standby.address}/v1/state", params={"digest": "true"}, timeout=30, trust_env=False)
            state = PserverState.from_answer(answer.raise_for_status().content)
            found.append((state.round, state.run, str(state.digest).partition("-")[0]))
    return found == [(leader.round, leader.run, str(leader.digest).partition("-")[0])]


def test_a_standby_catches_up_after_deaths_and_a_rollback() -> None:
    with FaultyRun(ENDLESS, round_seconds=0.08, local_transport=False, checkpoint_rounds=50, **CLIPPED) as run:
        first, _ = run.cluster.start_standby(0), run.cluster.start_standby(1)
        for index in (0, 1):
            wait_for_standby(run, index, 1)
        run.restart_pserver(0)
        run.wait_for_line("run installed", 2, of="pserver 0")
        wait_for_standby(run, 0, run.cluster.view.pserver_state(0).round)
        run.kill(first)
        second = run.cluster.start_standby(0)
        run.wait_for_line("replica copied", 2, of="standby of pserver 0")  # after the restart it needed none
        made = run.make_checkpoint()
        run.wait_for_round(made + 5)
        run.cluster.view.roll_back(made)
        run.wait_for_line("replica copied", 2, of="standby of pserver 1")
        for index in (0, 1):
            wait_for_standby(run, index, run.cluster.view.pserver_state(index).round + 5, attempt=1)
        for child in run.cluster.trainers:
            run.kill(child)
        for index in (0, 1):
            assert wait_until(lambda index=index: has_bits(run, index), 60)
        second.signal(SIGTERM)
        assert second.wait(20) == 0
        assert not [s for s in run.cluster.status().standbys if s.follows == 0]
        lines = [json.loads(line.partition("] ")[2]) for line in run.lines if line.startswith("[standby of pserver 1")]
        assert not [line for line in lines if line["level"] == "error"]


def test_a_standby_ends_with_the_cluster() -> None:
    with FaultyRun(40, round_seconds=0.1, local_transport=False, exit_when_done=True) as run:
        standby = run.cluster.start_standby(0)
        run.wait_for_line("replica copied")
        run.check_results()
        assert run.cluster.coordinator.wait(60) == 0
        assert standby.wait(20) == 0


# ---------------------------------------------------------------------- `gradpost up`


def is_in_sync(view: ClusterView, incarnation: int) -> bool:
    """Return whether the pserver has this incarnation, and a standby that may replace it."""
    with suppress(Unreachable):
        status = view.status()
        roles = [standby.role for standby in status.standbys if standby.run]
        return [p.heartbeat.incarnation for p in status.pservers] == [incarnation] and roles == ["in_sync"]
    return False


def test_up_replaces_a_dead_pserver_and_starts_another_standby(tmp_path: Path) -> None:
    script = train_script(tmp_path, rounds=100_000, in_each_round="time.sleep(0.2); os.path.exists('stop') and exit()")
    port = free_port()
    arguments = ("--pservers", 1, "--trainers", 1, "--standbys", 1, "--port", port, "--", "python", script)
    with (
        RunningUp(*arguments, folder=tmp_path, cold=True) as up,
        ClusterView(f"http://127.0.0.1:{port}") as view,
    ):
        for incarnation in (1, 2):  # the standby that was started at last replaces the one before
            assert wait_until(lambda at=incarnation: is_in_sync(view, at), 60)
            processes = sorted(pid for pid, command in up.left().items() if "-m services.pserver" in command)
            os.kill(processes[0], SIGKILL)  # the pserver: all others were started later
        assert wait_until(lambda: is_in_sync(view, 3), 60)
        (tmp_path / "stop").touch()
        code, stdout, stderr = up.finish()
    assert code == 0, stdout + stderr
    assert stderr.count("gradpost: pserver 0 was ended by SIGKILL") == stderr.count("a standby replaces it") == 2
    assert "starting it again" not in stderr
