"""The files of the history, and when a coordinator writes them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from ps_protocol.errors import NotFound
from services.coordinator import history
from services.coordinator.coordinator import Coordinator
from services.coordinator.history import MAX_POINTS, RunHistory
from services.coordinator.pages import add_history_routes
from services.runtime.app import make_app
from services.runtime.metrics import ServiceMetrics

from .coordinating import begin, eventually, heartbeat, leave, training
from .support import alive, make_history_record

# ---------------------------------------------------------------- files


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    runs = RunHistory(tmp_path / "history")
    assert runs.entries() == []
    failed = make_history_record(
        "run2", 2000.0, [3.0, math.nan], state="failed", failure={"detail": "trainer 1 failed"}
    )
    for record in (make_history_record("run1", 1000.0, name="baseline"), failed):
        runs.write(record)
    newest, oldest = runs.entries()
    assert (newest.run, newest.state, newest.failure, newest.rounds) == ("run2", "failed", "trainer 1 failed", 20)
    assert (oldest.run, oldest.name, oldest.optimizer) == ("run1", "baseline", "SGD(lr=0.1)")
    assert (oldest.results, oldest.failure, newest.name) == ({"loss": 1.0}, None, None)
    first, second = runs.read("run2").curves.curves["loss"][1].value
    assert (first, second is None or math.isnan(second)) == (3.0, True)
    runs.write(make_history_record("run1", 1000.0, [9.0]))  # the run was resumed
    assert [entry.results["loss"] for entry in runs.entries() if entry.run == "run1"] == [9.0]


def test_a_file_that_cannot_be_read_is_left_out_and_logged_once(tmp_path: Path) -> None:
    runs = RunHistory(tmp_path)
    for name in ("run1", "run2", "run3"):
        runs.write(make_history_record(name))
    data = (tmp_path / "run1.json").read_bytes()
    (tmp_path / "run1.json").write_bytes(data.replace(b'"round":20', b'"round":21'))  # still JSON
    (tmp_path / "run2.json").write_text('{"version": 2}')
    with capture_logs() as lines:
        assert [entry.run for entry in runs.entries()] == ["run3"]
        assert [entry.run for entry in runs.entries()] == ["run3"]
    assert sorted(str(tmp_path / f"run{i}.json") in line["error"] for i in (1, 2) for line in lines) == [0, 0, 1, 1]
    with pytest.raises(NotFound):
        runs.read("run1")


def test_the_oldest_files_beyond_the_limit_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_RUNS", 3)
    runs = RunHistory(tmp_path)
    for i in range(5):
        runs.write(make_history_record(f"run{i}", 1000.0 + i))
        os.utime(tmp_path / f"run{i}.json", (i, i))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run2.json", "run3.json", "run4.json"]


def make_history_app(runs: RunHistory) -> FastAPI:
    app = make_app(title="t", role="coordinator", metrics=ServiceMetrics("coordinator"), is_ready=lambda: None)
    add_history_routes(app, runs)
    return app


async def test_a_request_reaches_no_file_outside_the_folder(tmp_path: Path) -> None:
    RunHistory(tmp_path).write(make_history_record("secret"))
    runs = RunHistory(tmp_path / "history")
    runs.write(make_history_record("run1"))
    transport = httpx.ASGITransport(make_history_app(runs))
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as http:
        for name in ("../secret", "..%2Fsecret", "%2E%2E%2Fsecret", str(tmp_path / "secret"), "run1.json", "*", "run2"):
            reply = await http.get(f"/v1/history/{name}")
            assert (reply.status_code, reply.json()["code"]) == (404, "not_found"), name
        assert (await http.get("/v1/history/run1")).json()["status"]["run"] == "run1"
        assert [entry["run"] for entry in (await http.get("/v1/history")).json()] == ["run1"]
    for name in ("../secret", "../history/run1", str(tmp_path / "secret")):
        with pytest.raises(NotFound):
            runs.read(name)


# ---------------------------------------------------------------- the coordinator


def report(coordinator: Coordinator, rank: int, round_: int, loss: float) -> None:
    heartbeat(coordinator, rank, round_, results={"loss": loss})
    run = coordinator.cluster.run.record
    coordinator.curves.add(rank, alive(run.trainers[rank].incarnation, run.name, round_, loss=loss))


async def test_a_finished_run_is_written_with_its_curves_before_the_next_one() -> None:
    async with training(durability="none") as coordinator:
        run = coordinator.cluster.run.record.name
        for round_ in range(1, MAX_POINTS):
            report(coordinator, 0, round_, 1 / round_)
        report(coordinator, 1, 5, 7.0)
        leave(coordinator, 0)
        leave(coordinator, 1)
        begin(coordinator)  # the next run may begin immediately
        assert coordinator.cluster.run.record.name != run
        await eventually(lambda: [entry.run for entry in coordinator.history.entries()] == [run])
        [entry] = coordinator.history.entries()
        record = coordinator.history.read(run)
        assert (entry.state, entry.results) == ("finished", {"loss": 1 / (MAX_POINTS - 1)})
        assert [trainer.state for trainer in record.status.trainers] == ["done", "done"]
        assert record.ended_at > record.started_at
        curve = record.curves.curves["loss"][0]
        assert (len(curve.round), curve.round[-1]) == (history.MAX_KEPT_POINTS, MAX_POINTS - 1)
        assert record.curves.curves["loss"][1].value == [7.0]


async def test_a_run_that_trains_when_the_coordinator_stops_is_written(tmp_path: Path) -> None:
    async with training(history_dir=tmp_path) as coordinator:
        report(coordinator, 0, 3, 2.0)
        assert coordinator.history.entries() == []
    assert [(entry.state, entry.results) for entry in RunHistory(tmp_path).entries()] == [("training", {"loss": 2.0})]
