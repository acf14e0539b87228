"""A standby replaces a pserver that is killed, stopped or wiped, and the run has the bits of an undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import Unreachable
from ps_protocol.messages import ClusterStatus
from ps_protocol.routes import PAUSE, RESUME
from trainer_client.client.inspection import ClusterView

from ..soaking import parametrize_sampled
from . import faulty_run
from .faulty_run import FaultyRun
from .up_support import RunningUp, train_script, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"kind": "counting", "mode": "async"},
}


@pytest.fixture(autouse=True)
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run last until its standbys have been started, without many rounds, which the test repeats."""
    monkeypatch.setattr(faulty_run, "ROUND_SECONDS", 0.06)


def replicated(rounds: int = 240, **settings: Any) -> FaultyRun:
    return FaultyRun(rounds, durability="replicated", **settings)


def wait_for_status(run: FaultyRun, what: str, seconds: float = 60) -> ClusterStatus:
    """Wait until every pserver has as many standbys in sync, or the incarnation, that `what` names."""
    deadline = time.monotonic() + seconds
    kind, _, wanted = what.rpartition(" ")
    while time.monotonic() < deadline:
        status = run.cluster.status()
        in_sync = [sum(s.follows == p.index and s.role == "in_sync" for s in status.standbys) for p in status.pservers]
        incarnations = [p.incarnation for p in status.pservers if p.index == 0]
        found = in_sync if kind == "in sync" else incarnations
        if found and min(found) >= int(wanted):
            return status
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {what}: {run.cluster.status()}")


def start_standbys(run: FaultyRun, num: int = 1) -> None:
    for index in range(run.cluster.num_pservers):
        for _ in range(num):
            run.cluster.start_standby(index)
    wait_for_status(run, f"in sync {num}")


@parametrize_sampled(("kind", "wiped"), product(KINDS, (False, True)), [("sync", True), ("async", False)])
def test_a_killed_pserver_is_replaced_without_a_loss(kind: str, wiped: bool, tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path, **KINDS[kind]) as run:
        start_standbys(run)
        run.wait_for_round(run.round_of(0) + 10)
        run.kill(run.cluster.pservers[0])
        if wiped:
            shutil.rmtree(tmp_path / "pserver-0")
        wait_for_status(run, "incarnation 2")
        run.wait_for_round(run.round_of(0) + 10)
        assert run.cluster.status().run == run.cluster.summary().run
        run.check_results()


VARIANTS: dict[str, dict[str, Any]] = {
    "clipped, with small types, overlap and AdamW": {
        "kind": "decaying", "push_type": "topk", "pull_type": "int8",
        "environment": {"GRADPOST_MAX_GRAD_NORM": "0.05", "GRADPOST_OVERLAP": "true"},
    },
    "local steps": {"push_type": "bfloat16", "environment": {"GRADPOST_LOCAL_STEPS": "4"}},
}  # fmt: skip


@pytest.mark.extended
@parametrize_sampled("variant", VARIANTS, [*VARIANTS][:1])
def test_a_fail_over_changes_no_bit_of_a_variant(variant: str, tmp_path: Path) -> None:
    results = []
    for is_disturbed in (False, True):
        with replicated(160, pservers=1, **VARIANTS[variant]) as run:
            if is_disturbed:
                start_standbys(run)
                run.kill(run.cluster.pservers[0])
                wait_for_status(run, "incarnation 2")
            results.append(run.results(90))
    assert results[0] == results[1]
    assert len(set(results[0])) == 1


@pytest.mark.extended
def test_no_step_of_stale_synchronous_training_is_lost_or_repeated() -> None:
    with replicated(pservers=1, kind="counting", mode="ssp", max_staleness=1) as run:
        start_standbys(run)
        run.kill(run.cluster.pservers[0])
        wait_for_status(run, "incarnation 2")
        run.check_results()


def test_each_pserver_is_replaced_in_turn(tmp_path: Path) -> None:
    with replicated(state_dir=tmp_path, **KINDS["sync"]) as run:
        start_standbys(run)
        for index in (0, 1):
            run.kill(run.cluster.pservers[index])
            run.cluster.report_end(index, run.cluster.pservers[index])
            run.wait_for_round(run.round_of(0) + 20)
            run.cluster.start_standby(index)
            wait_for_status(run, "in sync 1")
        run.check_results()


def test_a_stopped_pserver_follows_its_successor(tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path, **KINDS["sync"]) as run:
        start_standbys(run)
        run.cluster.pservers[0].signal(signal.SIGSTOP)
        wait_for_status(run, "incarnation 2")
        run.wait_for_round(run.round_of(0) + 10)
        run.cluster.pservers[0].signal(signal.SIGCONT)
        wait_for_status(run, "in sync 1")
        run.check_results()


@parametrize_sampled("point", ["fence.before", "promote.before", "promote.after"], ["promote.before"])
def test_a_coordinator_that_dies_during_a_fail_over_completes_it(point: str, tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path, failpoints=f"{point}=kill", **KINDS["sync"]) as run:
        start_standbys(run)
        run.kill(run.cluster.pservers[0])
        run.cluster.coordinator.wait(30)
        run.cluster.restart_coordinator(GRADPOST_FAILPOINTS="")
        wait_for_status(run, "incarnation 2")
        run.check_results()


def test_a_lost_standby_does_not_stop_the_run(tmp_path: Path) -> None:
    with replicated(pservers=1, state_dir=tmp_path, **KINDS["sync"]) as run:
        start_standbys(run)
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
                found = [p.incarnation for p in status.pservers]
                return found == [incarnation] and (not roles or [s.role for s in status.standbys if s.run] == [*roles])
            return False

        assert wait_until(is_so, 60)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the run, so that the standby has every round that a trainer has received."""
        with ClusterView(self._address) as view:
            view.change_run("POST", PAUSE)
            assert wait_until(lambda: view.status().standbys[0].round == view.status().round > 0, 60)
            yield
            view.change_run("POST", RESUME)

    def kill_oldest(self) -> None:
        """Kill the pserver: the oldest process of those that are or have been standbys as well."""
        pids = (pid for pid, command in self._up.left().items() if "-m services.pserver" in command)
        os.kill(min(pids), signal.SIGKILL)


@pytest.mark.parametrize(("durability", "role"), [("replicated", "in_sync"), ("log", "following")])
def test_up_replaces_a_dead_pserver_and_starts_another_standby(tmp_path: Path, durability: str, role: str) -> None:
    with UpWithStandby(tmp_path, GRADPOST_DURABILITY=durability) as up:
        for incarnation in (1, 2):  # the standby that was started at last replaces the one before
            up.wait_for(incarnation, role)
            with up.paused() if durability == "log" else nullcontext():
                up.kill_oldest()
                up.wait_for(incarnation + 1)
        up.wait_for(3, role)
    assert up.stderr.count("gradpost: pserver 0 was ended by SIGKILL") == up.stderr.count("a standby replaces it") == 2
    assert "starting it again" not in up.stderr


@pytest.mark.extended
def test_up_starts_the_folder_of_a_successor_that_died_again(tmp_path: Path) -> None:
    """It dies before another standby is in sync, so that the newest state is in its folder alone."""
    with UpWithStandby(tmp_path, GRADPOST_LEASE_SECONDS="2") as up:
        up.wait_for(1, "in_sync")
        up.kill_oldest()
        up.wait_for(2)
        up.kill_oldest()
        up.wait_for(3, "in_sync")
