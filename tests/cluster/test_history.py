"""The history of `gradpost up`: in the dashboard of the next run, and in `gradpost dashboard` without a cluster."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ..unit.cli.conftest import RunCommand, run_command  # noqa: F401 - a fixture
from .test_up import run_up
from .up_support import ROOT, SECONDS, clean_environment, train_script

pytestmark = pytest.mark.cluster

# The first step of the second run prints the history that its coordinator serves.
ASK = """
    if step == 0 and session.rank == 0:
        from urllib.request import urlopen
        print(urlopen(os.environ["GRADPOST_COORDINATOR"] + "/v1/history").read().decode(), flush=True)
    if step == 3 and session.rank == 1: raise ValueError("the batch is empty")
"""


@contextmanager
def serving_history(folder: Path, **settings: str) -> Iterator[str]:
    """Run `gradpost dashboard` in this folder; yields its address, ends it by SIGINT, and checks its exit code."""
    variables = {f"GRADPOST_{name}": value for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gradpost", "dashboard", "--port", "0"],
        cwd=folder, env={**clean_environment(), "PYTHONPATH": str(ROOT), **variables}, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("dashboard: http://127.0.0.1:")
        yield line.split()[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_runs_stay_listed_after_their_cluster_and_their_folders(tmp_path: Path) -> None:
    command = ("--pservers", 1, "--", "python")
    code, _, stderr = run_up("--run-name", "first", *command, train_script(tmp_path), folder=tmp_path)
    assert code == 0, stderr
    code, stdout, stderr = run_up(*command, train_script(tmp_path, in_each_round=ASK), folder=tmp_path)
    assert code == 1, stderr
    [line] = (line for line in stdout.splitlines() if line.startswith('[trainer 0] [{"run"'))
    [first] = json.loads(line.removeprefix("[trainer 0] "))
    assert (first["state"], first["rounds"], first["failure"], first["name"]) == ("finished", 5, None, "first")
    assert first["optimizer"].startswith("SGD")
    assert (first["results"].keys(), first["results"]["accuracy"]) == ({"loss", "accuracy"}, 0.5)

    for folder in (tmp_path / ".gradpost").glob("up-*"):
        shutil.rmtree(folder)
    with serving_history(tmp_path) as address, httpx.Client(base_url=address) as http:
        second, again = http.get("/v1/history").json()
        assert again == first
        failure = "trainer 1 failed: ValueError: the batch is empty"
        assert (second["state"], second["rounds"], second["failure"]) == ("failed", 4, failure)
        assert second["started_at"] > first["ended_at"] > first["started_at"]
        record = http.get(f"/v1/history/{first['run']}").json()
        assert [trainer["state"] for trainer in record["status"]["trainers"]] == ["done", "done"]
        assert (record["summary"]["rounds"], record["summary"]["transport"]) == (5, "HTTP/2")
        assert {name: sorted(record["curves"]["curves"][name]) for name in ("accuracy", "loss")} == {
            "accuracy": ["0", "1"],
            "loss": ["0", "1"],
        }
        page = http.get("/")
        assert 'data-kept-runs=".gradpost/history"' in page.text
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert http.get("/v1/status").status_code == 404
        assert http.get("/v1/history", headers={"host": "rebound.example"}).json()["code"] == "bad_host"


def test_it_needs_a_run_and_a_loopback_address(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811 - a fixture
) -> None:
    outcome = run_command("dashboard", "--state-dir", tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert f"there is no run in {tmp_path / 'history'}" in outcome.stderr
    outcome = run_command("dashboard", "--state-dir", tmp_path, "--host", "0.0.0.0")
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert "0.0.0.0 can be reached from other machines" in outcome.stderr
