"""The history of a run at the coordinator: its curves, its events, and the record of its end."""

from __future__ import annotations

import math
import os
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from ps_protocol.errors import NotFound, TrainerLost
from ps_protocol.fields import Mean
from ps_protocol.messages import TrainerHeartbeat
from services.coordinator import history
from services.coordinator.coordinator import Coordinator
from services.coordinator.events import MAX_EVENTS, Events
from services.coordinator.history import MAX_POINTS, Curves, RunHistory
from services.coordinator.pages import add_history_routes
from services.coordinator.state.record import Decision
from services.runtime.app import make_app
from services.runtime.metrics import ServiceMetrics

from .coordinating import begin, eventually, heartbeat, leave, training
from .support import (
    LEASE,
    alive,
    beat,
    joining,
    leaving,
    list_checkpoints,
    make_cluster,
    make_history_record,
    registration,
    train,
)

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


# ---------------------------------------------------------------------- curves


def reporting(round_: int, *, run: str = "run1", **values: list[float]) -> TrainerHeartbeat:
    """Return the heartbeat of a trainer that has reported these values."""
    means = {name: Mean(count=len(all_), value=sum(all_) / len(all_)) for name, all_ in values.items()}
    newest = {name: all_[-1] for name, all_ in values.items()}
    return alive(1, run, round_, **newest).model_copy(update={"means": means})


def weigh(curve: dict[str, list[float]]) -> float:
    """Return the sum of all values in a curve of means."""
    return sum(value * count for value, count in zip(curve["value"], curve["count"], strict=True))


def test_a_point_is_the_mean_of_all_reported_values():
    curves = Curves()
    curves.add(0, reporting(3, loss=[1.0, 2.0, 6.0]))
    curves.add(0, reporting(4))  # nothing was reported
    curves.add(0, reporting(5, loss=[4.0]))
    curves.add(0, reporting(5, loss=[1.0, 1.0, 2.0]))  # in the same round
    curves.add(0, reporting(6, loss=[math.nan, 1.0]))
    found = curves.describe()["curves"]["loss"][0]
    assert (found["round"], found["count"]) == ([3, 5, 6], [3, 4, 2])
    assert found["value"][:2] == [3.0, 2.0]
    assert math.isnan(found["value"][2])


def test_a_long_curve_contains_all_values_and_follows_a_rollback():
    curves = Curves()
    for round_ in range(3 * MAX_POINTS):
        curves.add(0, reporting(round_, loss=[float(round_)]))
    found = curves.describe()["curves"]["loss"][0]
    assert found["round"] == sorted(set(found["round"]))
    assert MAX_POINTS / 3 < len(found["round"]) <= MAX_POINTS
    assert (found["round"][0], found["round"][-1]) == (0, 3 * MAX_POINTS - 1)
    assert (sum(found["count"]), weigh(found)) == (3 * MAX_POINTS, pytest.approx(sum(range(3 * MAX_POINTS))))
    curves.add(0, reporting(7, loss=[5.0]))
    assert curves.describe()["curves"]["loss"][0]["round"] == [r for r in found["round"] if r < 7] + [7]
    curves.add(1, reporting(1, run="run2", loss=[5.0]))
    found = curves.describe()["curves"]
    at = found["loss"][1]["at"]
    assert found == {"loss": {1: {"round": [1], "at": at, "value": [5.0], "count": [1]}}}


def test_curves_are_thinned_out_evenly_on_request():
    curves = Curves()
    for round_ in range(101):
        curves.add(0, reporting(round_, loss=[float(round_)]))
    thin = curves.describe(5)["curves"]["loss"][0]
    assert thin["round"] == [0, 25, 50, 75, 100]
    assert thin["count"] == [1, 25, 25, 25, 25]
    assert thin["value"] == pytest.approx([0.0, 13.0, 38.0, 63.0, 88.0])
    assert len(curves.describe(101)["curves"]["loss"][0]["round"]) == 101


# ---------------------------------------------------------------------- events


def texts(events: Events, after: int = 0) -> list[str]:
    return [event.text for event in events.after(after)]


def test_changes_of_the_cluster_become_events():
    cluster, events = make_cluster(on_trainer_loss="wait", durability="log"), Events()
    events.detect_changes(cluster)
    assert texts(events) == []
    cluster.register_pserver(registration("0", index=0), 0.0)
    cluster.join_trainer(joining("1", 1), 0.0)
    events.detect_changes(cluster)
    assert texts(events) == ["pserver 0 has registered at http://0:1", "trainer 1 has joined"]
    events.detect_changes(cluster)
    assert len(texts(events)) == 2
    seen = events.newest_id
    train(cluster)
    events.detect_changes(cluster)
    assert texts(events, seen) == [
        "pserver 1 has registered at http://1:1",
        "trainer 0 has declared its model",
        "trainer 1 has declared its model",
        "run run1 is training",
    ]
    seen = events.newest_id
    cluster.leave_trainer(1, leaving("failed", reason="no data"), 1.0)
    cluster.pserver_heartbeat(0, beat(run="run1"), LEASE)
    cluster.tick(LEASE + 1)
    list_checkpoints(cluster, [40])
    events.detect_changes(cluster)
    assert texts(events, seen)[:2] == [
        "pserver 1 at http://1:1 is silent",
        "trainer 0 was lost: no heartbeat for 11.0 s (lease 10 s)",
    ]
    assert texts(events, seen)[2:] == ["trainer 1 failed: no data", "checkpoint of round 40 is complete"]
    seen = events.newest_id
    cluster.run = cluster.run.apply_decision(
        Decision(1, 40, 0, cluster.run.record.membership, "pserver 0 holds nothing of the run")
    )
    cluster.run = cluster.run.fail(TrainerLost("trainer 1 did not come back", ranks=[1]), 99.0)
    events.detect_changes(cluster)
    assert texts(events, seen) == [
        "run run1 is failed: trainer 1 did not come back",
        "the run is rolled back and continues after round 40 (attempt 1): pserver 0 holds nothing of the run",
    ]
    [failed, _] = events.after(seen)
    assert (failed.kind, failed.run, failed.facts) == ("run", "run1", {"state": "failed"})


def test_ids_go_up_and_the_newest_are_kept():
    cluster, events = make_cluster(), Events()
    for number in range(MAX_EVENTS + 5):
        events.add(cluster, "change", str(number))
    ids = [event.id for event in events.after(0)]
    assert ids == sorted(set(ids))
    assert (len(ids), texts(events)[0]) == (MAX_EVENTS, "5")
    assert events.after(ids[-2]) == events.after(0)[-1:]
    for text in ("checkpoint of round 10", "checkpoint of round 20"):
        events.add(cluster, "checkpoint", text)
    assert texts(events)[-2:] == [str(MAX_EVENTS + 4), "checkpoint of round 20"]
