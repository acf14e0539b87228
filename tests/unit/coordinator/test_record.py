"""A coordinator that comes back is what it was, as far as it decides anything; a damaged record is not believed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import NotReady, TrainerLost
from ps_protocol.membership import Controls, Membership
from ps_protocol.messages import FrozenRounds, HeldRun
from ps_protocol.plan import SlicePlan
from services.coordinator import record as record_module
from services.coordinator.cluster import Cluster
from services.coordinator.record import (
    FILE,
    Beginning,
    ClusterRecord,
    RecordFile,
    describe_cluster,
    restore_cluster,
    restore_incarnations,
    resume_run,
)
from services.runtime import storage
from services.runtime.checkpoints import Manifest
from services.runtime.storage import DamagedFile

from ..earlier_files import rewrite_sealed
from .support import LEASE, alive, beat, join_all, joining, leaving, make_cluster, model, registration, train

NO_LEASE = 100.0 + LEASE  # when nobody has a lease any more from before a coordinator that came back at 100


def training() -> Cluster:
    """Two trainers, one of which was lost and is waited for, in the second attempt."""
    cluster = make_cluster(on_trainer_loss="wait", durability="log")
    train(cluster)
    run = cluster.run
    run.attempt, run.resume = 1, 7
    run.membership = Membership({0: 1, 1: 1}, {1: 9}, {9: (0,), 10: (0, 1)}, {9: (0,)})
    cluster.leave_trainer(1, leaving("failed", reason="no data"), 1.0)
    return cluster


def through_the_disk(cluster: Cluster, folder: Path) -> ClusterRecord:
    RecordFile(folder).write(describe_cluster(cluster))
    record = RecordFile(folder).read()
    assert record is not None
    return record


def test_what_was_written_is_what_is_restored(tmp_path):
    before, after = training(), make_cluster(on_trainer_loss="wait", durability="log")
    before.registry.members[0].restored = 8
    restore_cluster(after, through_the_disk(before, tmp_path), 100.0)
    run, old = after.run, before.run
    assert (run.name, run.state, run.attempt, run.resume) == (old.name, "training", 1, 7)
    assert run.number == old.number + 1  # the last change is made once more
    assert run.membership == old.membership
    assert run.plan is not None
    assert old.plan is not None
    assert run.plan.digest == old.plan.digest
    assert [t.rank for t in run.awaited] == [1]
    assert after.pserver_infos == before.pserver_infos
    assert describe_cluster(after).model_copy(update={"run": None}) == describe_cluster(before).model_copy(
        update={"run": None}
    )


def test_a_record_that_has_not_changed_is_neither_made_nor_written_again(tmp_path, monkeypatch):
    """The plan of a large model is megabytes of JSON, and every heartbeat may have changed something."""
    cluster, file = training(), RecordFile(tmp_path)
    file.write(describe_cluster(cluster))
    with monkeypatch.context() as patch:
        patch.delattr(SlicePlan, "to_json")
        patch.delattr(record_module, "seal")
        file.write(describe_cluster(cluster))
    cluster.run.number += 1
    file.write(describe_cluster(cluster))
    written = RecordFile(tmp_path).read()
    assert written is not None
    assert written.run is not None
    assert written.run.number == cluster.run.number


def test_rounds_of_a_trainer_that_is_done_are_not_taken_again_after_a_restart(tmp_path):
    """It sends no heartbeats any more, so that nothing else says how far it had got."""
    before, after = make_cluster(on_trainer_loss="wait", durability="log"), make_cluster(on_trainer_loss="wait")
    train(before)
    before.leave_trainer(1, leaving("done", round=40), 1.0)
    restore_cluster(after, through_the_disk(before, tmp_path), 100.0)
    assert after.run.find_departed_after(20) == [1]
    assert after.run.find_departed_after(40) == []


def test_it_is_known_which_rounds_every_attempt_has_undone(tmp_path):
    before, after = make_cluster(durability="log"), make_cluster(durability="log")
    train(before)
    before.run.apply_decision(replace(before.run.decision, attempt=1, resume=None))
    before.run.apply_decision(replace(before.run.decision, attempt=2, resume=7))
    before.run.pending = replace(before.run.decision, attempt=3, resume=5)
    restore_cluster(after, through_the_disk(before, tmp_path), 100.0)
    assert after.installation(0, 9, 5).began == {1: None, 2: 7, 3: 5}


def test_of_a_record_from_before_that_was_written_the_newest_attempt_is_known(tmp_path):
    record = through_the_disk(training(), tmp_path)
    assert record.run is not None
    old = record.model_copy(update={"run": record.run.model_copy(update={"began": {}})})
    after = make_cluster(durability="log")
    restore_cluster(after, old, 100.0)
    assert after.run.began == {1: 7}


def test_everybodys_lease_begins_anew_and_then_counts(tmp_path):
    after = make_cluster(on_trainer_loss="wait", durability="log")
    restore_cluster(after, through_the_disk(training(), tmp_path), 100.0)
    after.expire(105.0)
    assert sorted(after.registry.members) == [0, 1]
    after.pserver_heartbeat(0, beat(run="run1"), 108.0)
    after.expire(111.0)
    assert sorted(after.registry.members) == [0]
    assert sorted(after.run.members) == []


def test_no_trainer_is_cut_off_from_a_pserver_that_the_coordinator_has_not_heard_since_its_restart(tmp_path):
    cluster = make_cluster(on_trainer_loss="wait", durability="log")
    restore_cluster(cluster, through_the_disk(training(), tmp_path), 100.0)
    cut_off = alive().model_copy(update={"unreachable": {0: (1, LEASE + 1)}})
    cluster.trainer_heartbeat(0, cut_off, 100.1)
    assert not cluster.run.trainers[0].is_stuck
    later = 100.0 + LEASE + 0.1
    cluster.trainer_heartbeat(0, cut_off, later)  # the lease of the pserver has run out, and it is not removed yet
    assert not cluster.run.trainers[0].is_stuck
    cluster.pserver_heartbeat(0, beat(run=cluster.run.name), later)
    cluster.trainer_heartbeat(0, cut_off, later)
    assert cluster.run.trainers[0].is_stuck


def test_later_lives_get_higher_numbers(tmp_path):
    after = make_cluster(on_trainer_loss="wait", durability="log")
    restore_cluster(after, through_the_disk(training(), tmp_path), 100.0)
    after.expire(200.0)
    assert after.register_pserver(registration("new", index=0), 200.0).incarnation == 2


def test_a_failure_stays_one(tmp_path):
    before, after = training(), make_cluster()
    before.run.fail(TrainerLost("trainer 1 failed: no data", ranks=[1]), 2.0)
    restore_cluster(after, through_the_disk(before, tmp_path), 100.0)
    assert after.run.is_over
    assert isinstance(after.run.failure, TrainerLost)
    assert (after.run.failure.detail, after.run.failure.facts["ranks"]) == ("trainer 1 failed: no data", [1])


def test_a_run_is_resumed_whatever_its_end_was(tmp_path):
    before, after = training(), make_cluster(on_trainer_loss="wait", durability="log")
    before.run.fail(TrainerLost("trainer 1 failed: no data", ranks=[1]), 2.0)
    resume_run(after, through_the_disk(before, tmp_path), 100.0)
    assert (after.run.state, after.run.failure, after.run.attempt) == ("training", None, 1)
    assert [t.rank for t in after.run.awaited] == [0, 1]
    assert after.waiting_for == ["trainer 0", "trainer 1"]
    after.expire(100.0 + LEASE + 1)  # until then a pserver might be alive
    assert after.waiting_for == ["pserver 0", "pserver 1", "trainer 0", "trainer 1"]


def test_a_run_that_had_not_begun_begins_with_the_checkpoint_that_it_was_to_begin_with(tmp_path):
    before, after = make_cluster(on_trainer_loss="wait"), make_cluster(on_trainer_loss="wait")
    join_all(before)
    for index in (0, 1):
        before.register_pserver(registration(str(index), index=index), 0.0)
    assert before.start_run_if_complete()
    before.run.resume, before.run.source = 20, "run0"
    resume_run(after, through_the_disk(before, tmp_path), 100.0)
    assert (after.run.state, after.run.resume, after.run.source) == ("gathering", 20, "run0")
    install = after.installation(0, 9, after.run.resume)
    assert (install.restore, install.source) == (20, "run0")


def test_a_run_that_had_begun_goes_on_with_what_pservers_have_themselves(tmp_path):
    before, after = training(), make_cluster(on_trainer_loss="wait", durability="log")
    before.run.source = "run0"
    resume_run(after, through_the_disk(before, tmp_path), 100.0)
    assert after.run.source is None


def resumed(tmp_path: Path, **changes: Any) -> Cluster:
    """Three trainers, of which the last was done."""
    before, after = make_cluster(3, durability="log", **changes), make_cluster(3, durability="log", **changes)
    train(before)
    before.leave_trainer(2, leaving(), 1.0)
    record = through_the_disk(before, tmp_path)
    restore_incarnations(after, record)
    resume_run(after, record, 100.0)
    return after


def test_everybody_is_awaited_when_a_run_is_resumed_even_who_was_done(tmp_path):
    cluster = resumed(tmp_path, on_trainer_loss="wait")
    assert [t.rank for t in cluster.run.awaited] == [0, 1, 2]
    cluster.join_trainer(joining("new", 0), NO_LEASE)
    cluster.trainer_heartbeat(1, alive(), NO_LEASE + 1)  # the others' machines live
    assert [t.rank for t in cluster.run.awaited] == [2]


@pytest.mark.parametrize("heard", ["pserver", "trainer"])
def test_a_stranger_gets_nobodys_place_while_those_of_before_may_live(tmp_path, heard):
    """Scripts that wait for the next run ask four times a second; who trains is heard once."""
    cluster = resumed(tmp_path, on_trainer_loss="wait")
    with pytest.raises(NotReady, match="are still alive must report first"):
        cluster.join_trainer(joining("stranger"), 101.0)
    if heard == "pserver":
        cluster.pserver_heartbeat(0, beat(run="run1"), 102.0)
    else:
        cluster.trainer_heartbeat(0, alive(), 102.0)
    with pytest.raises(NotReady, match="run1 is under way"):
        cluster.join_trainer(joining("stranger"), NO_LEASE)
    cluster.trainer_heartbeat(1, alive(), NO_LEASE)
    assert cluster.run.awaited == []


def failed(tmp_path):
    """The record of a run that was trained and that all scripts have left as failed."""
    before = make_cluster(durability="log")
    train(before)
    for rank in (0, 1):
        before.leave_trainer(rank, leaving("failed"), 1.0)
    return through_the_disk(before, tmp_path)


def test_nobody_is_waited_for_who_is_known_to_be_gone(tmp_path):
    """All scripts have left, and other pservers have the folders of those that were there."""
    after, record = make_cluster(durability="log"), failed(tmp_path)
    resume_run(after, record, 100.0)
    for index in (0, 1):
        with pytest.raises(NotReady):
            after.join_trainer(joining("new", 0), 100.5)
        after.register_pserver(registration(f"new{index}", index=index, previous=1), 101.0)
    assert after.join_trainer(joining("new", 0), 101.0).run == "run1"


def test_after_a_run_that_failed_and_is_served_still_the_next_begins_with_its_checkpoint(tmp_path):
    after, record = make_cluster(durability="log"), failed(tmp_path)
    assert record.run is not None
    manifest = Manifest(
        run="run1", attempt=0, round=20, consistency=Consistency(), plan=record.run.plan or {}, shards=(),
        created="2026-11-22T10:00:00+00:00",
    )  # fmt: skip
    resume_run(after, record, 100.0, beginning=manifest)
    after.pserver_heartbeat(0, beat(run="run1"), 101.0)
    assert after.run.state == "failed"
    joined = after.join_trainer(joining("new", 0), 102.0)
    assert joined.run != "run1"
    assert after.beginning == manifest
    assert describe_cluster(after).beginning == Beginning(run="run1", round=20, controls=Controls())


@pytest.mark.parametrize("policy", ["wait", "continue"])
@pytest.mark.parametrize("heard", ["pserver", "trainer", "trainer joins", "trainer is done"])
def test_a_run_is_what_it_was_if_only_the_coordinator_was_started_again(tmp_path, heard, policy):
    cluster = resumed(tmp_path, on_trainer_loss=policy)
    if heard == "pserver":
        cluster.pserver_heartbeat(0, beat(run="run1"), 101.0)
    elif heard == "trainer joins":  # the answer was lost
        cluster.join_trainer(joining("0", 0), 101.0)
    elif heard == "trainer is done":
        cluster.leave_trainer(0, leaving(), 101.0)
    else:
        cluster.trainer_heartbeat(0, alive(), 101.0)
    run = cluster.run
    assert run.awaited == []
    assert {t.rank: t.state for t in run.trainers.values()} == {
        0: "done" if heard == "trainer is done" else "declared",
        1: "declared",
        2: "done",
    }
    cluster.trainer_heartbeat(1, alive(), 102.0)
    assert run.state == "training"


def test_new_processes_resume_what_was_over(tmp_path):
    before, after = make_cluster(on_trainer_loss="fail", durability="log"), make_cluster(durability="log")
    train(before)
    before.leave_trainer(0, leaving("failed"), 1.0)  # and the other has not heard of it
    record = through_the_disk(before, tmp_path)
    restore_incarnations(after, record)
    resume_run(after, record, 100.0)
    held = HeldRun(
        run="run1", attempt=0, plan=before.run.plan.digest, rounds=FrozenRounds(applied=4), restorable=((0, 4),)
    )  # fmt: skip
    for index in (0, 1):
        answer = after.register_pserver(registration(f"new{index}", index=index, previous=1, held=held), 101.0)
        after.pserver_heartbeat(index, beat(answer.incarnation), 102.0)
    after.trainer_heartbeat(1, alive(), 102.0)
    assert after.run.state == "training"
    joined = after.join_trainer(joining("new", 0), NO_LEASE)
    after.trainer_heartbeat(0, alive(joined.incarnation), NO_LEASE)
    assert (after.run.name, after.run.state, after.run.awaited) == ("run1", "training", [])


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_a_run_that_was_over_stays_so_if_only_the_coordinator_was_started_again(tmp_path, end):
    before, after = make_cluster(on_trainer_loss="fail"), make_cluster(on_trainer_loss="fail")
    train(before)
    for rank in (0, 1):
        before.leave_trainer(rank, leaving("done" if end == "finished" else "failed"), 1.0)
    resume_run(after, through_the_disk(before, tmp_path), 100.0)
    assert after.run.state == "training"
    after.pserver_heartbeat(0, beat(run="run1"), 101.0)
    assert (after.run.state, after.run.failure is None, after.run.is_deserted) == (end, end == "finished", True)


def test_who_comes_when_a_run_is_resumed_and_is_silent_before_it_takes_part_ends_nothing(tmp_path):
    """Its machine is busy with imports; the policy is for those who have taken part."""
    cluster = resumed(tmp_path, on_trainer_loss="fail")
    joined = cluster.join_trainer(joining("new", 0), NO_LEASE)
    cluster.expire(NO_LEASE + 1 + LEASE)
    assert (cluster.run.is_over, [t.rank for t in cluster.run.awaited]) == (False, [0, 1, 2])
    cluster.trainer_heartbeat(0, alive(joined.incarnation), NO_LEASE + 2 + LEASE)
    cluster.run.declare(0, model(joined.incarnation))
    assert [t.rank for t in cluster.run.awaited] == [1, 2]
    cluster.expire(NO_LEASE + 3 + 3 * LEASE)
    assert isinstance(cluster.run.failure, TrainerLost)


def test_who_is_done_is_so_though_it_counted_as_lost(tmp_path):
    """Its farewell is all that still comes: the heartbeats have ended before it."""
    cluster = training()
    cluster.expire(LEASE + 2)
    assert [t.rank for t in cluster.run.awaited] == [0, 1]
    cluster.leave_trainer(0, leaving(), LEASE + 3)
    assert [t.rank for t in cluster.run.awaited] == [1]
    assert cluster.run.trainers[0].state == "done"
    cluster.leave_trainer(1, leaving(), LEASE + 3)
    assert cluster.run.state == "finished"


def test_all_begin_together_when_a_run_is_resumed_that_goes_on_without_the_lost(tmp_path):
    run = resumed(tmp_path, on_trainer_loss="continue", rejoin_timeout_seconds=30.0).run
    run.join(joining("new", 0), 101.0)
    run.declare(0, model(2))
    assert [t.rank for t in run.awaited] == [1, 2]
    run.heartbeat(0, alive(2), 131.0)
    run.expire(131.0, LEASE)
    assert (run.awaited, run.is_over) == ([], False)


def test_what_trainers_have_ended_is_not_forgotten(tmp_path):
    before, after = training(), make_cluster(on_trainer_loss="wait", durability="log")
    assert not before.run.has_trained
    before.trainer_heartbeat(0, alive(round_=8).model_copy(update={"attempt": 1}), 2.0)
    restore_cluster(after, through_the_disk(before, tmp_path), 100.0)
    assert after.run.has_trained


def test_before_there_is_a_plan_only_the_numbers_are_kept(tmp_path):
    before, after = make_cluster(), make_cluster()
    before.register_pserver(registration("0", index=0), 0.0)
    record = through_the_disk(before, tmp_path)
    assert record.run is None
    restore_cluster(after, record, 100.0)
    assert after.run.state == "gathering"
    assert sorted(after.registry.members) == [0]


def test_while_a_run_gathers_those_who_are_here_keep_their_places(tmp_path):
    before, after = make_cluster(), make_cluster()
    before.join_trainer(joining("a", 0), 0.0)
    before.join_trainer(joining("b", 1), 0.0)
    before.join_trainer(joining("b", 1), 0.0)
    before.run.declare(1, model())
    restore_cluster(after, through_the_disk(before, tmp_path), 100.0)
    run = after.run
    assert (run.name, run.state, run.plan, run.started_at) == ("run1", "gathering", None, None)
    assert {rank: trainer.state for rank, trainer in run.trainers.items()} == {0: "joined", 1: "declared"}
    run.declare(0, model())
    run.declare(1, model())  # once more, because the answer was lost
    for index in (0, 1):
        after.register_pserver(registration(str(index), index=index), 101.0)
    assert after.start_run_if_complete(101.0)


def test_every_life_has_declared_as_itself(tmp_path):
    before, after = make_cluster(on_trainer_loss="wait"), make_cluster(on_trainer_loss="wait")
    train(before)
    before.leave_trainer(1, leaving("failed"), 1.0)
    before.join_trainer(joining("another life", 1), 2.0)
    before.run.declare(1, model(2))
    restore_cluster(after, through_the_disk(before, tmp_path), 100.0)
    after.run.declare(1, model(2))  # the answer was lost
    after.run.declare(0, model(1))


def test_there_may_be_nothing(tmp_path):
    assert RecordFile(tmp_path).read() is None


def test_it_is_written_only_when_something_has_changed(tmp_path):
    file, cluster = RecordFile(tmp_path), training()
    file.write(describe_cluster(cluster))
    (tmp_path / FILE).unlink()
    file.write(describe_cluster(cluster))
    assert not (tmp_path / FILE).exists()
    cluster.run.attempt += 1
    file.write(describe_cluster(cluster))
    assert (tmp_path / FILE).exists()


def test_what_may_have_been_written_is_written_over(tmp_path, monkeypatch):
    """The new record is there, though the disk said that it is not."""
    file, cluster = RecordFile(tmp_path), training()
    before = describe_cluster(cluster)
    file.write(before)
    cluster.run.attempt += 1

    def fail(folder: Path) -> None:
        raise OSError(f"{folder} is broken")

    with monkeypatch.context() as disk:
        disk.setattr(storage, "sync_folder", fail)
        with pytest.raises(OSError, match="is broken"):
            file.write(describe_cluster(cluster))
    recorded = RecordFile(tmp_path).read()
    file.write(before)
    assert recorded != RecordFile(tmp_path).read() == ClusterRecord.model_validate_json(before.model_dump_json())


@pytest.mark.parametrize("accident", ["a digit", "cut", "empty"])
def test_a_damaged_record_is_not_believed(tmp_path, accident):
    through_the_disk(training(), tmp_path)
    path = tmp_path / FILE
    data = path.read_bytes()
    damaged = {"a digit": data.replace(b'"attempt":1', b'"attempt":3'), "cut": data[:-9], "empty": b""}[accident]
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(DamagedFile, match=r"coordinator\.json is damaged"):
        RecordFile(tmp_path).read()


def test_a_record_of_an_earlier_version_is_read_unless_it_sets_values(tmp_path):
    cluster, path = training(), tmp_path / FILE
    controls = Controls(since=3, rates={0: 0.5}, frozen=("w",))
    cluster.run.membership = replace(cluster.run.membership, controls=(controls,))
    record = through_the_disk(cluster, tmp_path)
    rewrite_sealed(path, lambda content: content["run"]["controls"][0].update(replaced={}))
    assert RecordFile(tmp_path).read() == record
    rewrite_sealed(path, lambda content: content["run"]["controls"][0].update(replaced={"w": "5e1f"}))
    with pytest.raises(DamagedFile, match=r"another version: run\.membership\.controls\.0\.replaced: Extra inputs"):
        RecordFile(tmp_path).read()
