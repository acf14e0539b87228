"""One run: joining, declaring, leases, leaving, and further incarnations of a trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadModel, ModelMismatch, RunStopped, TrainerLost
from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.vocabulary import LossPolicy
from services.coordinator.state.decision import Rollback, decide_rounds, decide_steps
from services.coordinator.state.joining import declare_model, join_run, start_run
from services.coordinator.state.losses import (
    expire_trainers,
    leave_run,
    lose_stuck_trainers,
    note_heartbeat,
    return_stuck_trainers,
)
from services.coordinator.state.run import Run

from ...raising import raises_code
from .support import LEASE, SGD_FLAGS, alive, defaults, joining, leaving, make_run, model


def joined(num_trainers: int = 2) -> Run:
    run = make_run(num_trainers)
    for rank in range(num_trainers):
        run = join_run(run, joining(str(rank), rank), 0)
    return run


def training(num_trainers: int = 2, **changes: Any) -> Run:
    run = joined(num_trainers)
    for rank in range(num_trainers):
        run = declare_model(run, rank, model())
    run = start_run(run, {0: 1, 1: 1}, None, 0)
    run = run.begin_training(0)
    return replace(run, settings=run.settings.model_copy(update=changes))


def awaited(run: Run) -> list[int]:
    return [trainer.rank for trainer in run.record.awaited]


def test_an_administrator_stops_a_run_once():
    for begin in (joined, training):
        stopped = begin().stop(7, is_failure=False)
        assert (stopped.record.state, stopped.ended_at) == ("finished", 7)
        with pytest.raises(RunStopped, match="an administrator stopped run run1"):
            raise stopped.record.failure
        assert begin().stop(7, is_failure=True).record.state == "failed"
        assert stopped.stop(8, is_failure=True) is stopped
        assert leave_run(stopped, 0, leaving("failed"), 9).record.state == "finished"


# ---------------------------------------------------------------- joining


def test_trainers_get_the_lowest_free_rank_or_the_one_they_want():
    run = make_run(3)
    for one in (("a",), ("b", 2), ("c",)):
        run = join_run(run, joining(*one), 0)
    assert {trainer.instance[-1]: rank for rank, trainer in run.record.trainers.items()} == {"a": 0, "b": 2, "c": 1}
    with raises_code("rank_taken", match="all 3 ranks"):
        join_run(run, joining("d"), 0)


def test_a_second_trainer_with_the_same_rank_waits_for_the_lease_of_the_first():
    run = make_run()
    run = join_run(run, joining("a", 0), 0)
    with raises_code("rank_taken", match="rank 0") as caught:
        join_run(run, joining("b", 0), 5)
    assert caught.value.may_be_retried
    assert run.record.members == {0: 1}
    run = expire_trainers(run, LEASE + 1, LEASE)
    assert (run.record.state, run.record.failure, run.record.members) == ("gathering", None, {})
    run = join_run(run, joining("b", 0), LEASE + 1)
    assert run.record.members == {0: 2}
    with raises_code("stale_trainer"):
        note_heartbeat(run, 0, alive(incarnation=1), LEASE + 2)  # SIGCONT after its lease


# ---------------------------------------------------------------- declaring


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": (("w", (10, 1000), "F32", 0),)},
        {"parameters": (("w", (10, 1001), "F32", 0), ("b", (10,), "F32", 0))},
        {"parameters": (("b", (10,), "F32", 0), ("w", (10, 1000), "F32", 0))},
        {"buffers": (("mean", (10,), "F32"),)},
        {"optimizer": "Adagrad", "group_flags": ({"maximize": False},)},
        {"group_flags": ({**SGD_FLAGS, "nesterov": True},)},
        {"push_type": "int8"}, {"nonfinite": "allow"}, {"local_steps": 3},
    ],
)  # fmt: skip
def test_a_different_declaration_is_refused_with_the_difference(changes: dict[str, Any]):
    run = joined()
    run = declare_model(run, 0, model())
    with pytest.raises(ModelMismatch, match="trainer 1 and trainer 0") as caught:
        declare_model(run, 1, model(**changes))
    assert caught.value.facts["expected"] != caught.value.facts["actual"]
    assert run.missing_ranks == [1]
    run = leave_run(run, 0, leaving(), 0)
    run = declare_model(run, 1, model(**changes))  # a trainer that has left is not compared


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"optimizer": "LBFGS", "group_flags": ({},)}, "unsupported_optimizer"),
        ({"group_flags": ({"nesterov": False},)}, "unsupported_optimizer"),
        ({"parameters": (("w", (1,), "F32", 0), ("w", (1,), "F32", 0))}, "bad_model"),
        ({"parameters": (("w", (1,), "F32", 1),)}, "bad_model"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_at_once(changes, error):
    run = joined()
    with raises_code(error):
        declare_model(run, 0, model(**changes))
    assert run.missing_ranks == [0, 1]


@pytest.mark.parametrize(
    ("rules", "changes", "why"),
    [
        ({"mode": "async"}, {"pull_type": "int8"}, "needs the synchronous mode without max_delay"),
        ({"mode": "ssp"}, {"pull_type": "int8"}, "needs the synchronous mode without max_delay"),
        ({"max_delay": 1}, {"pull_type": "int8"}, "Use bfloat16"),
        ({}, {"pull_type": "int8", "local_steps": 4}, "with local_steps"),
    ],
)
def test_deltas_are_refused_where_trainers_do_not_have_the_round_before(
    rules: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    run = Run.begin("run1", defaults(1, consistency=Consistency(**rules)), {})
    run = join_run(run, joining(), 0)
    with pytest.raises(BadModel, match=why):
        declare_model(run, 0, model(**changes))
    assert run.missing_ranks == [0]
    run = declare_model(run, 0, model(**{**changes, "pull_type": "bfloat16"}))


# ---------------------------------------------------------------- leases and leaving during training


def test_a_lost_trainer_that_leaves_as_done_is_done():
    """Leaving is its last request: the heartbeats have ended before."""
    run = training(on_trainer_loss="wait")
    run = leave_run(run, 1, leaving("failed"), 1)
    run = expire_trainers(run, LEASE + 2, LEASE)
    assert awaited(run) == [0, 1]
    run = leave_run(run, 0, leaving(), LEASE + 3)
    assert (awaited(run), run.record.trainers[0].state) == ([1], "done")
    run = leave_run(run, 1, leaving(), LEASE + 3)
    assert run.record.state == "finished"


def test_a_trainer_that_is_done_is_not_waited_for():
    run = training(3)
    number = run.record.change_number
    run = leave_run(run, 0, leaving(round=5), 1)
    assert (run.record.state, run.record.members, run.record.uploader) == ("training", {1: 1, 2: 1}, 0)
    assert run.record.change_number > number
    number = run.record.change_number
    run = leave_run(run, 0, leaving(round=5), 2)  # a retry
    assert run.record.change_number == number
    for rank in (1, 2):
        run = note_heartbeat(run, rank, alive(), 9)
    run = expire_trainers(run, 15, LEASE)  # the lease of trainer 0 does not matter
    assert run.record.state == "training"
    for rank in (1, 2):
        run = leave_run(run, rank, leaving(round=5), 16)
    assert (run.record.state, run.ended_at, run.record.is_deserted) == ("finished", 16, True)


def test_trainers_that_left_early_hold_older_parameters():
    run = training(6)
    for rank in (0, 1, 2, 3):
        run = leave_run(run, rank, leaving(round=5, attempt=0), 1)
    run = leave_run(run, 4, leaving(round=10), 1)
    run = leave_run(run, 5, leaving(round=10, attempt=0), 2)
    named = "trainer 0 (round 5), trainer 1 (round 5), trainer 2 (round 5) and 1 more left before round 10, with older "
    warning = run.describe_left_early(10)
    assert warning.startswith(named)
    assert run.describe_left_early(5) == ""
    asynchronous = run.settings.model_copy(update={"consistency": Consistency(mode="async")})
    assert replace(run, settings=asynchronous).describe_left_early(10) == ""


@pytest.mark.parametrize(("policy", "is_awaited"), [("fail", False), ("wait", True), ("continue", False)])
def test_a_trainer_that_was_done_is_lost_if_its_process_fails_then(policy: LossPolicy, is_awaited: bool):
    run = training(on_trainer_loss=policy)
    run = leave_run(run, 0, leaving(), 1)
    run = leave_run(run, 0, leaving("failed", reason="its process failed with exit code 3"), 2)
    assert (run.record.trainers[0].state, run.record.trainers[0].is_awaited) == ("failed", is_awaited)
    assert run.record.trainers[0].why == "trainer 0 failed: its process failed with exit code 3"
    assert (run.record.failure is not None) == (policy == "fail")


def test_the_round_before_the_start_of_a_trainer_does_not_count_as_received():
    run = training()
    run = replace(run, record=run.record.with_fields(membership=replace(run.record.membership, starts={0: 7})))
    for round_, received in ((6, 0), (7, 7)):
        run = note_heartbeat(run, 0, alive(round_=round_), 1)
        assert run.newest_received == received


# ---------------------------------------------------------------- another incarnation


def with_another_incarnation() -> Run:
    """Return a run whose trainer 1 was lost during training, joined again, and has not declared yet."""
    run = training(on_trainer_loss="wait")
    run = leave_run(run, 1, leaving("failed"), 1)
    return join_run(run, joining("another process", 1), 2)


@pytest.mark.parametrize("policy", ["wait", "continue"])
def test_another_incarnation_that_never_declares_is_given_up(policy: LossPolicy):
    """The pservers do not count on it, and trainers that are done are not missing: nothing else waits for it."""
    run = training(3, on_trainer_loss=policy, min_trainers=2)
    round_timeout, rejoin_timeout = run.settings.round_timeout_seconds, run.settings.rejoin_timeout_seconds
    run = leave_run(run, 2, leaving(), 1)
    run = leave_run(run, 1, leaving("failed"), 1)
    run = join_run(run, joining("another process", 1), 2)
    assert [t.rank for t in run.record.undeclared] == [1]
    run = expire_trainers(run, 2 + round_timeout, 1000)
    assert run.record.trainers[1].is_present
    run = expire_trainers(run, 3 + round_timeout, 1000)
    assert "did not declare a model" in run.record.awaited[0].why
    run = return_stuck_trainers(run, set())
    assert run.record.awaited
    run = expire_trainers(run, 4 + round_timeout + rejoin_timeout, 1000)
    assert isinstance(run.record.failure, TrainerLost)


def test_another_incarnation_is_not_stuck_in_the_round_of_its_predecessor():
    """Otherwise its place would be kept for an incarnation that has ended."""
    run = with_another_incarnation()
    for declare in (False, True):
        if declare:
            run = declare_model(run, 1, model(2))
        run = lose_stuck_trainers(run, [1], TrainerLost("trainer 1 did not come", ranks=[1]), 3)
        assert run.record.members == {0: 1, 1: 2}
    assert run.record.targets == {0: 1, 1: 2}
    run = leave_run(run, 1, leaving(incarnation=2), 5)
    assert run.record.awaited == []


def test_a_trainer_that_is_lost_before_the_start_returns_if_it_has_not_declared():
    run = declare_model(joined(), 0, model())
    run = expire_trainers(run, LEASE + 1, LEASE)
    run = note_heartbeat(run, 1, alive(), LEASE + 2)
    assert (run.record.trainers[1].state, run.missing_ranks) == ("joined", [0, 1])
    with raises_code("stale_trainer", match="trainer 0 was lost: no heartbeat"):
        note_heartbeat(run, 0, alive(), LEASE + 2)
    assert join_run(run, joining("again"), LEASE + 2).record.members == {0: 2, 1: 1}


# ---------------------------------------------------------------------- decisions


TWO = Membership({0: 1, 1: 1})


def test_steps_that_a_pserver_has_lost_are_not_repeated():
    answers = [FrozenRounds(applied=60, opens={0: 31, 1: 30}), FrozenRounds(applied=4, opens={0: 3})]
    assert decide_steps(TWO, {0: 2, 1: 2}, answers, take_over=[0, 1]).starts == {0: 30, 1: 29}
    assert decide_steps(TWO, {0: 2}, answers, take_over=[0], max_delay=2).starts == {0: 28}


def test_a_start_is_kept_for_pservers_that_are_restored():
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17})]
    resumed = Membership({0: 1, 1: 1}, starts={0: 5, 1: 9})
    assert decide_steps(resumed, {0: 1, 1: 2}, answers, take_over=[1]).starts == {0: 5, 1: 17}
    nothing = [FrozenRounds(applied=0)]
    assert decide_steps(resumed, {0: 1, 1: 2}, nothing, take_over=[1]).starts == {0: 5, 1: 9}


def test_a_round_that_was_applied_without_a_rank_is_not_taken_over_by_it():
    """Its earlier incarnation was new in the run, and would have begun with the round after."""
    before = Membership({0: 1, 1: 1, 2: 1}, starts={2: 8}, sets={7: (0, 1)})
    answers = [FrozenRounds(applied=7, participants={7: (0, 1)}), FrozenRounds(applied=6, complete={7: (0, 1)})]
    decided = decide_rounds(before, {0: 1, 1: 1, 2: 2}, answers, take_over=[2])
    assert isinstance(decided, Membership)
    assert (decided.starts, decided.sets) == ({2: 8}, {7: (0, 1), 8: (0, 1, 2)})


def test_without_trainers_all_pservers_end_at_the_same_round():
    """One pserver has applied round 7 with both trainers, and another one has staged it."""
    applied = FrozenRounds(applied=7, participants={7: (0, 1)})
    holds = FrozenRounds(applied=6, complete={7: (0, 1)}, counted={7: (1,)})
    assert decide_rounds(TWO, {}, [applied, holds]) == Membership({}, sets={7: (0, 1)})
    assert decide_rounds(TWO, {}, [applied, FrozenRounds(applied=6)]) == Rollback(6)
    assert decide_rounds(TWO, {}, [applied, applied]) == Membership({})
    counted = FrozenRounds(applied=6, complete={7: (0,)}, counted={7: (0,)})
    assert decide_rounds(TWO, {}, [counted, counted]) == Membership({}, sets={7: (0,)})
