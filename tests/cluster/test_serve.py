"""Services started by hand with `gradpost serve`, and looked at with `gradpost status`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ps_protocol.errors import Unreachable
from trainer_client.inspection import ClusterView
from trainer_client.testing.local_cluster import find_our_packages

from .up_support import clean_environment, wait_until

pytestmark = pytest.mark.cluster

GRADPOST = [sys.executable, "-P", "-m", "gradpost"]
TRAIN = """
import torch
from trainer_client import RemoteOptimizer
optimizer = RemoteOptimizer(torch.optim.SGD(torch.nn.Linear(4, 2).named_parameters(), lr=0.1))
optimizer.step()
optimizer.session.report(accuracy=0.5)
"""


def environment(**more: str) -> dict[str, str]:
    return find_our_packages({**clean_environment(), **more}, first=True)


@contextmanager
def running(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*GRADPOST, *arguments], env=environment(**environ), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GRADPOST, *arguments], env=environment(**environ), capture_output=True, text=True, timeout=100, check=False
    )


def is_waiting_for(view: ClusterView, *names: str) -> bool:
    try:
        return view.status().waiting_for == names
    except Unreachable:
        return False


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services keep their state in the folder in which they are started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_cluster_by_hand(port: int) -> None:
    """A script outside of `gradpost up` finds it by GRADPOST_COORDINATOR, and all exit when the run is over."""
    url = f"http://127.0.0.1:{port}"
    with (
        running("serve", "coordinator", "--port", str(port), "--lease-seconds", "3", "--exit-when-done") as coordinator,
        running("serve", "pserver", "--exit-when-done", GRADPOST_COORDINATOR=url) as pserver,
    ):
        with ClusterView(url) as view:
            assert wait_until(lambda: is_waiting_for(view, "trainer 0"), seconds=60)
        shown = ask("status", GRADPOST_COORDINATOR=url)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "gathering, mode sync, round 0\nwaiting for trainer 0\n" in shown.stdout
        assert "\n0 of 1   http://127.0.0.1:" in shown.stdout
        script = subprocess.run(
            [sys.executable, "-c", TRAIN], env=environment(GRADPOST_COORDINATOR=url, RANK="0"), timeout=100, check=False
        )
        assert script.returncode == 0
        assert [process.wait(30) for process in (coordinator, pserver)] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_service_cleanly(port: int, number: signal.Signals) -> None:
    with running("serve", "coordinator", "--port", str(port), "--log-format", "json") as coordinator:
        assert coordinator.stderr is not None
        while json.loads(coordinator.stderr.readline())["event"] != "serving":
            pass
        coordinator.send_signal(number)
        assert coordinator.wait(30) == 0


def test_a_taken_port_is_one_line(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        outcome = ask("serve", "coordinator", "--port", str(port), "--log-format", "json")
    assert outcome.returncode == 1
    _, line = outcome.stderr.splitlines()  # the first says that it starts
    assert json.loads(line)["event"].startswith(f"cannot listen on 127.0.0.1:{port}: another process listens there")
