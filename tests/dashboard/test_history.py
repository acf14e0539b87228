"""The runs of the history in a real browser: beside a run that trains, and without a cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from services.coordinator.history import RunHistory

from ..cluster.up_support import ROOT, SECONDS, clean_environment
from ..unit.coordinator.support import make_history_record
from .browsing import Visit

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

HOUR = 3600.0
LINES = "number => document.querySelectorAll('#curve-loss .scatterlayer .trace').length === number"


def write_runs(folder: Path) -> None:
    """Write a finished run, and a later run that failed, whose losses are those of every tenth round."""
    runs = RunHistory(folder)
    runs.write(make_history_record("aaa1", HOUR, [4.0, 3.0, 1.0], name="baseline", result="train_loss"))
    failure = {"detail": "trainer 1 failed: <b>ValueError</b>", "code": "trainer_lost"}
    runs.write(make_history_record("bbb2", 2 * HOUR, [5.0, 2.0], state="failed", failure=failure))


def traces(visit: Visit) -> list[dict[str, Any]]:
    """Return the name, the points, the colour and the dash of each line in the chart of the loss."""
    lines = "data.map(({ name, x, y, line }) => ({ name, x: [...x], y: [...y], color: line.color, dash: line.dash }))"
    return json.loads(
        visit.page.evaluate(f"(({{ data }}) => JSON.stringify({lines}))(document.querySelector('#curve-loss'))")
    )


def check_box(visit: Visit, run: str) -> None:
    visit.page.get_by_label(f"Compare run {run}").click()


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


def test_runs_are_compared_without_a_cluster(browser: Browser, tmp_path: Path) -> None:
    write_runs(tmp_path / "kept")
    with serving_history(tmp_path, HISTORY_DIR="kept") as address, Visit(browser, address) as visit:
        page = visit.page
        visit.wait_until(LINES, 1)  # the newest run
        assert page.inner_text("#connection") == "no cluster: kept runs of kept"
        sections = page.locator("main > section:visible").evaluate_all("all => all.map(one => one.id)")
        assert sections == ["curves", "history"]
        rows = [(row[1], row[6], *row[-2:]) for row in visit.table("#history")]
        assert rows == [("bbb2", "train.py --lr 0.1", 20, 2.0), ("aaa1", "train.py --lr 0.1", 30, 1.0)]
        assert page.locator("#history td:nth-child(4)").all_inner_texts() == ["failed", "finished"]
        assert page.locator("#history td:last-child").all_inner_texts() == ["loss 2", "train_loss 1"]
        check_box(visit, "aaa1")
        visit.wait_until(LINES, 2)
        newest, oldest = traces(visit)
        assert (newest["name"], newest["x"], newest["y"]) == ("run bbb2", [10, 20], [5, 2])
        assert (oldest["name"], oldest["x"], oldest["y"]) == ("baseline aaa1", [10, 20, 30], [4, 3, 1])
        assert len({newest["color"], oldest["color"]}) == len({newest["dash"], oldest["dash"]}) == 2
        assert page.locator("#curve-legend li").all_inner_texts() == ["run bbb2", "baseline aaa1"]
        page.select_option("#curve-x", "time")
        visit.wait_until("() => document.querySelector('#curve-loss').data[1].x[2] === 2")
        assert [line["x"] for line in traces(visit)] == [[0, 1], [0, 1, 2]]
        page.reload()
        visit.wait_until(LINES, 2)
        check_box(visit, "bbb2")
        visit.wait_until(LINES, 1)
        assert [line["name"] for line in traces(visit)] == ["baseline aaa1"]
        assert visit.errors == []
