"""The cluster: registration, the start of a run, losses, one run after another, the end, and a ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadModel, NotReady, RoundTimeout, StalePserver
from ps_protocol.membership import FrozenRounds, HeldRun
from services.coordinator.reconcile import make_members_message
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state.cluster import Cluster
from services.coordinator.state.joining import plan_model
from services.coordinator.state.losses import expire_trainers, note_heartbeat
from services.coordinator.state.pservers import PserverRegistry

from ...raising import raises_code
from .support import LEASE, alive, beat, joining, leaving, make_cluster, model, registration, train


def make_registry(num_pservers: int = 2) -> PserverRegistry:
    return PserverRegistry(num_pservers, LEASE)


def make_training(**changes) -> Cluster:
    cluster = make_cluster(**changes)
    train(cluster)
    return cluster


# ---------------------------------------------------------------- the registry of pservers


def test_pservers_get_the_free_indices_in_order_or_the_one_they_want():
    registry = make_registry()
    for index, name in enumerate("ab"):
        registry, answer = registry.register(registration(name), 0)
        assert (answer.index, answer.incarnation, answer.lease_seconds) == (index, 1, LEASE)
    assert registry.is_complete
    assert registry.members[0].info.address == "http://a:1"  # without the slash
    registry = make_registry()
    registry, _ = registry.register(registration("a", index=1), 0)
    registry, _ = registry.register(registration("b"), 0)
    assert [registry.members[index].info.address for index in (0, 1)] == ["http://b:1", "http://a:1"]


def test_a_second_pserver_with_the_same_index_waits_for_the_lease_of_the_first():
    registry = make_registry()
    registry, _ = registry.register(registration("a", index=0), 0)
    with raises_code("index_taken", match="http://a:1") as caught:
        registry.register(registration("b", index=0), 9)
    assert caught.value.may_be_retried
    registry = registry.heartbeat(0, beat(), 9)
    with raises_code("index_taken"):
        registry.register(registration("b", index=0), 15)  # while it is renewed
    assert registry.expire(9 + LEASE) == registry
    registry = registry.expire(9.001 + LEASE)
    assert (registry.known[0].record.instance, registry.members) == ("pserver a", {})
    assert list(registry.heartbeat(0, beat(), 19.2).members) == [0]  # it returns if no other process has come
    registry, answer = registry.register(registration("b", index=0), 19.5)
    assert (answer.index, answer.incarnation) == (0, 2)


def test_a_heartbeat_of_an_unknown_pserver_or_an_earlier_incarnation_is_refused():
    registry = make_registry()
    with pytest.raises(StalePserver, match="register again"):
        registry.heartbeat(0, beat(), 0)
    registry, _ = registry.register(registration("a", index=0), 0)
    registry = registry.expire(20)
    registry, _ = registry.register(registration("b", index=0), 20)
    with pytest.raises(StalePserver) as caught:
        registry.heartbeat(0, beat(incarnation=1), 25)  # SIGCONT after its lease
    assert caught.value.facts == {"current": 2}
    assert registry.expire(30.5).members == {}  # nothing was renewed
    registry = registry.expire(30.5)
    registry, _ = registry.register(registration("b", index=0), 31)
    registry = registry.heartbeat(0, beat(3, run="run1", round_=7, missing=(1,), waiting_seconds=2.5), 33)
    assert (registry.members[0].heartbeat.round, registry.members[0].seen_at) == (7, 33)


# ---------------------------------------------------------------- the start


def test_a_trainer_must_declare_a_model_within_the_round_timeout():
    cluster = make_cluster()
    cluster.join_trainer(joining("a"), 0)
    cluster.run = expire_trainers(cluster.run, 60, lease_seconds=9000)
    assert cluster.run.record.members == {0: 1}
    cluster.run = expire_trainers(cluster.run, 61, lease_seconds=9000)
    assert "joined, but did not declare a model" in cluster.run.record.trainers[0].why
    cluster.declare_model(0, model(), 62)  # late, and its rank is still free
    assert cluster.run.record.trainers[0].state == "declared"


# ---------------------------------------------------------------- during training


def test_a_silent_pserver_ends_the_run_and_is_named():
    cluster = make_training()
    for rank in (0, 1):
        cluster.run = note_heartbeat(cluster.run, rank, alive(), 9)
    cluster.pserver_heartbeat(0, beat(), 9)
    cluster.tick(11)
    assert cluster.run.record.failure.code == "pserver_lost"
    assert str(cluster.run.record.failure) == "pserver 1 at http://1:1 was lost: no heartbeat for 11.0 s (lease 10 s)"
    message = make_members_message(cluster.run, cluster.run.record.change_number)
    assert (message.failure["code"], message.number) == ("pserver_lost", cluster.run.record.change_number)


def test_a_pserver_that_registers_again_during_a_run_has_lost_its_shard():
    cluster = make_training()
    cluster.registry = cluster.registry.expire(100)  # the cluster has not noticed the loss
    cluster.register_pserver(registration("new", index=1), 100)
    assert cluster.run.record.failure.code == "pserver_lost"
    assert "pserver 1 was restarted" in str(cluster.run.record.failure)


def test_a_heartbeat_reports_a_round_timeout():
    cluster = make_training()
    cluster.pserver_heartbeat(0, beat(run="run0", round_=4, missing=(1,), waiting_seconds=61), 1)  # of an old run
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(1,), waiting_seconds=59), 62)
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(), waiting_seconds=61), 62)  # it is applying
    assert cluster.run.record.failure is None
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(0, 1), waiting_seconds=61), 62)
    assert isinstance(cluster.run.record.failure, RoundTimeout)
    assert cluster.run.record.failure.facts == {"missing": [0, 1]}
    assert "trainer 0, trainer 1 did not reach the batch barrier of round 5" in str(cluster.run.record.failure)
    assert "(raise --round-timeout-seconds " in str(cluster.run.record.failure)


def test_no_trainer_is_late_while_a_pserver_does_not_serve_the_run():
    cluster = make_training()
    waits = {"run": "run1", "round_": 4, "missing": (1,)}
    cluster.pserver_heartbeat(1, beat(run=None), 80)
    cluster.pserver_heartbeat(0, beat(**waits, waiting_seconds=100), 100)
    cluster.pserver_heartbeat(1, beat(run="run1"), 101)
    cluster.pserver_heartbeat(0, beat(**waits, waiting_seconds=160), 160)
    assert cluster.run.record.failure is None
    cluster.pserver_heartbeat(0, beat(**waits, waiting_seconds=161), 161)
    assert isinstance(cluster.run.record.failure, RoundTimeout)


@pytest.mark.parametrize(
    ("end", "now"),
    [
        ({"code": "round_timeout"}, 71.9),
        ({"reason": "gave up", "code": None}, 72.5),
    ],
)
def test_a_trainer_that_leaves_after_a_round_timeout_did_not_cause_it(end, now):
    """The pserver reports the time-out to the waiting trainer before its next heartbeat to the coordinator."""
    cluster = make_training()
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(1,), waiting_seconds=58), 70)
    cluster.leave_trainer(0, leaving("failed", **end), now)
    assert isinstance(cluster.run.record.failure, RoundTimeout)
    assert cluster.run.record.failure.facts == {"missing": [1]}


def test_a_trainer_that_joins_waits_until_a_restarted_pserver_holds_the_run():
    cluster = make_training(durability="log")
    assert cluster.plan_ready(0, 1) is not None
    held = HeldRun(
        run="run1", attempt=0, plan=cluster.run.record.plan.digest, rounds=FrozenRounds(applied=4)
    )  # fmt: skip
    answer = cluster.register_pserver(registration("new1", index=1, previous=1, held=held), 1.0)
    assert cluster.plan_ready(0, 1) is None
    cluster.run = cluster.run.note_holders({1: answer.incarnation})
    ready = cluster.plan_ready(0, 1)
    assert [info.incarnation for info in ready.pservers] == [1, 2]


# ---------------------------------------------------------------- one run after another


def test_a_new_trainer_waits_while_a_run_trains():
    cluster = make_training()
    with pytest.raises(NotReady, match="run1 is under way"):
        cluster.join_trainer(joining("new"), 1)
    with raises_code("world_mismatch"):  # waiting would not help
        cluster.join_trainer(joining("new", world_size=5), 1)
    with raises_code("mode_mismatch"):
        cluster.join_trainer(joining("new", expects={"mode": "async"}), 1)
    assert cluster.join_trainer(joining("0", 0), 1).rank == 0  # a retry of a member


# ---------------------------------------------------------------- exit when done


def test_with_exit_when_done_every_pserver_stops_and_then_the_coordinator():
    cluster = make_training(exit_when_done=True)
    cluster.leave_trainer(0, leaving(), 1)
    assert not cluster.pserver_heartbeat(0, beat(run="run1"), 1).stop
    cluster.leave_trainer(1, leaving(), 2)
    assert not cluster.pserver_heartbeat(0, beat(run="run1"), 2).stop  # the summary is not made yet
    cluster.run = replace(cluster.run, saved_at=2)
    assert not cluster.may_exit(2)
    reply = cluster.pserver_heartbeat(0, beat(run="run1"), 2)
    assert (reply.stop, reply.exit_code) == (True, 0)
    cluster.pserver_heartbeat(1, beat(run="run1"), 2)
    assert not cluster.may_exit(2)  # the replies may be lost
    cluster.pserver_heartbeat(0, beat(run="run1").model_copy(update={"is_stopping": True}), 3)
    assert not cluster.may_exit(3)
    assert cluster.may_exit(2.1 + LEASE)  # pserver 1 lives on
    cluster.pserver_heartbeat(1, beat(run="run1").model_copy(update={"is_stopping": True}), 3)
    assert (cluster.may_exit(3), cluster.exit_code) == (True, 0)
    with raises_code("run_over"):
        cluster.join_trainer(joining("new"), 3)


# ---------------------------------------------------------------------- strategy ring


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


@pytest.mark.ring
def test_pservers_and_requests_for_them_are_refused() -> None:
    with raises_code("mode_mismatch") as refused:
        ring().join_trainer(joining(expects={"strategy": "ps"}), 0.0)
    assert refused.value.facts == {"expected": {"strategy": "ring"}, "actual": {"strategy": "ps"}}
    with raises_code("mode_mismatch", match="no pservers"):
        ring().register_pserver(registration(), 0.0)
    with raises_code("no_pservers"):
        ring().require_pservers()
    make_cluster().require_pservers()


@pytest.mark.ring
@pytest.mark.parametrize(
    "changes",
    [{"local_steps": 2}, {"push_type": "int8"}, {"pull_type": "int8"}],
    ids=str,
)
def test_declarations_without_effect_in_a_ring_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadModel, match=f"{next(iter(changes))} would have no effect with strategy ring"):
        declare(ring(), 0, **changes)
    declare(ring(), 0, push_type="float32", pull_type="float32", local_steps=0)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [({"strategy": "ring"}, {}), ({}, {"local_steps": 2}), ({"mode": "async", "compensation": "dc"}, {})],
    ids=str,
)
def test_sparse_parameters_are_refused_where_whole_gradients_are_needed(
    settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(BadModel, match=r"do not support sparse gradients, such as that of 'w'.* sparse=False"):
        plan_model(model(sparse=("w",), **changes), CoordinatorSettings(**settings), 2)
    plan_model(model(**changes), CoordinatorSettings(**settings), 2)


@pytest.mark.ring
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


@pytest.mark.ring
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
