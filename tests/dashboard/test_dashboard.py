"""The dashboard in a real browser: before, during, after and without a run, and its history."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from playwright.sync_api import Browser

from services.coordinator.history import RunHistory
from trainer_client.testing import LocalCluster

from ..cluster.up_support import ROOT, SECONDS, clean_environment
from ..unit.coordinator.support import make_history_record
from .browsing import Visit
from .conftest import SCRIPT, Closed

pytestmark = [pytest.mark.cluster, pytest.mark.extended]


def test_it_asks_for_the_token_once(browser: Browser, closed: Closed) -> None:
    token = closed.token()
    with Visit(browser, closed.address) as visit:
        visit.page.wait_for_selector("#sign-in[open]")
        assert not [r.url for r in visit.requests if "/v1/" in r.url]  # it does not try without one
        assert visit.errors == []
        visit.sign_in("x" * len(token))
        visit.wait_until("() => document.querySelector('#sign-in-problem').textContent.includes('was refused')")
        while not visit.errors:
            visit.page.wait_for_event("console")
        assert all("401" in error for error in visit.errors)
        visit.errors.clear()
        visit.sign_in(token)
        visit.wait_until_live()
        visit.page.reload()
        visit.wait_until_live()
        assert not visit.page.is_visible("#sign-in")
        assert visit.errors == []
        assert not [r.url for r in visit.requests if token in r.url]
        assert visit.hosts == {urlsplit(closed.address).netloc}
        assert visit.page.evaluate("[Object.values(localStorage), document.cookie]") == [[], ""]
        visit.page.click("#forget")
        visit.page.wait_for_selector("#sign-in[open]")


def test_it_lives_while_the_cluster_trains(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        visit.see("#parameters")
        visit.wait_until("() => document.querySelector('#histogram-chart .bars path')")  # drawn, not only known
        version = visit.exact("#parameter-more")
        round_ = visit.exact("#round")
        made = closed.ask("POST", "/v1/checkpoints", "admin").json()["round"]
        visit.wait_until("round => Number(document.querySelector('#round').dataset.value) > round", round_)
        visit.wait_until("old => Number(document.querySelector('#parameter-more').dataset.value) > old", version)
        newest = "document.querySelector('#event-list').textContent.match(/checkpoint of round (\\d+) is complete/)"
        visit.wait_until(f"made => Number(({newest} ?? [])[1]) >= made", made)  # a later one takes its place
        visit.see("#curves")
        lines = "() => document.querySelectorAll('#curve-loss .scatterlayer .trace').length === 2"
        visit.wait_until(lines)
        shown = visit.page.evaluate("document.querySelector('#curve-loss').data[0].x.length")
        visit.wait_until("n => document.querySelector('#curve-loss').data[0].x.length > n", shown)
        for name in ("gradient_norm", "waiting_share"):
            visit.wait_until(lines.replace("#curve-loss", f'[id="curve-gradpost/{name}"]'))
        assert visit.errors == []


def test_every_panel_shows_what_the_api_says(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        visit.wait_for_parameters()
        visit.see("#parameters")
        visit.page.click("[id='option-layers.1.mix.weight']")
        visit.wait_until("() => document.querySelector('#parameter-more').dataset.value")
        name = "/v1/statistics/layers.1.mix.weight"
        status, curves, statistics = visit.hold_answers("/v1/status", "/v1/curves", name)
        newest = max(pserver["heartbeat"]["round"] for pserver in status["pservers"])
        visit.wait_until("value => document.querySelector('#round').dataset.value === value", str(newest))
        version = str(statistics["version"])
        visit.wait_until("value => document.querySelector('#parameter-more').dataset.value === value", version)
        check_headline(visit, status)
        check_members(visit, status)
        exact = "all => all.map(one => JSON.parse(one.dataset.value))"
        shown = visit.page.eval_on_selector_all("#statistics dd", exact)
        names = ("norm", "mean", "deviation", "minimum", "maximum")
        assert shown == [statistics[key] for key in (*names, "num_nan", "num_infinite", "num_zero")]
        visit.see("#histogram-chart")
        counts = json.dumps([count for _, _, count in statistics["histogram"]], separators=(",", ":"))
        drawn = "document.querySelector('#histogram-chart').data?.[0].y"
        visit.wait_until(f"counts => JSON.stringify({drawn}) === counts", counts)
        newest = {rank: curve["value"][-1] for rank, curve in curves["curves"]["loss"].items()}
        wanted = json.dumps(newest, separators=(",", ":"))
        visit.wait_until("wanted => document.querySelector('#curve-loss').dataset.value === wanted", wanted)
        ids = "() => [...document.querySelectorAll('[id]')].map(one => one.id)"
        assert len(known := visit.page.evaluate(ids)) == len(set(known))
        check_parameters(visit, closed.ask("GET", "/v1/parameters").json()["parameters"])
        check_events(visit, closed.ask("GET", "/v1/events?limit=1000").json())


def check_headline(visit: Visit, status: dict[str, Any]) -> None:
    page = visit.page
    assert [visit.exact(f"#{name}") for name in ("state", "mode", "run-name")] == ["training", "sync", status["run"]]
    assert page.inner_text("#taking-part") == "2 of 2"
    assert page.inner_text("#num-pservers") == "2 of 2"
    assert visit.exact("#model-bytes") == status["parameter_bytes"]
    script = status["trainers"][0]["heartbeat"]["script"]
    assert page.inner_text("#fact-name") == script["run_name"] == "nightly"
    assert page.inner_text("#fact-script") == script["command"]
    assert page.inner_text("#fact-optimizer") == "AdamW(lr=0.0003)"
    assert page.inner_text("#fact-rate") == "3.00e−4"
    assert page.inner_text("#fact-torch") == torch.__version__


def check_members(visit: Visit, status: dict[str, Any]) -> None:
    pservers = [(p["index"], p["heartbeat"]) for p in status["pservers"]]
    trainers = [(t["rank"], t["heartbeat"]) for t in status["trainers"]]
    shown = [[*row[:4], row[6]] for row in visit.table("#trainers")]
    assert shown == [[rank, "declared", True, t["round"], t["results"]["loss"]] for rank, t in trainers]
    figures = [[index, None, p["shard_bytes"], p["num_blocks"], p["num_queued"]] for index, p in pservers]
    assert [row[:5] for row in visit.table("#pservers")] == figures
    assert all(p["shard_bytes"] and p["num_blocks"] for _, p in pservers)
    members = [(f"pserver {index}", p["process"]) for index, p in pservers]
    members += [(f"trainer {rank}", t["process"]) for rank, t in trainers]
    processes = [[name, p["host"], p["resident_bytes"]] for name, p in [("coordinator", status["process"]), *members]]
    assert [[*row[:2], row[3]] for row in visit.table("#processes")] == processes


def check_parameters(visit: Visit, parameters: list[dict[str, Any]]) -> None:
    rows = visit.page.eval_on_selector_all(
        "#parameter-list > *", "all => all.map(row => [row.dataset.key, row.querySelector('.shape').textContent])"
    )
    assert rows == [[p["name"], "×".join(map(str, p["shape"]))] for p in parameters]
    names = visit.page.eval_on_selector_all(  # the end is never cut
        "#parameter-list .name", "all => all.map(name => [name.firstChild.textContent, name.lastChild.textContent])"
    )
    assert names == [[p["name"][:-16], p["name"][-16:]] for p in parameters]


def check_events(visit: Visit, events: list[dict[str, Any]]) -> None:
    shown = visit.page.eval_on_selector_all(
        "#event-list > *", "all => all.map(line => [Number(line.dataset.key), line.querySelector('.text').textContent])"
    )
    listed = [[event["id"], event["text"]] for event in reversed(events)]
    assert shown
    if shown[0][1].startswith("checkpoint") and shown[0] not in listed:
        del shown[0]  # a later checkpoint has replaced it
    assert [one for one in listed if one[0] <= shown[0][0]] == shown


def test_a_barrier_says_for_whom_it_waits_and_since_when(browser: Browser, closed: Closed) -> None:
    child = closed.run.cluster.trainers[1]
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        child.signal(SIGSTOP)
        try:
            visit.page.wait_for_selector("#notices .warn")
            beats = [p["heartbeat"] for p in closed.ask("GET", "/v1/status").json()["pservers"]]
            waiting = [beat for beat in beats if beat["missing"]]  # the stop may fall between the pushes to the two
            assert waiting
            assert all((beat["batch_barriers"], beat["missing"]) == ([0], [1]) for beat in waiting)
            assert "Waiting for trainer 1" in visit.page.inner_text("#notices")
            assert visit.page.inner_text("#barrier-says") == "1 of 2 have arrived"
            assert "since" in visit.page.inner_text("#barrier-since")
            said = visit.exact("#barrier-says")
            assert (said["round"], said["arrived"], said["missing"]) == (waiting[0]["round"] + 1, [0], [1])
            assert time.time() - said["waiting_since"] > 2
            assert [row[5] for row in visit.table("#trainers")] == ["arrived", "missing"]
            states = visit.page.eval_on_selector_all("#barrier-ranks li", "all => all.map(one => one.innerText)")
            assert [state.split() for state in states] == [["0", "arrived"], ["1", "missing"]]
        finally:
            child.signal(SIGCONT)
        visit.page.wait_for_selector("#notices .warn", state="detached")
        visit.wait_until("round => Number(document.querySelector('#round').dataset.value) > round", said["round"])


# ---------------------------------------------------------------------- states without a run


WAITS = "text => document.querySelector('#notices').textContent.includes(text)"


def test_the_states_from_an_empty_cluster_to_a_stopped_one(browser: Browser) -> None:
    with (
        LocalCluster(pservers=1, trainers=2, mode="async", on_trainer_loss="fail", lease_seconds=3) as cluster,
        Visit(browser, cluster.address) as visit,
    ):
        page = visit.page
        visit.wait_until_live()  # without a token
        assert not page.is_visible("#sign-in")
        assert not page.is_visible("#forget")
        visit.wait_until(WAITS, "trainer")
        for panel in ("curves", "speed", "trainers", "staleness", "parameters"):
            assert page.is_visible(f"#{panel} > .empty"), panel
            assert not page.is_visible(f"#{panel} .chart"), panel
        assert (page.inner_text("#state"), page.inner_text("#round")) == ("gathering", "0")
        assert page.inner_text("#taking-part") == "0 of 2"

        for rank in range(2):
            cluster.start_trainer(rank, [sys.executable, str(SCRIPT), "1000000", "0.02"])
        visit.wait_until("() => document.querySelector('#state').textContent === 'training'")
        see = "document.querySelector('#staleness').scrollIntoView()"  # again, as more charts come above it
        visit.wait_until(f"() => ({see}, document.querySelector('#staleness-chart .bars path'))")
        staleness = visit.exact("#staleness-note")
        assert sum(staleness.values()) > 0
        drawn = page.evaluate("document.querySelector('#staleness-chart').data[0]")
        assert drawn["x"][:2] == ["0", "1"]
        assert page.inner_text("#behind-label") == "Behind"
        assert visit.exact("#trainers tbody tr:first-child td:nth-child(6)") is not None
        assert visit.errors == []

        cluster.trainers[0].signal(SIGTERM)
        visit.wait_until("() => document.querySelector('#state').textContent === 'failed'")
        visit.wait_until(WAITS, "The run has failed")
        assert "trainer 0" in page.inner_text("#notices .bad")

        cluster.coordinator.signal(SIGTERM)
        visit.page.wait_for_selector("#connection[data-state=gone]")
        assert "does not answer, since" in page.inner_text("#connection")
        assert page.inner_text("#state") == "failed"  # what was known last stays
        cluster.restart_coordinator()
        visit.wait_until_live()


# ---------------------------------------------------------------------- the history


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
