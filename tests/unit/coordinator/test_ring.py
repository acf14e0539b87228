"""Strategy ring: a run without pservers, whose trainers wait for each other."""

from __future__ import annotations

from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadModel, RoundTimeout
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state.cluster import Cluster

from ...raising import raises_code
from .support import alive, joining, leaving, make_cluster, model, registration

pytestmark = pytest.mark.ring

RING = Consistency(strategy="ring")


def ring(num_trainers: int = 2) -> Cluster:
    return make_cluster(num_trainers, num_pservers=0, consistency=RING)


def declare(cluster: Cluster, rank: int, **changes: Any) -> None:
    joined = cluster.join_trainer(joining(str(rank), rank=rank), 0.0)
    cluster.declare_model(rank, model(joined.incarnation, joined.run, **changes), 0.0)


def begin(cluster: Cluster, now: float = 0.0) -> None:
    for rank in range(cluster.run.settings.num_trainers):
        declare(cluster, rank, rendezvous="10.0.0.5:4711" if rank == 0 else None, optimizer="Muon")
    cluster.start_run_if_complete(now)
    assert cluster.run.record.plan is not None
    cluster.run = cluster.run.begin_training(now)
    cluster.run = cluster.run.finish_change(cluster.run.record.change_number)


def waits(
    cluster: Cluster, rank: int, seconds: float, *, round_: int = 4, now: float = 1.0, is_done: bool = False
) -> None:
    message = alive(round_=round_).model_copy(update={"waiting_seconds": seconds, "is_done": is_done})
    cluster.trainer_heartbeat(rank, message, now)


def test_pservers_and_requests_for_them_are_refused() -> None:
    with raises_code("mode_mismatch") as refused:
        ring().join_trainer(joining(expects={"strategy": "ps"}), 0.0)
    assert refused.value.facts == {"expected": {"strategy": "ring"}, "actual": {"strategy": "ps"}}
    with raises_code("mode_mismatch", match="no pservers"):
        ring().register_pserver(registration(), 0.0)
    with raises_code("no_pservers"):
        ring().require_pservers()
    make_cluster().require_pservers()


@pytest.mark.parametrize(
    "changes",
    [{"local_steps": 2}, {"push_type": "int8"}, {"pull_type": "int8"}],
    ids=str,
)
def test_declarations_without_effect_in_a_ring_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadModel, match=f"{next(iter(changes))} would have no effect with strategy ring"):
        declare(ring(), 0, **changes)
    declare(ring(), 0, push_type="float32", pull_type="float32", local_steps=0)


def test_a_missing_trainer_ends_the_run_after_the_round_timeout() -> None:
    cluster = ring(3)
    begin(cluster)
    waits(cluster, 1, 0.0)
    waits(cluster, 0, 60.0)
    waits(cluster, 2, 60.0)
    assert cluster.run.record.failure is None
    waits(cluster, 2, 60.5)
    failure = cluster.run.record.failure
    assert isinstance(failure, RoundTimeout)
    assert failure.facts == {"missing": [1]}
    assert "trainer 1 did not contribute to round 5 in the ring" in failure.detail


def test_a_trainer_that_leaves_before_the_others_ends_the_run() -> None:
    cluster = ring()
    begin(cluster)
    cluster.leave_trainer(1, leaving(round=5), 1.0)
    waits(cluster, 0, 0.5, round_=4)  # in the last round of both, which can complete
    waits(cluster, 0, 0.0, round_=5)
    assert cluster.run.record.failure is None
    waits(cluster, 0, 0.5, round_=5)
    failure = cluster.run.record.failure
    assert failure.code == "trainer_left"
    assert "trainer 1 left before round 6" in failure.detail


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_pservers": 1}, "num_pservers would have no effect with strategy ring"),
        ({"durability": "log"}, "durability would have no effect"),
        ({"push_type": "int8", "resume": True}, "push_type, resume would have no effect"),
        ({"on_trainer_loss": "continue"}, "a ring cannot continue without a trainer"),
        ({"mode": "async"}, "mode async needs pservers"),
        ({"max_delay": 1}, "max_delay would have no effect with strategy ring"),
    ],
    ids=str,
)
def test_settings_of_pservers_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CoordinatorSettings(strategy="ring", **settings)
