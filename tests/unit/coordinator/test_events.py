"""Events, curves of results, and the audit log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ps_protocol.errors import TrainerLost
from services.coordinator.audit import FILE, MAX_LISTED, AuditLog
from services.coordinator.curves import MAX_ANSWERED, MAX_CURVES, MAX_POINTS, Curves
from services.coordinator.events import MAX_EVENTS, Events

from .support import LEASE, beat, joining, leaving, make_cluster, registration, train


def texts(events: Events, after: int = 0) -> list[str]:
    return [event.text for event in events.after(after)]


def test_changes_of_the_cluster_become_events():
    cluster, events = make_cluster(on_trainer_loss="wait", durability="log"), Events()
    events.detect_changes(cluster)
    assert texts(events) == []
    cluster.register_pserver(registration("0", index=0), 0.0)
    cluster.join_trainer(joining("1", 1), 0.0)
    events.detect_changes(cluster)
    assert texts(events) == ["pserver 0 is here, at http://0:1", "trainer 1 has joined"]
    events.detect_changes(cluster)
    assert len(texts(events)) == 2
    seen = events.newest_id
    train(cluster)
    events.detect_changes(cluster)
    assert texts(events, seen) == [
        "pserver 1 is here, at http://1:1",
        "trainer 0 has declared its model",
        "trainer 1 has declared its model",
        "run run1 is training",
    ]
    seen = events.newest_id
    cluster.leave_trainer(1, leaving("failed", reason="no data"), 1.0)
    cluster.pserver_heartbeat(0, beat(run="run1"), LEASE)
    cluster.expire(LEASE + 1)
    cluster.complete_checkpoints.insert(0, 40)
    events.detect_changes(cluster)
    assert texts(events, seen)[:2] == [
        "pserver 1 at http://1:1 is silent",
        "trainer 0 was lost: no heartbeat for 11.0 s (lease 10 s)",
    ]
    assert texts(events, seen)[2:] == ["trainer 1 failed: no data", "checkpoint of round 40 is complete"]
    seen = events.newest_id
    cluster.run.attempt, cluster.run.resume = 1, 40
    cluster.run.fail(TrainerLost("trainer 1 did not come back", ranks=[1]), 99.0)
    events.detect_changes(cluster)
    assert texts(events, seen) == [
        "run run1 is failed: trainer 1 did not come back",
        "the run is rolled back and continues after round 40 (attempt 1)",
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


def test_a_curve_is_thinned_out_and_follows_a_rollback():
    curves = Curves()
    for round_ in range(3 * MAX_POINTS):
        curves.add("run1", 0, round_, {"loss": float(round_)})
        curves.add("run1", 0, round_, {"loss": -1.0})  # the same round again
    found = curves.describe()["curves"]["loss"][0]
    assert found["round"] == found["value"] == sorted(set(found["round"]))
    assert MAX_POINTS / 3 < len(found["round"]) <= MAX_POINTS
    assert (found["round"][0], found["round"][-1]) == (0, 3 * MAX_POINTS - 1)
    curves.add("run1", 0, 7, {"loss": 5.0})
    assert curves.describe()["curves"]["loss"][0]["round"] == [r for r in found["round"] if r < 7] + [7]
    curves.add("run2", 1, 1, {"loss": 5.0})
    assert curves.describe()["curves"] == {
        "loss": {1: {"round": [1], "at": [curves.describe()["curves"]["loss"][1]["at"][0]], "value": [5.0]}}
    }


def test_curves_are_thinned_out_evenly_on_request():
    curves = Curves()
    for round_ in range(101):
        curves.add("run1", 0, round_, {"loss": float(round_)})
    thin = curves.describe(5)["curves"]["loss"][0]
    assert thin["round"] == [0, 25, 50, 75, 100]
    assert thin["value"] == [0.0, 25.0, 50.0, 75.0, 100.0]
    assert len(curves.describe(101)["curves"]["loss"][0]["round"]) == 101


def test_a_response_with_many_curves_is_bounded():
    curves = Curves()
    for rank in range(MAX_CURVES):
        for round_ in range(1, MAX_ANSWERED // MAX_CURVES + 11):
            curves.add("run1", rank, round_, {"loss": 1.0})
    found = curves.describe()["curves"]["loss"]
    assert len(found) == MAX_CURVES
    assert {len(one["round"]) for one in found.values()} == {MAX_ANSWERED // MAX_CURVES}
    assert {(one["round"][0], one["round"][-1]) for one in found.values()} == {(1, MAX_ANSWERED // MAX_CURVES + 10)}
    curves.add("run1", 0, 1000, {"accuracy": 1.0, "loss": 2.0})
    found = curves.describe()["curves"]
    assert list(found) == ["loss"]
    assert (len(found["loss"]), found["loss"][0]["value"][-1]) == (MAX_CURVES, 2.0)


# ---------------------------------------------------------------- the audit log


def add(log: AuditLog, action: str = "pause") -> int:
    return log.add(by="me", run="r", action=action, outcome="requested", attempt=0).number


def read(folder: Path) -> AuditLog:
    log = AuditLog(folder)
    log.read()
    return log


def test_a_restarted_coordinator_continues_the_numbers_after_foreign_lines(tmp_path: Path) -> None:
    assert [add(read(tmp_path)), add(read(tmp_path))] == [1, 2]
    with (tmp_path / FILE).open("a") as file:
        file.write('a foreign line\n{"number": 9, "torn')
    log = read(tmp_path)
    assert [entry.number for entry in log.entries()] == [1, 2]
    assert add(log, "resume") == 3
    assert [(entry.number, entry.action) for entry in read(tmp_path).entries()][1:] == [(2, "pause"), (3, "resume")]


def test_an_entry_that_is_written_in_part_is_an_error_and_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real = read(tmp_path), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match="did not take a whole line"):
            add(log)
    assert add(log, "resume") == 1
    for each in (log, read(tmp_path)):
        assert [(entry.number, entry.action) for entry in each.entries()] == [(1, "resume")]


def test_the_newest_entries_are_listed(tmp_path: Path) -> None:
    first = read(tmp_path)
    for _ in range(3):
        add(first)
    line = (tmp_path / FILE).read_text().splitlines()[-1]
    (tmp_path / FILE).write_text("\n".join(line.replace('"number":3', f'"number":{i}') for i in range(1, 2001)) + "\n")
    log = read(tmp_path)
    assert [entry.number for entry in log.entries()] == list(range(2001 - MAX_LISTED, 2001))
    assert add(log) == 2001
    assert len(log.entries()) == MAX_LISTED
