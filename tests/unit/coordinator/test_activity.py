"""The activity, the events and the curves of a run, and the audit log."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import TrainerLost
from ps_protocol.fields import Mean
from ps_protocol.messages import PserverLoad, TrainerHeartbeat
from ps_protocol.process_reports import ScriptInfo
from services.coordinator.activity import (
    MAX_ANSWERED,
    MAX_CURVES,
    MAX_POINTS,
    MAX_SAMPLES,
    WINDOW_SECONDS,
    Activity,
    ActivityLog,
    Curves,
)
from services.coordinator.audit import FILE, MAX_LISTED, AuditLog
from services.coordinator.events import MAX_EVENTS, Events
from services.coordinator.state.cluster import Cluster
from services.coordinator.state.record import Decision

from .support import (
    LEASE,
    alive,
    beat,
    change_record,
    joining,
    leaving,
    list_checkpoints,
    make_cluster,
    registration,
    train,
)


def load(**changes: Any) -> PserverLoad:
    values: dict[str, Any] = dict.fromkeys(PserverLoad.model_fields, 0)
    lists = {"batch_barriers": (), "participants": (), "clocks": {}, "staleness": ()}
    return PserverLoad(**{**values, **lists, **changes})


def record(log: ActivityLog, cluster: Cluster, round_: int, now: float, **changes: Any) -> None:
    message = beat(run="run1", round_=round_, load=load(**changes))
    for index in range(2):
        cluster.pserver_heartbeat(index, message, now)
        log.record_pserver(cluster, index, message, now)
    for rank in range(2):
        cluster.trainer_heartbeat(rank, alive(round_=round_), now)
        log.record_trainer(cluster, rank, alive(round_=round_), now)


def test_rates_are_those_of_the_newest_seconds() -> None:
    cluster, log = make_cluster(), ActivityLog()
    train(cluster)
    for second in range(21):
        record(log, cluster, 3 * second if second < 6 else 10 * second, float(second), num_applies=second)
    assert log.samples[0].rounds_per_second is None
    assert (log.samples[5].rounds, log.samples[5].rounds_per_second) == (12, 12 / 5)
    assert (log.samples[-1].rounds, log.samples[-1].rounds_per_second) == (190, 10)  # one has 200 already
    assert log.samples[-1].steps_per_second == 20  # of both
    assert {len(heard) for heard in log.pservers.values()} == {WINDOW_SECONDS + 1}
    assert log.pservers[0][0].load.num_applies == 15


def test_samples_of_other_incarnations_runs_and_attempts_are_dropped() -> None:
    cluster, log = make_cluster(), ActivityLog()
    early = beat(run="run1", load=load())
    log.record_pserver(cluster, 0, early, 0.0)  # nothing to compare yet, and no run trains
    assert not log.samples
    train(cluster)
    for second in range(MAX_SAMPLES + 10):
        record(log, cluster, second, float(second))
    assert len(log.samples) == MAX_SAMPLES
    other_incarnation = beat(2, run="run1", round_=5, load=load())
    log.record_pserver(cluster, 0, other_incarnation, 400.0)
    assert [heard.heartbeat.incarnation for heard in log.pservers[0]] == [2]
    log.record_trainer(cluster, 1, alive(2, round_=3), 400.0)
    assert list(log.trainers[1]) == [(400.0, 3)]
    log.record_pserver(cluster, 1, beat(run="another", load=load()), 401.0)
    assert log.pservers[1][-1].at == MAX_SAMPLES + 9
    change_record(cluster, attempt=1)
    log.record_pserver(cluster, 0, beat(run="run1", attempt=1, load=load()), 402.0)
    assert (len(log.samples), len(log.pservers), len(log.trainers)) == (1, 1, 0)


def describe(log: ActivityLog, cluster: Cluster, now: float) -> Activity:
    return log.describe(cluster, now, 1000.0)


def test_the_activity_names_participants_and_the_barrier() -> None:
    cluster, log = make_cluster(), ActivityLog()
    empty = describe(log, cluster, 0.0)
    assert (empty.round, empty.barrier, empty.pservers, empty.trainers, empty.staleness) == (0, None, (), (), ())
    train(cluster)
    for second in range(4):
        done = {"num_applies": 10 * second, "apply_seconds": 0.5 * second, "pushed_bytes": 7 * second}
        record(log, cluster, 20 + second, float(second), participants=(0,), batch_barriers=(0,), **done)
    for index, wait in ((0, 0.5), (1, 2.5)):
        message = beat(
            run="run1", round_=23 + index, missing=(1,), waiting_seconds=wait, load=load(batch_barriers=(0,))
        )
        log.record_pserver(cluster, index, message, 3.0)
    found = describe(log, cluster, 3.0)
    barrier = (found.barrier.pserver, found.barrier.round, found.barrier.arrived, found.barrier.missing)
    assert barrier == (1, 25, (0,), (1,))
    assert found.barrier.waiting_since == log.pservers[1][-1].wall - 2.5
    record(log, cluster, 24, 4.0, participants=(0,), num_applies=40, apply_seconds=2.0, pushed_bytes=28)
    found = describe(log, cluster, 4.0)
    assert (found.round, found.participants, found.barrier) == (24, (0,), None)
    assert [(t.rank, t.steps, t.steps_per_second, t.has_contributed) for t in found.trainers] == [
        (0, 24, 1.0, True),
        (1, 24, 1.0, False),
    ]
    assert [(p.apply_seconds, p.wait_seconds, p.pushed_bytes_per_second) for p in found.pservers] == [
        (0.05, None, 7)
    ] * 2
    later = describe(log, cluster, 20.0)
    assert [t.steps_per_second for t in later.trainers] == [None, None]
    cluster.pserver_heartbeat(1, beat(run="run1", round_=24), LEASE + 3)
    cluster.expire(LEASE + 5)
    assert [p.index for p in describe(log, cluster, LEASE + 5).pservers] == [1]


def test_the_remaining_time_is_that_of_the_slowest_trainer() -> None:
    cluster, log = make_cluster(), ActivityLog()
    train(cluster)
    script = ScriptInfo(command="train.py", total_rounds=100)
    for second in range(5):
        record(log, cluster, 10 * second, float(second))
        assert describe(log, cluster, float(second)).remaining_seconds is None  # no script has said its end
    for rank, round_ in ((0, 50), (1, 60)):
        message = alive(round_=round_).model_copy(update={"script": script})
        cluster.trainer_heartbeat(rank, message, 5.0)
        log.record_trainer(cluster, rank, message, 5.0)
    assert describe(log, cluster, 5.0).remaining_seconds == 50 / 10


def test_asynchronous_trainers_are_behind_the_fastest() -> None:
    cluster, log = make_cluster(consistency=Consistency(mode="async")), ActivityLog()
    train(cluster)
    staleness = ((0.0, 3), (1.0, 2), (None, 1))
    for second in range(3):
        record(log, cluster, 5, float(second), clocks={0: 5 + second, 1: 5}, staleness=staleness)
    found = describe(log, cluster, 2.0)
    assert [(t.steps, t.steps_behind, t.has_contributed) for t in found.trainers] == [(7, 0, False), (5, 2, False)]
    assert found.staleness == ((0.0, 6), (1.0, 4), (None, 2))


# ---------------------------------------------------------------- events and curves


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
    cluster.expire(LEASE + 1)
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


def report(round_: int, *, run: str = "run1", **values: list[float]) -> TrainerHeartbeat:
    """Return the heartbeat of a trainer that has reported these values."""
    means = {name: Mean(count=len(all_), value=sum(all_) / len(all_)) for name, all_ in values.items()}
    newest = {name: all_[-1] for name, all_ in values.items()}
    return alive(1, run, round_, **newest).model_copy(update={"means": means})


def weigh(curve: dict[str, list[float]]) -> float:
    """Return the sum of all values in a curve of means."""
    return sum(value * count for value, count in zip(curve["value"], curve["count"], strict=True))


def test_a_point_is_the_mean_of_all_reported_values():
    curves = Curves()
    curves.add(0, report(3, loss=[1.0, 2.0, 6.0]))
    curves.add(0, report(4))  # nothing was reported
    curves.add(0, report(5, loss=[4.0]))
    curves.add(0, report(5, loss=[1.0, 1.0, 2.0]))  # in the same round
    curves.add(0, report(6, loss=[math.nan, 1.0]))
    found = curves.describe()["curves"]["loss"][0]
    assert (found["round"], found["count"]) == ([3, 5, 6], [3, 4, 2])
    assert found["value"][:2] == [3.0, 2.0]
    assert math.isnan(found["value"][2])


def test_a_long_curve_contains_all_values_and_follows_a_rollback():
    curves = Curves()
    for round_ in range(3 * MAX_POINTS):
        curves.add(0, report(round_, loss=[float(round_)]))
    found = curves.describe()["curves"]["loss"][0]
    assert found["round"] == sorted(set(found["round"]))
    assert MAX_POINTS / 3 < len(found["round"]) <= MAX_POINTS
    assert (found["round"][0], found["round"][-1]) == (0, 3 * MAX_POINTS - 1)
    assert (sum(found["count"]), weigh(found)) == (3 * MAX_POINTS, pytest.approx(sum(range(3 * MAX_POINTS))))
    curves.add(0, report(7, loss=[5.0]))
    assert curves.describe()["curves"]["loss"][0]["round"] == [r for r in found["round"] if r < 7] + [7]
    curves.add(1, report(1, run="run2", loss=[5.0]))
    found = curves.describe()["curves"]
    at = found["loss"][1]["at"]
    assert found == {"loss": {1: {"round": [1], "at": at, "value": [5.0], "count": [1]}}}


def test_a_client_without_means_reports_one_value_for_each_round():
    curves = Curves()
    for value in (1.0, 2.0):
        curves.add(0, alive(1, round_=4, loss=value))
    found = curves.describe()["curves"]["loss"][0]
    assert (found["round"], found["value"], found["count"]) == ([4], [1.0], [1])


def test_curves_are_thinned_out_evenly_on_request():
    curves = Curves()
    for round_ in range(101):
        curves.add(0, report(round_, loss=[float(round_)]))
    thin = curves.describe(5)["curves"]["loss"][0]
    assert thin["round"] == [0, 25, 50, 75, 100]
    assert thin["count"] == [1, 25, 25, 25, 25]
    assert thin["value"] == pytest.approx([0.0, 13.0, 38.0, 63.0, 88.0])
    assert len(curves.describe(101)["curves"]["loss"][0]["round"]) == 101


def test_a_response_with_many_curves_is_bounded():
    curves = Curves()
    for rank in range(MAX_CURVES):
        for round_ in range(1, MAX_ANSWERED // MAX_CURVES + 11):
            curves.add(rank, report(round_, loss=[1.0]))
    found = curves.describe()["curves"]["loss"]
    assert len(found) == MAX_CURVES
    assert {len(one["round"]) for one in found.values()} == {MAX_ANSWERED // MAX_CURVES}
    assert {(one["round"][0], one["round"][-1]) for one in found.values()} == {(1, MAX_ANSWERED // MAX_CURVES + 10)}
    curves.add(0, report(1000, accuracy=[1.0], loss=[2.0]))
    found = curves.describe()["curves"]
    assert list(found) == ["loss"]
    assert len(found["loss"]) == MAX_CURVES
    assert (found["loss"][0]["round"][-1], weigh(found["loss"][0])) == (1000, pytest.approx(112.0))


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
        with pytest.raises(OSError, match="has no room for a whole line"):
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
