"""The beginning of a run, which takes as many trainers as join until its last call."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import GradpostError, NotReady
from services.coordinator.state.cluster import Cluster
from services.coordinator.state.joining import declare_model, join_run
from services.coordinator.state.losses import expire_trainers, leave_run, note_heartbeat
from services.coordinator.state.run import Run

from ...raising import raises_code
from .support import LEASE, alive, defaults, joining, leaving, make_cluster, make_run, model

CALL = 5.0


def elastic() -> Run:
    return Run.begin("run1", defaults(2, max_trainers=4, last_call_seconds=CALL), {})


def test_ranks_close_up_before_the_start_when_a_trainer_has_died():
    run = elastic()
    for name in "abc":
        run = join_run(run, joining(name), 0)
    for name in "bc":
        run = join_run(run, joining(name), LEASE)
    run = expire_trainers(run, LEASE + 1, LEASE)
    assert {rank: t.instance for rank, t in run.record.trainers.items()} == {0: "trainer b", 1: "trainer c"}
    assert run.record.members == {0: 2, 1: 2}  # other incarnations than the ones that had these ranks before


def test_a_trainer_that_names_a_world_size_determines_it():
    run = elastic()
    run = join_run(run, joining("a"), 0)
    run = join_run(run, joining("b", 2, world_size=3), 0)
    assert run.record.members == {0: 1, 2: 1}
    assert (run.record.num_trainers, run.missing_ranks) == (3, [0, 1, 2])
    for size in (1, 5):
        with raises_code("world_mismatch", match="WORLD_SIZE of the trainer does not match"):
            join_run(elastic(), joining("c", world_size=size), 0)


def test_a_trainer_that_is_refused_determines_nothing():
    cluster = elastic_cluster()
    with contextlib.suppress(NotReady):
        cluster.join_trainer(joining("a", 0), 0)
    before = cluster.run
    with raises_code("rank_taken"):
        cluster.join_trainer(joining("b", 0, world_size=3), 1)
    assert cluster.run == before


arrivals = st.tuples(
    st.sampled_from("abcdefg"),
    st.sampled_from([None, None, 0, 2, 3]),
    st.sampled_from([None, None, None, 2, 3]),
    st.floats(0, CALL),
)


@given(st.lists(arrivals, max_size=12))
def test_ranks_fit_the_size_of_the_run_in_any_order_of_arrival(steps):
    run, now = elastic(), 0.0
    for name, rank, size, pause in steps:
        now += pause
        run = expire_trainers(run, now, LEASE)
        before = dict(run.record.trainers) if run.record.num_trainers is not None else {}
        with contextlib.suppress(GradpostError):
            run = join_run(run, joining(name, rank, world_size=size), now)
        assert all(rank == trainer.rank for rank, trainer in run.record.trainers.items())
        assert all(run.record.trainers[rank] == trainer for rank, trainer in before.items() if trainer.is_present)
        if run.record.num_trainers is not None:
            assert 2 <= run.record.num_trainers <= 4
            assert all(rank < run.record.num_trainers for rank in run.record.trainers)


def elastic_cluster() -> Cluster:
    return make_cluster(2, max_trainers=4, last_call_seconds=CALL)


def test_a_run_begins_with_the_trainers_that_have_joined_by_the_last_call():
    cluster = elastic_cluster()
    for now, name in enumerate("abc"):
        with pytest.raises(NotReady):
            cluster.join_trainer(joining(name), now)
    cluster.tick(2 + CALL - 0.1)
    with pytest.raises(NotReady) as caught:
        cluster.join_trainer(joining("a"), 2 + CALL - 0.1)
    assert caught.value.facts["waiting_for"] == ["pserver 0", "pserver 1", "the last call for trainers"]
    cluster.tick(2 + CALL)
    answers = [cluster.join_trainer(joining(name), 2 + CALL) for name in "abc"]
    assert [(answer.rank, answer.world_size) for answer in answers] == [(0, 3), (1, 3), (2, 3)]


def test_a_restarted_coordinator_begins_the_last_call_again():
    before, after = elastic_cluster(), elastic_cluster()
    for name in "ab":
        with contextlib.suppress(NotReady):
            before.join_trainer(joining(name), 0.0)
    after.restore(before.describe(), 100.0)
    after.tick(100.0 + CALL - 0.1)
    assert after.run.record.num_trainers is None
    after.tick(100.0 + CALL)
    assert after.run.record.num_trainers == 2


@pytest.mark.parametrize("restart_after", ["", "declaration", "loss", "other declaration"])
def test_a_trainer_that_returns_before_the_start_declares_its_model_again(restart_after: str):
    def restart_if(run: Run, event: str) -> Run:
        return make_run().restore(run.record, LEASE) if event == restart_after else run

    run = join_run(join_run(make_run(), joining("a"), 0), joining("b"), 0)
    run = restart_if(declare_model(run, 0, model()), "declaration")
    run = note_heartbeat(note_heartbeat(run, 0, alive(), 0), 1, alive(), LEASE)
    run = restart_if(expire_trainers(run, LEASE + 1, LEASE), "loss")
    run = restart_if(declare_model(run, 1, model(push_type="int8")), "other declaration")
    with raises_code("model_mismatch", match="trainer 0 and trainer 1 disagree on push_type"):
        note_heartbeat(run, 0, alive(), LEASE + 2)
    assert run.missing_ranks == [0]
    assert declare_model(run, 0, model(push_type="int8")).missing_ranks == []
    alone = note_heartbeat(leave_run(run, 1, leaving(), LEASE + 2), 0, alive(), LEASE + 3)
    assert (alone.record.declaration, alone.missing_ranks) == (model(), [1])
