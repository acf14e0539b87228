"""Rates, participants and where a run waits, as heartbeats bring them."""

from __future__ import annotations

from typing import Any

from ps_protocol.messages import PserverLoad
from services.coordinator.activity import MAX_SAMPLES, WINDOW_SECONDS, ActivityLog
from services.coordinator.cluster import Cluster

from .support import alive, beat, make_cluster, train


def load(**changes: Any) -> PserverLoad:
    values: dict[str, Any] = dict.fromkeys(PserverLoad.model_fields, 0)
    lists = {"batch_barriers": (), "participants": (), "clocks": {}, "staleness": ()}
    return PserverLoad(**{**values, **lists, **changes})


def hear(log: ActivityLog, cluster: Cluster, round_: int, now: float, **changes: Any) -> None:
    message = beat(run="run1", round_=round_, load=load(**changes))
    for index in range(2):
        cluster.pserver_heartbeat(index, message, now)
        log.pserver_heard(cluster, index, message, now)
    for rank in range(2):
        cluster.trainer_heartbeat(rank, alive(round_=round_), now)
        log.trainer_heard(cluster, rank, alive(round_=round_), now)


def test_rates_are_over_the_newest_seconds() -> None:
    cluster, log = make_cluster(), ActivityLog()
    train(cluster)
    for second in range(21):
        hear(log, cluster, 3 * second if second < 6 else 10 * second, float(second), num_applies=second)
    assert log.samples[0].rounds_per_second is None
    assert (log.samples[5].rounds, log.samples[5].rounds_per_second) == (12, 12 / 5)
    assert (log.samples[-1].rounds, log.samples[-1].rounds_per_second) == (190, 10)  # one has 200 already
    assert log.samples[-1].steps_per_second == 20  # of both
    assert {len(heard) for heard in log.pservers.values()} == {WINDOW_SECONDS + 1}
    assert log.pservers[0][0].load.num_applies == 15


def test_what_belongs_together_is_kept_together() -> None:
    cluster, log = make_cluster(), ActivityLog()
    hear_before = beat(run="run1", load=load())
    log.pserver_heard(cluster, 0, hear_before, 0.0)  # nothing to compare yet, and no run trains
    assert not log.samples
    train(cluster)
    for second in range(MAX_SAMPLES + 10):
        hear(log, cluster, second, float(second))
    assert len(log.samples) == MAX_SAMPLES
    other_life = beat(2, run="run1", round_=5, load=load())
    log.pserver_heard(cluster, 0, other_life, 400.0)
    assert [heard.incarnation for heard in log.pservers[0]] == [2]
    log.trainer_heard(cluster, 1, alive(2, round_=3), 400.0)
    assert list(log.trainers[1]) == [(400.0, 3)]
    log.pserver_heard(cluster, 1, beat(run="another", load=load()), 401.0)
    assert log.pservers[1][-1].at == MAX_SAMPLES + 9
    cluster.run.attempt = 1
    log.pserver_heard(cluster, 0, beat(run="run1", attempt=1, load=load()), 402.0)
    assert (len(log.samples), len(log.pservers), len(log.trainers)) == (1, 1, 0)
