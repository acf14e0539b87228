from __future__ import annotations

import pytest

from ps_protocol.errors import NotReady, RoundTimeout, TrainerLost
from ps_protocol.messages import FrozenRounds, HeldRun
from ps_protocol.plan import SlicePlan

from ...raising import raises_code
from .support import LEASE, alive, beat, join_all, joining, leaving, make_cluster, model, registration, train

# ---------------------------------------------------------------- the start


def test_it_says_what_it_waits_for():
    cluster = make_cluster()
    assert cluster.waiting_for == ["pserver 0", "pserver 1", "trainer 0", "trainer 1"]
    cluster.register_pserver(registration("p", index=1), 0)
    cluster.join_trainer(joining("a", 1), 0)
    assert cluster.waiting_for == ["pserver 0", "trainer 0", "trainer 1 to declare its model"]
    cluster.run.declare(1, model())
    assert cluster.waiting_for == ["pserver 0", "trainer 0"]
    cluster.register_pserver(registration("q"), 0)
    cluster.join_trainer(joining("b"), 0)
    cluster.run.declare(0, model())
    assert cluster.waiting_for == ["the pservers to install the plan"]
    assert cluster.start_run_if_complete()
    assert cluster.waiting_for == ["the pservers to install the plan"]
    cluster.run.begin_training(0)
    cluster.finish_change()
    assert cluster.waiting_for == []


@pytest.mark.parametrize("trainers_first", [False, True])
def test_a_run_starts_once_in_any_order(trainers_first):
    cluster = make_cluster()
    assert not cluster.start_run_if_complete()
    if trainers_first:
        join_all(cluster)
    for index in (0, 1):
        cluster.register_pserver(registration(str(index)), 0)
    if not trainers_first:
        join_all(cluster)
    assert cluster.plan_ready(0, 1) is None
    assert cluster.start_run_if_complete()
    assert not cluster.start_run_if_complete()
    assert cluster.plan_ready(0, 1) is None  # until every pserver has it
    cluster.run.begin_training(0)
    cluster.finish_change()
    ready = cluster.plan_ready(0, 1)
    assert ready is not None
    assert [p.index for p in ready.pservers] == [0, 1]
    assert (ready.run, ready.attempt, ready.uploader) == ("run1", 0, 0)


def test_who_has_joined_must_declare_a_model_within_the_round_timeout():
    cluster = make_cluster()
    cluster.join_trainer(joining("a"), 0)
    cluster.run.declare(0, model())
    cluster.run.expire(1000, lease_seconds=2000)
    cluster.run.expire(2000, lease_seconds=2000)
    assert cluster.run.failure is None  # trainer 1 is not here; start order does not matter
    cluster.join_trainer(joining("b"), 2000)
    for now in (2000, 2030, 2059):
        cluster.run.expire(now, lease_seconds=9000)
    assert cluster.run.failure is None
    cluster.run.expire(2061, lease_seconds=9000)
    assert isinstance(cluster.run.failure, RoundTimeout)
    assert cluster.run.failure.facts["missing"] == [1]
    assert "trainer 1 joined, but did not declare a model" in cluster.run.failure.detail


def test_the_wait_for_a_declaration_begins_anew():
    cluster = make_cluster()
    join_all(cluster)
    cluster.run.leave(1, leaving(), 5)
    cluster.run.expire(10, lease_seconds=2000)
    cluster.join_trainer(joining("c"), 50)
    for now in (50, 109):
        cluster.run.expire(now, lease_seconds=2000)
    cluster.run.declare(1, model(incarnation=2))
    cluster.run.expire(1000, lease_seconds=2000)
    assert cluster.run.failure is None


def test_everybody_is_told_the_same_plan_and_members():
    cluster = make_cluster()
    train(cluster)
    first, second = cluster.installation(0, 7, None), cluster.installation(1, 7, None)
    assert first.plan == second.plan
    assert SlicePlan.from_json(first.plan).digest == cluster.run.plan.digest  # type: ignore[union-attr]
    assert first.membership.members == {0: 1, 1: 1}
    assert (first.incarnation, first.uploader, first.number) == (1, 0, 7)
    ready = cluster.plan_ready(1, 1)
    assert ready is not None
    assert ready.plan == first.plan


def test_an_installation_says_who_uploads_even_after_that_trainer_has_left():
    cluster = make_cluster()
    for index in (0, 1):
        cluster.register_pserver(registration(str(index)), 0)
    join_all(cluster)
    cluster.start_run_if_complete()
    first = cluster.installation(0, 1, None)
    cluster.run.leave(0, leaving(), 0)
    assert cluster.installation(1, 2, None).uploader == first.uploader


def test_another_version_of_the_protocol_is_refused():
    cluster = make_cluster()
    with raises_code("unsupported_protocol"):
        cluster.register_pserver(registration(protocol=99), 0)
    with raises_code("unsupported_protocol"):
        cluster.join_trainer(joining(protocol=99), 0)
    assert (cluster.registry.members, cluster.run.trainers) == ({}, {})


# ---------------------------------------------------------------- during training


def test_a_pserver_whose_lease_ends_ends_the_run_and_is_named():
    cluster = make_cluster()
    train(cluster)
    for rank in (0, 1):
        cluster.run.heartbeat(rank, alive(), 9)
    cluster.pserver_heartbeat(0, beat(), 9)
    cluster.expire(11)
    assert cluster.run.failure is not None
    assert cluster.run.failure.code == "pserver_lost"
    assert str(cluster.run.failure) == "pserver 1 at http://1:1 was lost: no heartbeat for 11.0 s (lease 10 s)"
    message = cluster.members_message(cluster.run.number)
    assert message.failure is not None
    assert message.failure["code"] == "pserver_lost"
    assert message.number == cluster.run.number


def test_a_pserver_that_comes_back_during_a_run_has_lost_its_shard():
    cluster = make_cluster()
    train(cluster)
    cluster.registry.expire(100)  # the registry alone: nobody has noticed yet
    cluster.register_pserver(registration("new", index=1), 100)
    assert cluster.run.failure is not None
    assert cluster.run.failure.code == "pserver_lost"
    assert "pserver 1 was restarted" in str(cluster.run.failure)


def test_a_pserver_that_is_lost_before_the_start_is_only_waited_for():
    cluster = make_cluster()
    cluster.register_pserver(registration("p", index=0), 0)
    cluster.expire(11)
    assert cluster.run.failure is None
    assert cluster.waiting_for[0] == "pserver 0"


def test_a_trainer_whose_lease_ends_ends_the_run_for_all():
    cluster = make_cluster()
    train(cluster)
    cluster.run.heartbeat(0, alive(), 10)
    for index in (0, 1):
        cluster.pserver_heartbeat(index, beat(), 10)
    cluster.expire(11)
    assert isinstance(cluster.run.failure, TrainerLost)
    assert cluster.run.failure.facts == {"ranks": [1]}


def test_round_timeout_is_told_by_a_heartbeat():
    cluster = make_cluster()
    train(cluster)
    cluster.pserver_heartbeat(0, beat(run="run0", round_=4, missing=(1,), waiting_seconds=61), 1)  # of an old run
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(1,), waiting_seconds=59), 62)
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(), waiting_seconds=61), 62)  # it is applying
    assert cluster.run.failure is None
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(0, 1), waiting_seconds=61), 62)
    assert isinstance(cluster.run.failure, RoundTimeout)
    assert cluster.run.failure.facts == {"missing": [0, 1]}
    assert "trainer 0, trainer 1 did not reach the batch barrier of round 5" in str(cluster.run.failure)


def test_no_trainer_is_late_while_it_cannot_reach_a_pserver_or_a_pserver_does_not_serve_the_run():
    waits = {"run": "run1", "round_": 4, "missing": (1,)}
    cluster = make_cluster()
    train(cluster)
    cluster.trainer_heartbeat(1, alive().model_copy(update={"unreachable": {0: (1, 0.5)}}), 20)
    cluster.trainer_heartbeat(1, alive().model_copy(update={"unreachable": {0: (7, 0.5)}}), 70)  # of another life
    cluster.pserver_heartbeat(0, beat(**waits, waiting_seconds=79), 79)
    assert cluster.run.failure is None
    cluster.pserver_heartbeat(1, beat(run=None), 80)
    cluster.pserver_heartbeat(0, beat(**waits, waiting_seconds=100), 100)
    assert cluster.run.failure is None
    cluster.pserver_heartbeat(1, beat(run="run1"), 101)
    cluster.pserver_heartbeat(0, beat(**waits, waiting_seconds=160), 160)
    assert cluster.run.failure is None
    cluster.pserver_heartbeat(0, beat(**waits, waiting_seconds=161), 161)
    assert isinstance(cluster.run.failure, RoundTimeout)


@pytest.mark.parametrize(("reason", "now"), [("RoundTimeout: …", 72.5), ("RoundTimeout: …", 71.9), ("gave up", 72.5)])
def test_who_waited_too_long_and_leaves_is_not_to_blame(reason, now):
    """The pserver tells a waiting trainer of the time-out before its next heartbeat tells the coordinator."""
    cluster = make_cluster()
    train(cluster)
    cluster.pserver_heartbeat(0, beat(run="run1", round_=4, missing=(1,), waiting_seconds=58), 70)
    cluster.leave_trainer(0, leaving("failed", reason=reason), now)
    assert isinstance(cluster.run.failure, RoundTimeout)
    assert cluster.run.failure.facts == {"missing": [1]}


@pytest.mark.parametrize(
    "heartbeat",
    [
        beat(run="run1", round_=4, missing=(1,), waiting_seconds=58),  # it is not over yet
        beat(run="run1", round_=4, missing=(0, 1), waiting_seconds=80),  # it is missing itself
        beat(run="run1", round_=4, missing=(1,), waiting_seconds=0),
        beat(run="run0", round_=4, missing=(1,), waiting_seconds=80),
    ],
)
def test_who_fails_by_itself_is_to_blame(heartbeat):
    cluster = make_cluster()
    train(cluster)
    cluster.registry.heartbeat(0, heartbeat, 10)
    cluster.leave_trainer(0, leaving("failed", reason="ValueError: no data"), 11)
    assert str(cluster.run.failure) == "trainer 0 failed: ValueError: no data"


# ---------------------------------------------------------------- one run after another


def test_a_joiner_waits_while_a_run_is_under_way():
    cluster = make_cluster()
    train(cluster)
    with pytest.raises(NotReady, match="run1 is under way"):
        cluster.join_trainer(joining("new"), 1)
    with raises_code("world_mismatch"):  # waiting would not help
        cluster.join_trainer(joining("new", world_size=5), 1)
    with raises_code("mode_mismatch"):
        cluster.join_trainer(joining("new", expects={"mode": "async"}), 1)
    assert cluster.join_trainer(joining("0", 0), 1).rank == 0  # a retry of a member


def test_the_next_run_begins_when_the_last_one_is_deserted():
    cluster = make_cluster()
    train(cluster)
    cluster.leave_trainer(0, leaving("failed", reason="no data"), 1)
    with pytest.raises(NotReady, match="not all of its trainers have left") as caught:
        cluster.join_trainer(joining("new"), 2)
    assert caught.value.facts == {"waiting_for": "trainer 1 to leave"}
    cluster.leave_trainer(1, leaving("failed"), 3)
    answer = cluster.join_trainer(joining("new"), 4)
    assert (answer.run, answer.rank, answer.incarnation) == ("run2", 0, 2)  # a later life of the rank
    assert cluster.run.state == "gathering"
    assert cluster.run.failure is None
    assert cluster.waiting_for == ["trainer 0 to declare its model", "trainer 1"]


def test_a_trainer_that_never_leaves_holds_the_next_run_up_for_a_lease_at_most():
    cluster = make_cluster()
    train(cluster)
    cluster.leave_trainer(0, leaving("failed"), 1)
    cluster.run.expire(LEASE + 1, LEASE)
    assert cluster.join_trainer(joining("new"), LEASE + 1).run == "run2"


def test_successive_runs_on_the_same_pservers():
    cluster = make_cluster()
    train(cluster)
    for run in ("run1", "run2", "run3"):
        assert cluster.run.name == run
        for rank, incarnation in cluster.run.members.items():
            cluster.leave_trainer(rank, leaving(run=run, incarnation=incarnation), 1)
        assert cluster.run.state == "finished"
        join_all(cluster, 2, life=run)
        assert cluster.start_run_if_complete()
        assert cluster.installation(0, 1, None).incarnation == 1
        cluster.finish_change()


def test_who_joins_when_a_pserver_has_just_come_back_waits_until_that_holds_the_run():
    """It needs every pserver, and each in the life that the run was installed in."""
    cluster = make_cluster(durability="log")
    train(cluster)
    assert cluster.plan_ready(0, 1) is not None
    held = HeldRun(
        run="run1", attempt=0, plan=cluster.run.plan.digest, rounds=FrozenRounds(applied=4), restorable=((0, 4),)
    )  # fmt: skip
    answer = cluster.register_pserver(registration("new1", index=1, previous=1, held=held), 1.0)
    assert cluster.plan_ready(0, 1) is None
    cluster.run_incarnations[1] = answer.incarnation
    ready = cluster.plan_ready(0, 1)
    assert ready is not None
    assert [info.incarnation for info in ready.pservers] == [1, 2]


# ---------------------------------------------------------------- exit when done


def test_with_exit_when_done_every_pserver_is_told_to_stop():
    cluster = make_cluster(exit_when_done=True)
    train(cluster)
    cluster.leave_trainer(0, leaving(), 1)
    assert not cluster.pserver_heartbeat(0, beat(run="run1"), 1).stop
    cluster.leave_trainer(1, leaving(), 2)
    assert not cluster.pserver_heartbeat(0, beat(run="run1"), 2).stop  # its summary has not been taken yet
    cluster.finish_recording()
    assert not cluster.may_exit
    reply = cluster.pserver_heartbeat(0, beat(run="run1"), 2)
    assert (reply.stop, reply.exit_code) == (True, 0)
    cluster.pserver_heartbeat(1, beat(run="run1"), 2)
    assert not cluster.may_exit  # the answers may be lost
    cluster.pserver_heartbeat(0, beat(run="run1").model_copy(update={"is_stopping": True}), 3)
    cluster.pserver_heartbeat(1, beat(run="run1"), 3)
    assert (cluster.may_exit, cluster.exit_code) == (True, 0)
    with raises_code("run_over"):
        cluster.join_trainer(joining("new"), 3)


def test_with_exit_when_done_a_dead_pserver_is_not_waited_for():
    cluster = make_cluster(exit_when_done=True)
    train(cluster)
    for rank in (0, 1):
        cluster.run.heartbeat(rank, alive(), 11)
    cluster.pserver_heartbeat(0, beat(run="run1"), 11)
    cluster.expire(12)
    for rank in (0, 1):
        cluster.leave_trainer(rank, leaving("failed"), 12)
    cluster.finish_recording()
    reply = cluster.pserver_heartbeat(0, beat(run="run1"), 12)
    assert (reply.stop, reply.exit_code) == (True, 1)
    cluster.pserver_heartbeat(0, beat(run="run1"), 13)
    assert (cluster.may_exit, cluster.exit_code) == (True, 1)


def test_without_it_the_cluster_stays():
    cluster = make_cluster()
    train(cluster)
    for rank in (0, 1):
        cluster.leave_trainer(rank, leaving(), 1)
    assert not cluster.pserver_heartbeat(0, beat(), 2).stop
    assert not cluster.may_exit


def test_leases_are_renewed_when_heartbeats_could_not_be_heard():
    cluster = make_cluster()
    train(cluster)
    cluster.renew_leases(100)
    cluster.expire(105)
    assert cluster.run.state == "training"
    cluster.expire(120)
    assert cluster.run.state == "failed"
