from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadModel, Ended, ModelMismatch, StaleRun, TrainerLost
from ps_protocol.vocabulary import LossPolicy
from services.coordinator.run import Run

from ...raising import raises_code
from .support import LEASE, SGD_FLAGS, alive, defaults, joining, leaving, make_run, model


def joined(num_trainers: int = 2) -> Run:
    run = make_run(num_trainers)
    for rank in range(num_trainers):
        run.join(joining(str(rank), rank), 0)
    return run


def training(num_trainers: int = 2) -> Run:
    run = joined(num_trainers)
    for rank in range(num_trainers):
        run.declare(rank, model())
    run.start(2)
    run.begin_training(0)
    return run


# ---------------------------------------------------------------- joining


def test_trainers_get_the_lowest_free_rank_or_the_one_they_want():
    run = make_run(3)
    assert run.join(joining("a"), 0).rank == 0
    assert run.join(joining("b", 2), 0).rank == 2
    assert run.join(joining("c"), 0).rank == 1
    with raises_code("rank_taken", match="all 3 ranks"):
        run.join(joining("d"), 0)


def test_a_join_that_is_sent_twice_gets_one_rank():
    run = make_run()
    first = run.join(joining("a"), 0)
    number = run.number
    assert run.join(joining("a"), 5) is first
    assert (first.seen_at, run.number) == (5, number)


def test_a_second_trainer_with_the_same_rank_waits_for_the_lease_of_the_first():
    run = make_run()
    run.join(joining("a", 0), 0)
    with raises_code("rank_taken", match="rank 0") as caught:
        run.join(joining("b", 0), 5)
    assert caught.value.may_be_retried
    assert run.members == {0: 1}
    run.expire(LEASE + 1, LEASE)
    assert run.join(joining("b", 0), LEASE + 1).incarnation == 2
    with raises_code("stale_trainer"):
        run.heartbeat(0, alive(incarnation=1), LEASE + 2)  # SIGCONT after its lease


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (joining(world_size=3), "world_mismatch"),
        (joining(rank=2), "world_mismatch"),
        (joining(expects={"mode": "async"}), "mode_mismatch"),
    ],
)
def test_a_trainer_that_does_not_fit_the_cluster_is_refused(request_, error):
    run = make_run()
    with raises_code(error):
        run.join(request_, 0)
    assert (run.trainers, run.number) == ({}, 0)
    run.join(joining(world_size=2, rank=1, expects={"mode": "sync"}), 0)


# ---------------------------------------------------------------- declaring


def test_a_run_is_declared_once_everybody_said_the_same():
    run = joined()
    assert run.missing_ranks == [0, 1]
    run.declare(1, model())
    run.declare(1, model())
    assert (run.missing_ranks, run.is_declared) == ([0], False)
    run.declare(0, model())
    assert (run.missing_ranks, run.is_declared) == ([], True)


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": (("w", (10, 1000), "F32", 0),)},
        {"parameters": (("w", (10, 1001), "F32", 0), ("b", (10,), "F32", 0))},
        {"parameters": (("w", (10, 1000), "BF16", 0), ("b", (10,), "F32", 0))},
        {"parameters": (("b", (10,), "F32", 0), ("w", (10, 1000), "F32", 0))},
        {"buffers": (("mean", (10,), "F32"),)},
        {"optimizer": "Adagrad", "group_flags": ({"maximize": False},)},
        {"group_flags": ({**SGD_FLAGS, "nesterov": True},)},
        {"min_block_size": 100},
        {"placement": "hash"},
        {"slice_parameters": False},
        {"nonfinite": "allow"},
        {"local_steps": 3},
    ],
)
def test_another_model_than_the_others_declared_is_refused_with_the_difference(changes: dict[str, Any]):
    run = joined()
    run.declare(0, model())
    with pytest.raises(ModelMismatch, match="trainer 1 and trainer 0") as caught:
        run.declare(1, model(**changes))
    assert caught.value.facts["expected"] != caught.value.facts["actual"]
    assert run.missing_ranks == [1]
    run.declare(1, model())


def test_a_run_of_an_earlier_version_that_kept_its_buffers_is_not_continued():
    run = joined()
    run.declare(0, model(buffers=(("mean", (10,), "F32"),)))
    with pytest.raises(ModelMismatch, match=r"stores the buffer 'mean' .* checkpoint export") as caught:
        run.declare(1, model(buffers=(), parameters=(("w", (10, 1000), "F32", 0), ("mean", (10,), "F32", 0))))
    assert caught.value.code == "model_mismatch"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"optimizer": "LBFGS", "group_flags": ({},)}, "unsupported_optimizer"),
        ({"optimizer": "Mine"}, "unsupported_optimizer"),
        ({"group_flags": ({"nesterov": False},)}, "unsupported_optimizer"),
        ({"parameters": (("w", (1,), "F32", 0), ("w", (1,), "F32", 0))}, "bad_model"),
        ({"parameters": (("w", (1,), "I64", 0),)}, "bad_model"),
        ({"parameters": (("w", (1,), "F32", 1),)}, "bad_model"),
        ({"parameters": (("w", (-1,), "F32", 0),)}, "bad_model"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_before_anybody_waits_for_it(changes, error):
    run = joined()
    with raises_code(error):
        run.declare(0, model(**changes))
    assert run.missing_ranks == [0, 1]


@pytest.mark.parametrize(
    ("rules", "changes", "why"),
    [
        ({"mode": "async"}, {"pull_type": "int8"}, "belongs to the synchronous mode without max_delay"),
        ({"mode": "ssp"}, {"pull_type": "int8"}, "belongs to the synchronous mode without max_delay"),
        ({"max_delay": 1}, {"pull_type": "int8"}, "Take bfloat16"),
        ({}, {"pull_type": "int8", "local_steps": 4}, "with local_steps"),
    ],
)
def test_differences_are_pulled_where_all_have_the_round_before(
    rules: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    run = Run("run1", defaults(consistency=Consistency(**rules)), {})
    for rank in range(2):
        run.join(joining(str(rank), rank), 0)
    with pytest.raises(BadModel, match=why):
        run.declare(0, model(**changes))
    assert run.missing_ranks == [0, 1]
    run.declare(0, model(**{**changes, "pull_type": "bfloat16"}))


def test_a_model_may_change_until_the_plan_is_made_and_not_after():
    run = joined(1)
    run.declare(0, model(min_block_size=100))
    run.declare(0, model())
    run.start(2)
    run.declare(0, model())  # a retry
    with pytest.raises(ModelMismatch, match="trainer 0"):
        run.declare(0, model(min_block_size=100))
    assert run.trainers[0].declaration == model()


def test_who_has_left_is_not_compared_with():
    run = joined()
    run.declare(0, model(min_block_size=100))
    run.leave(0, leaving(), 0)
    run.declare(1, model())


def test_messages_of_another_run_or_life_are_refused():
    run = joined()
    for act in (
        lambda **changes: run.declare(0, model(**changes)),
        lambda **changes: run.heartbeat(0, alive(**changes), 1),
        lambda **changes: run.leave(0, leaving(**changes), 1),
    ):
        with pytest.raises(StaleRun):
            act(run="run0")
        with raises_code("stale_trainer"):
            act(incarnation=2)
    with raises_code("stale_trainer"):
        run.heartbeat(5, alive(), 1)
    assert run.members == {0: 1, 1: 1}


# ---------------------------------------------------------------- the plan


def test_the_plan_is_made_of_what_was_declared():
    run = joined()
    for rank in (0, 1):
        run.declare(rank, model(min_block_size=2500, slice_parameters=True))
    plan = run.start(2)
    assert [block.name for block in plan.blocks] == ["w.block0", "w.block1", "b.block0"]
    assert run.plan is plan
    assert run.state == "gathering"  # until the pservers have it
    run.begin_training(3.0)
    assert (run.state, run.started_at) == ("training", 3.0)
    run.begin_training(4.0)
    assert run.started_at == 3.0


def test_the_uploader_is_the_lowest_rank_at_the_start_and_stays_it():
    run = training(3)
    assert run.uploader == 0
    run.leave(0, leaving(), 1)
    assert run.uploader == 0  # the pservers were told so


# ---------------------------------------------------------------- leases and leaving


def test_who_is_silent_before_the_start_gives_its_place_up():
    run = joined()
    run.heartbeat(1, alive(), 8)
    run.expire(LEASE + 1, LEASE)
    assert (run.state, run.failure) == ("gathering", None)
    assert run.members == {1: 1}
    assert run.join(joining("c", 0), 11).incarnation == 2
    with raises_code("stale_trainer"):
        run.heartbeat(0, alive(), 12)


@pytest.mark.parametrize("has_declared", [False, True])
def test_who_is_silent_before_the_start_is_back_if_nobody_took_its_place(has_declared: bool):
    """Its interpreter may have been busy with imports for longer than the lease."""
    run = joined()
    if has_declared:
        run.declare(0, model())
    run.heartbeat(1, alive(), 8)
    run.expire(LEASE + 1, LEASE)
    number = run.number
    run.heartbeat(0, alive(), 12)
    assert run.members == {0: 1, 1: 1}
    assert run.is_declared is False
    assert run.number > number
    run.declare(0, model())
    run.declare(1, model())
    assert run.is_declared


def test_who_joins_and_is_silent_before_it_has_declared_is_back_though_nobody_awaits_it():
    run = training()
    run.defaults = replace(run.defaults, on_trainer_loss="continue")
    run.leave(1, leaving("failed"), 1)
    assert run.awaited == []
    run.join(joining("another life", 1), 2)
    run.heartbeat(0, alive(), 2 + LEASE)
    run.expire(3 + LEASE, LEASE)
    assert run.members == {0: 1}
    run.heartbeat(1, alive(2), 4 + LEASE)
    run.declare(1, model(2))
    assert run.targets == {0: 1, 1: 2}


def test_who_is_silent_during_training_ends_the_run_and_is_named():
    run = training()
    run.heartbeat(1, alive(round_=3, loss=0.5), 8)
    number = run.number
    run.expire(LEASE, LEASE)
    assert run.failure is None
    run.expire(LEASE + 1.5, LEASE)
    assert run.state == "failed"
    assert isinstance(run.failure, TrainerLost)
    assert str(run.failure) == "trainer 0 was lost: no heartbeat for 11.5 s (lease 10 s)"
    assert run.failure.facts == {"ranks": [0]}
    assert run.number > number
    assert run.members == {1: 1}
    assert (run.trainers[1].round, run.trainers[1].results) == (3, {"loss": 0.5})
    assert run.ended_at == LEASE + 1.5


def test_a_lost_trainer_learns_it_and_stays_lost():
    run = training()
    run.heartbeat(1, alive(), 11)
    run.expire(11, LEASE)
    run.heartbeat(0, alive(), 12)  # SIGCONT: answered, so that it hears of the failure
    assert run.trainers[0].state == "lost"
    run.leave(0, leaving(), 13)
    assert run.trainers[0].state == "lost"
    assert 0 not in run.members


def test_a_trainer_that_is_done_is_not_waited_for():
    run = training()
    number = run.number
    run.leave(0, leaving(round=5), 1)
    assert (run.state, run.members) == ("training", {1: 1})
    assert run.number > number
    run.expire(9, LEASE)
    run.heartbeat(1, alive(), 9)
    run.expire(15, LEASE)  # it is gone: its lease does not matter
    assert run.state == "training"
    run.leave(1, leaving(round=5), 16)
    assert (run.state, run.ended_at, run.is_deserted) == ("finished", 16, True)


def test_a_trainer_that_fails_ends_the_run_with_its_reason():
    run = training()
    run.leave(1, leaving("failed", reason="ValueError: no data"), 4)
    assert run.state == "failed"
    assert str(run.failure) == "trainer 1 failed: ValueError: no data"
    assert not run.is_deserted
    run.leave(0, leaving("failed", reason="TrainerLost: trainer 1 failed"), 5)
    assert str(run.failure) == "trainer 1 failed: ValueError: no data"  # the first one stands
    assert run.is_deserted
    assert run.ended_at == 4


def test_a_trainer_that_leaves_before_the_start_frees_its_rank():
    run = joined()
    run.declare(0, model())
    run.leave(0, leaving("failed"), 1)
    assert (run.state, run.members) == ("gathering", {1: 1})
    assert run.join(joining("c"), 2).rank == 0


def test_leaving_twice_counts_once():
    run = training()
    run.leave(0, leaving(), 1)
    number = run.number
    run.leave(0, leaving(), 2)
    assert (run.state, run.number) == ("training", number)


@pytest.mark.parametrize(("policy", "is_awaited"), [("fail", False), ("wait", True), ("continue", False)])
def test_a_trainer_that_was_done_is_lost_if_its_process_turns_out_to_have_failed(policy: str, is_awaited: bool):
    run = training()
    run.defaults = replace(run.defaults, on_trainer_loss=policy)
    run.leave(0, leaving(), 1)
    run.leave(0, leaving("failed", reason="its process failed with exit code 3"), 2)
    assert (run.trainers[0].state, run.trainers[0].is_awaited) == ("failed", is_awaited)
    assert run.trainers[0].why == "trainer 0 failed: its process failed with exit code 3"
    assert (run.failure is not None) == (policy == "fail")


def test_a_finished_run_stays_finished_if_a_process_fails_then():
    run = training(1)
    run.leave(0, leaving(), 1)
    number = run.number
    run.leave(0, leaving("failed"), 2)
    assert (run.state, run.trainers[0].state, run.number) == ("finished", "done", number)


def test_the_first_failure_stands():
    run = training()
    run.fail(Ended("pserver 1 was lost", code="pserver_lost"), 1)
    number = run.number
    run.fail(TrainerLost("trainer 0 was lost"), 2)
    assert (str(run.failure), run.ended_at, run.number) == ("pserver 1 was lost", 1, number)


def test_a_run_that_is_over_does_not_fail_any_more():
    run = training(1)
    run.leave(0, leaving(), 1)
    run.fail(Ended("it exited", code="pserver_lost"), 2)
    assert (run.state, run.failure) == ("finished", None)


# ---------------------------------------------------------------- another life


def with_another_life() -> Run:
    """Trainer 1 was lost during training, and another life of it has joined, but declared nothing yet."""
    run = training()
    run.defaults = replace(run.defaults, on_trainer_loss="wait")
    run.leave(1, leaving("failed"), 1)
    run.join(joining("another life", 1), 2)
    return run


def test_another_life_that_is_silent_for_a_while_still_takes_over():
    run = with_another_life()
    run.heartbeat(0, alive(), 2 + LEASE)
    run.expire(3 + LEASE, LEASE)
    assert run.targets == {0: 1, 1: 1}
    run.heartbeat(1, alive(2), 4 + LEASE)
    assert run.targets == {0: 1, 1: 1}  # nobody goes on without it
    number = run.number
    run.declare(1, model(2))
    assert run.targets == {0: 1, 1: 2}
    assert run.trainers[1].is_awaited  # it answers for the open round
    assert run.number > number


def test_another_life_that_was_silent_after_it_had_declared_still_takes_over():
    run = with_another_life()
    run.declare(1, model(2))
    run.heartbeat(0, alive(), 2 + LEASE)
    run.expire(3 + LEASE, LEASE)
    number = run.number
    run.heartbeat(1, alive(2), 4 + LEASE)
    assert run.targets == {0: 1, 1: 2}
    assert run.trainers[1].is_awaited
    assert run.number > number  # the pservers have to be told


def test_another_life_that_declares_late_counts_as_lost_and_may_still_come():
    run = with_another_life()
    limit = run.defaults.round_timeout_seconds
    run.expire(3, 10 * limit)
    run.expire(4 + limit, 10 * limit)
    assert not run.is_over
    assert "did not declare a model within the round time-out" in run.awaited[0].why
    run.heartbeat(1, alive(2), 5 + limit)
    assert run.awaited  # its heartbeats lived all the time
    run.declare(1, model(2))
    assert (run.awaited, run.targets) == ([], {0: 1, 1: 2})


@pytest.mark.parametrize("policy", ["wait", "continue"])
def test_another_life_that_does_not_declare_is_given_up_though_others_are_gone(policy: LossPolicy):
    """Nobody else waits for it: the pservers do not count on it, and who was done is not missing."""
    run = training(3)
    run.defaults = replace(run.defaults, on_trainer_loss=policy, min_trainers=2)
    run.leave(2, leaving(), 1)
    run.leave(1, leaving("failed"), 1)
    run.join(joining("another life", 1), 2)
    assert [t.rank for t in run.undeclared] == [1]
    run.expire(2 + run.defaults.round_timeout_seconds, 1000)
    assert run.trainers[1].is_here
    run.expire(3 + run.defaults.round_timeout_seconds, 1000)
    assert "did not declare a model" in run.awaited[0].why
    run.revive_stuck(set())
    assert run.awaited
    run.expire(4 + run.defaults.round_timeout_seconds + run.defaults.rejoin_timeout_seconds, 1000)
    assert isinstance(run.failure, TrainerLost)


def test_another_life_is_not_blamed_for_what_its_predecessor_owes():
    """Else its place would be kept for a life that is gone, and nobody would ever come."""
    run = with_another_life()
    for declare in (False, True):
        if declare:
            run.declare(1, model(2))
        run.mark_stuck([1], TrainerLost("trainer 1 did not come", ranks=[1]), 3)
        assert run.members == {0: 1, 1: 2}
    assert run.targets == {0: 1, 1: 2}


def test_who_is_done_is_not_awaited_whatever_was_before():
    run = with_another_life()
    run.declare(1, model(2))
    run.leave(1, leaving(incarnation=2), 5)
    assert run.awaited == []


def test_under_continue_nobody_is_awaited_once_there_are_enough_again():
    """Whoever comes back: not only the one that was lost last."""
    run = training()
    run.defaults = replace(run.defaults, on_trainer_loss="continue")
    run.leave(0, leaving("failed"), 1)
    run.leave(1, leaving("failed"), 2)
    assert [trainer.rank for trainer in run.awaited] == [1]
    run.join(joining("another life", 0), 3)
    assert [trainer.rank for trainer in run.awaited] == [1]  # it may be busy with imports, or die of them
    number = run.number
    run.declare(0, model(2))
    assert run.awaited == []
    assert run.targets == {0: 2}
    assert run.number > number
    run.expire(1000, LEASE * 1000)
    assert run.failure is None


def test_under_continue_all_are_awaited_until_there_are_enough():
    run = training()
    run.defaults = replace(run.defaults, on_trainer_loss="continue", min_trainers=2)
    run.leave(0, leaving("failed"), 1)
    run.leave(1, leaving("failed"), 2)
    run.join(joining("another life", 0), 3)
    run.declare(0, model(2))
    assert [trainer.rank for trainer in run.awaited] == [1]
