"""A standby replaces a pserver that is killed, stopped or wiped, and the run has the bits of an undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import Unreachable
from trainer_client.client.inspection import ClusterView

from ..soaking import parametrize_sampled
from . import faulty_run
from .faulty_run import FaultyRun
from .up_support import RunningUp, train_script, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run last until its standbys have been started, without many rounds, which the test repeats."""
    monkeypatch.setattr(faulty_run, "ROUND_SECONDS", 0.06)


def replicated(rounds: int = 240, **settings: Any) -> FaultyRun:
    return FaultyRun(rounds, durability="replicated", **settings)


@parametrize_sampled("wiped", (False, True), [True])
def test_a_killed_pserver_is_replaced_without_a_loss(wiped: bool, tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path) as run:
        run.start_standbys()
        run.wait_for_round(run.round_of(0) + 10)
        run.kill(run.cluster.pservers[0])
        if wiped:
            shutil.rmtree(tmp_path / "pserver-0")
        run.wait_for_incarnation(2)
        run.wait_for_round(run.round_of(0) + 10)
        assert run.cluster.status().run == run.cluster.summary().run
        run.check_results()


def test_each_pserver_is_replaced_in_turn(tmp_path: Path) -> None:
    with replicated(state_dir=tmp_path) as run:
        run.start_standbys()
        for index in (0, 1):
            run.kill(run.cluster.pservers[index])
            run.cluster.report_end(index, run.cluster.pservers[index])
            run.wait_for_round(run.round_of(0) + 20)
            run.cluster.start_standby(index)
            run.wait_for_sync()
        run.check_results()


def test_a_stopped_pserver_follows_its_successor(tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path) as run:
        run.start_standbys()
        run.cluster.pservers[0].signal(signal.SIGSTOP)
        run.wait_for_incarnation(2)
        run.wait_for_round(run.round_of(0) + 10)
        run.cluster.pservers[0].signal(signal.SIGCONT)
        run.wait_for_sync()
        run.check_results()


@parametrize_sampled("point", ["fence.before", "promote.before", "promote.after"], ["promote.before"])
def test_a_coordinator_that_dies_during_a_fail_over_completes_it(point: str, tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path, failpoints=f"{point}=kill") as run:
        run.start_standbys()
        run.kill(run.cluster.pservers[0])
        run.cluster.coordinator.wait(30)
        run.cluster.restart_coordinator(GRADPOST_FAILPOINTS="")
        run.wait_for_incarnation(2)
        run.check_results()


def test_a_lost_standby_does_not_stop_the_run(tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path) as run:
        run.start_standbys()
        run.kill(run.cluster.standbys[0])
        run.wait_for_round(run.round_of(0) + 20)
        run.check_results()


class UpWithStandby:
    """`gradpost up` with one pserver and one standby, whose training ends with the block."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self._folder = folder
        ends = "time.sleep(0.01); Path('stop').exists() and exit()"
        script = train_script(folder, rounds=100_000, in_each_round=ends)
        script.write_text("from pathlib import Path\n" + script.read_text())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        arguments = ("--pservers", 1, "--trainers", 1, "--standbys", 1, "--port", port, "--", "python", script)
        self._up = RunningUp(*arguments, folder=folder, cold=True, **environ)
        self.stderr = ""

    def __enter__(self) -> UpWithStandby:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        with self._up:
            if kind is None:
                (self._folder / "stop").touch()
                code, stdout, self.stderr = self._up.finish()
                assert code == 0, stdout + self.stderr

    def wait_for(self, incarnation: int, *roles: str) -> None:
        """Wait until the pserver has this incarnation, and its standbys have a replica and these roles."""

        def is_so() -> bool:
            with suppress(Unreachable), ClusterView(self._address) as view:
                status = view.status()
                found = [p.heartbeat.incarnation for p in status.pservers]
                return found == [incarnation] and (not roles or [s.role for s in status.standbys if s.run] == [*roles])
            return False

        assert wait_until(is_so, 60)

    def wait_for_training(self) -> None:
        """Wait until a round is complete."""
        with ClusterView(self._address) as view:
            assert wait_until(lambda: view.status().round > 0, 60)

    def list_pids(self) -> list[int]:
        """Return the processes of the pserver and of all that are or have been its standbys, the oldest first."""
        return sorted(pid for pid, command in self._up.left().items() if "-m services.pserver" in command)

    def kill_oldest(self) -> None:
        """Kill the pserver."""
        os.kill(self.list_pids()[0], signal.SIGKILL)


def test_up_replaces_a_dead_pserver_and_starts_another_standby(tmp_path: Path) -> None:
    with UpWithStandby(tmp_path) as up:
        for incarnation in (1, 2):  # the standby that was started at last replaces the one before
            up.wait_for(incarnation, "in_sync")
            up.kill_oldest()
            up.wait_for(incarnation + 1)
        up.wait_for(3, "in_sync")
    assert up.stderr.count("gradpost: pserver 0 was ended by SIGKILL") == up.stderr.count("a standby replaces it") == 2
    assert "starting it again" not in up.stderr


def test_up_restarts_a_pserver_that_dies_before_a_standby_is_in_sync(tmp_path: Path) -> None:
    with UpWithStandby(tmp_path) as up:
        up.wait_for(1)
        pserver, standby = up.list_pids()
        os.kill(standby, signal.SIGSTOP)
        up.wait_for_training()
        os.kill(pserver, signal.SIGKILL)
        up.wait_for(2)
        os.kill(standby, signal.SIGCONT)
        up.wait_for(2, "in_sync")
    assert "pserver 0 was ended by SIGKILL (out of memory?); starting it again (0 restarts left)" in up.stderr
