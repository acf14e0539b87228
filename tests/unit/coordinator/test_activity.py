"""The activity of a run, from heartbeats: rates, participants and barriers."""

from __future__ import annotations

from typing import Any

from ps_protocol.consistency import Consistency
from ps_protocol.messages import PserverLoad
from services.coordinator.activity import MAX_SAMPLES, WINDOW_SECONDS, Activity, ActivityLog
from services.coordinator.cluster import Cluster

from .support import LEASE, alive, beat, make_cluster, train


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
    cluster.run.attempt = 1
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
    assert found.barrier is not None
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


def test_asynchronous_trainers_are_behind_the_fastest() -> None:
    cluster, log = make_cluster(consistency=Consistency(mode="async")), ActivityLog()
    train(cluster)
    staleness = ((0.0, 3), (1.0, 2), (None, 1))
    for second in range(3):
        record(log, cluster, 5, float(second), clocks={0: 5 + second, 1: 5}, staleness=staleness)
    found = describe(log, cluster, 2.0)
    assert [(t.steps, t.steps_behind, t.has_contributed) for t in found.trainers] == [(7, 0, False), (5, 2, False)]
    assert found.staleness == ((0.0, 6), (1.0, 4), (None, 2))
