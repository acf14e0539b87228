"""The events of a run."""

from __future__ import annotations

from ps_protocol.errors import TrainerLost
from services.coordinator.events import MAX_EVENTS, Events
from services.coordinator.state.record import Decision

from .support import LEASE, beat, joining, leaving, list_checkpoints, make_cluster, registration, train


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
