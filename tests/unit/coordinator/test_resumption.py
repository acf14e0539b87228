"""The state that a restarted coordinator begins with: its own record, or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import NotReady, StorageFailed
from ps_protocol.membership import Controls, FrozenRounds, HeldRun, Membership
from services.coordinator import shell
from services.coordinator.coordinator import Coordinator
from services.coordinator.reconcile import make_installation
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.shell import FILE, RecordFile
from services.coordinator.state.cluster import Cluster
from services.coordinator.state.joining import declare_model, join_run
from services.coordinator.state.losses import expire_trainers, note_heartbeat
from services.coordinator.state.record import (
    ClusterRecord,
    Decision,
)
from services.coordinator.state.run import Run
from services.runtime.checkpoints import Manifest, write_manifest
from services.runtime.storage import DamagedFile, open_checkpoint_storage

from .coordinating import begin
from .support import (
    LEASE,
    alive,
    beat,
    change_record,
    joining,
    leaving,
    make_cluster,
    model,
    registration,
    train,
)


async def restored(folder: Path, **settings: Any) -> Coordinator:
    """Return a coordinator that has read what an earlier one wrote, and has left the folder again."""
    options = {"num_pservers": 2, "num_trainers": 2, "state_dir": folder, **settings}
    async with httpx.AsyncClient() as http:
        coordinator = Coordinator(CoordinatorSettings(**options), http)
        await coordinator.restore()
    coordinator.file.unlock()
    return coordinator


async def planned(folder: Path, **settings: Any) -> Run:
    """Return a run whose plan was made and recorded."""
    coordinator = await restored(folder, **settings)
    begin(coordinator)
    coordinator.cluster.start_run_if_complete(0)
    assert coordinator.cluster.run.record.plan is not None
    await coordinator.persist()
    return coordinator.cluster.run


def write_checkpoint(folder: Path, run: Run, round_: int, /, **changes: Any) -> None:
    values: dict[str, Any] = {"run": run.record.name, "created": f"2026-11-22T05:34:2{round_}Z", **changes}
    manifest = Manifest(
        attempt=0, round=round_, consistency=Consistency(), plan=run.record.plan.as_json, shards=(), **values
    )  # fmt: skip
    write_manifest(open_checkpoint_storage(str(folder / "checkpoints")), manifest)


def beginning_of(coordinator: Coordinator) -> tuple[str, int] | None:
    beginning = coordinator.cluster.beginning
    return None if beginning is None else (beginning.run, beginning.round)


@pytest.mark.parametrize("changes", [{"min_block_size": 10**6}, {"num_pservers": 3}, {"slice_parameters": False}])
async def test_a_run_with_another_plan_begins_with_a_checkpoint(tmp_path, changes):
    write_checkpoint(tmp_path, await planned(tmp_path), 7, run="run0")
    for resume in (True, False, True):  # and so do the coordinator's next incarnations
        coordinator = await restored(tmp_path, resume=resume, **changes)
        assert (beginning_of(coordinator), coordinator.cluster.run.record.plan) == (("run0", 7), None)


async def test_a_run_with_another_plan_and_no_checkpoint_is_an_error(tmp_path):
    run = await planned(tmp_path)
    coordinator = await restored(tmp_path)
    change_record(coordinator.cluster, has_trained=True)
    await coordinator.persist()
    with pytest.raises(StorageFailed, match=f"run {run.record.name} has no checkpoint"):
        await restored(tmp_path, resume=True, num_pservers=3)


async def test_a_checkpoint_that_was_undone_and_not_deleted_is_not_used(tmp_path):
    run = await planned(tmp_path)
    coordinator = await restored(tmp_path)
    for round_ in (4, 7):
        write_checkpoint(tmp_path, run, round_)
    change_record(coordinator.cluster, attempt=1, base_round=5, began={1: 5})
    await coordinator.persist()
    assert beginning_of(await restored(tmp_path, resume=True, num_pservers=3)) == (run.record.name, 4)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("gone", [[0, 1], [1]])
async def test_a_resumed_run_waits_for_trainers_that_were_done_too(tmp_path, gone, mode):
    """Otherwise the first trainer to come back would train the following rounds alone.

    Asynchronous modes have no rounds, and a trainer that counts already has no step to begin with: pservers would
    forget the steps of those that were done.
    """
    await planned(tmp_path, mode=mode)
    coordinator = await restored(tmp_path, mode=mode)
    cluster = coordinator.cluster
    change_record(cluster, has_begun=True, has_trained=True)
    record = cluster.run.record
    for rank in gone:
        message = leaving("done", run=record.name, incarnation=record.trainers[rank].incarnation, round=9)
        cluster.leave_trainer(rank, message, 1.0)
    members = {rank: t.incarnation for rank, t in cluster.run.record.trainers.items() if rank not in gone}
    change_record(cluster, membership=Membership(members))
    await coordinator.persist()
    record = (await restored(tmp_path, resume=True, mode=mode)).cluster.shown_run.record
    counted = (0, 1) if mode == "sync" else [rank for rank in (0, 1) if rank not in gone]
    assert record.targets == {rank: record.trainers[rank].incarnation for rank in counted}
    assert [trainer.rank for trainer in record.awaited] == [0, 1]


async def test_controls_stay_set_on_other_pservers(tmp_path):
    """Otherwise a paused run would go on, and a frozen layer would be trained again."""
    run = await planned(tmp_path)
    coordinator = await restored(tmp_path)
    at_checkpoint = Controls(since=3, frozen=("w",))
    write_checkpoint(tmp_path, run, 7, controls=at_checkpoint)
    controls = at_checkpoint, Controls(since=9, rates={0: 0.5}, is_paused=True)
    change_record(coordinator.cluster, membership=Membership({}, controls=controls))
    await coordinator.persist()
    for resume in (True, False, True):
        coordinator = await restored(tmp_path, resume=resume, num_pservers=3)
    begin(coordinator)
    coordinator.cluster.register_pserver(registration("2", index=2), coordinator.now())
    coordinator.cluster.start_run_if_complete(0)
    assert coordinator.cluster.run.record.plan is not None
    installed = make_installation(coordinator.cluster, 0, 1, 7).membership.controls
    assert installed == (Controls(rates={0: 0.5}, is_paused=True),)
    (tmp_path / "coordinator.json").unlink()  # the checkpoint alone has the controls of its round
    coordinator = await restored(tmp_path, resume=True, num_pservers=3)
    assert coordinator.cluster.beginning.controls == at_checkpoint


# ---------------------------------------------------------------------- the record


RESTART = 100.0
NO_LEASE = RESTART + LEASE  # all leases from before the restart have expired


def make(num_trainers: int = 2, **changes: Any) -> Cluster:
    return make_cluster(num_trainers, **{"on_trainer_loss": "wait", "durability": "log", **changes})


def make_training(num_trainers: int = 2, **changes: Any) -> Cluster:
    cluster = make(num_trainers, **changes)
    train(cluster)
    return cluster


def rolled_back() -> Cluster:
    """Return a cluster in its second attempt, which waits for one of two trainers."""
    cluster = make_training()
    membership = Membership({0: 1, 1: 1}, {1: 9}, {9: (0,), 10: (0, 1)}, {9: (0,)})
    change_record(cluster, attempt=1, base_round=7, membership=membership)
    cluster.leave_trainer(1, leaving("failed", reason="no data"), 1.0)
    return cluster


def write_and_read(cluster: Cluster, folder: Path) -> ClusterRecord:
    RecordFile(folder).write(cluster.describe())
    record = RecordFile(folder).read()
    assert record is not None
    return record


def restarted(before: Cluster, folder: Path) -> Cluster:
    after = make(before.run.settings.num_trainers)
    after.restore(write_and_read(before, folder), RESTART)
    return after


def resuming(before: Cluster, folder: Path, **changes: Any) -> Cluster:
    """Return a cluster that resumes its run after a lease, unless a process from before the restart reports."""
    after = make(before.run.settings.num_trainers, **changes)
    record = write_and_read(before, folder)
    after.restore(record, RESTART, resume=True)
    return after


def resuming_with_one_done(folder: Path, **changes: Any) -> Cluster:
    """Return a resumed run of three trainers, the last of which was done."""
    before = make_training(3, **changes)
    before.leave_trainer(2, leaving(), 1.0)
    return resuming(before, folder, **changes)


def resumed(cluster: Cluster) -> Cluster:
    cluster.tick(NO_LEASE)
    return cluster


def over(outcome: str, **changes: Any) -> Cluster:
    cluster = make_training(**changes)
    for rank in (0, 1):
        cluster.leave_trainer(rank, leaving(outcome), 1.0)
    return cluster


def awaited(cluster: Cluster) -> list[int]:
    return [trainer.rank for trainer in cluster.run.record.awaited]


# ---------------------------------------------------------------- a restart


def test_a_restarted_coordinator_has_the_recorded_state(tmp_path):
    before = rolled_back()
    record = before.registry.members[0].record.model_copy(update={"restored": 8})
    before.registry = before.registry.restore(record, 0.0, before.registry.replicas[0])
    after = restarted(before, tmp_path)
    run, old = after.run, before.run.record
    assert (run.record.name, run.record.state, run.record.attempt, run.record.base_round) == (
        old.name,
        "training",
        1,
        7,
    )
    assert run.record.change_number == old.change_number + 1  # the last change is made once more
    assert run.record.membership == old.membership
    assert run.record.plan.digest == old.plan.digest
    assert awaited(after) == [1]
    assert after.pserver_infos == before.pserver_infos
    assert after.describe().model_copy(update={"run": None}) == before.describe().model_copy(update={"run": None})


def test_the_round_to_which_every_attempt_went_back_is_recorded(tmp_path):
    before = make_training()
    before.run = before.run.apply_decision(Decision(1, None, 0, Membership({})))
    before.run = before.run.apply_decision(Decision(2, 7, 0, Membership({})))
    before.run = before.run.apply_decision(Decision(3, 5, 0, Membership({})))
    assert make_installation(restarted(before, tmp_path), 0, 9, 5).began == {1: None, 2: 7, 3: 5}


# ---------------------------------------------------------------- a resumption


@pytest.mark.parametrize("policy", ["wait", "continue"])
@pytest.mark.parametrize("sender", ["pserver", "trainer", "trainer joins", "trainer is done"])
def test_if_the_coordinator_alone_was_restarted_the_run_is_as_before(tmp_path, sender, policy):
    cluster = resuming_with_one_done(tmp_path, on_trainer_loss=policy)
    if sender == "pserver":
        cluster.pserver_heartbeat(0, beat(run="run1"), RESTART + 1)
    elif sender == "trainer joins":  # a retry, whose first response was lost
        cluster.join_trainer(joining("0", 0), RESTART + 1)
    elif sender == "trainer is done":
        cluster.leave_trainer(0, leaving(), RESTART + 1)
    else:
        cluster.trainer_heartbeat(0, alive(), RESTART + 1)
    first = "done" if sender == "trainer is done" else "declared"
    assert awaited(cluster) == []
    assert [trainer.state for trainer in cluster.run.record.trainers.values()] == [first, "declared", "done"]
    cluster.trainer_heartbeat(1, alive(), RESTART + 2)
    assert cluster.run.record.state == "training"


@pytest.mark.parametrize("sender", ["pserver", "trainer"])
def test_a_new_process_gets_no_place_while_earlier_processes_may_live(tmp_path, sender):
    cluster = resuming_with_one_done(tmp_path)
    with pytest.raises(NotReady, match="a lease after the newest report"):
        cluster.join_trainer(joining("new"), RESTART + 1)
    if sender == "pserver":
        cluster.pserver_heartbeat(0, beat(run="run1"), RESTART + 2)
    else:
        cluster.trainer_heartbeat(0, alive(), RESTART + 2)
    with pytest.raises(NotReady, match="run1 is under way"):
        cluster.join_trainer(joining("new"), NO_LEASE)
    cluster.trainer_heartbeat(1, alive(), NO_LEASE)
    assert awaited(cluster) == []


def test_if_the_coordinator_alone_was_restarted_a_finished_run_stays_finished(tmp_path):
    after = resuming(over("done", on_trainer_loss="fail"), tmp_path, on_trainer_loss="fail")
    assert after.shown_run.record.state == "training"
    after.pserver_heartbeat(0, beat(run="run1"), RESTART + 1)
    assert after.shown_run is after.run
    assert (after.run.record.state, after.run.record.failure, after.run.record.is_deserted) == ("finished", None, True)


def test_a_failed_run_is_resumed_once_its_pservers_have_ended(tmp_path):
    after = resuming(over("failed", on_trainer_loss="fail"), tmp_path, on_trainer_loss="fail")
    after.pserver_heartbeat(0, beat(run="run1"), RESTART + 1)
    after.tick(NO_LEASE)
    with pytest.raises(NotReady, match="a lease after the newest report"):
        after.join_trainer(joining("new", 0), NO_LEASE)
    after.tick(NO_LEASE + 1)
    assert after.join_trainer(joining("new", 0), NO_LEASE + 1).run == "run1"


def test_new_processes_resume_a_run_that_was_over(tmp_path):
    before = make_training(on_trainer_loss="fail")
    before.leave_trainer(0, leaving("failed"), 1.0)  # and the other trainer has not learned of it
    after = resuming(before, tmp_path)
    held = HeldRun(
        run="run1", attempt=0, plan=before.run.record.plan.digest, rounds=FrozenRounds(applied=4)
    )  # fmt: skip
    for index in (0, 1):
        answer = after.register_pserver(registration(f"new{index}", index=index, previous=1, held=held), RESTART + 1)
        after.pserver_heartbeat(index, beat(answer.incarnation), RESTART + 2)
    assert after.trainer_heartbeat(1, alive(), RESTART + 2).state == "failed"
    joined = after.join_trainer(joining("new", 0), NO_LEASE)
    after.trainer_heartbeat(1, alive(), NO_LEASE)
    after.trainer_heartbeat(0, alive(joined.incarnation), NO_LEASE)
    assert (after.run.record.name, after.run.record.state, awaited(after)) == ("run1", "training", [])


def test_a_resumed_run_that_continues_without_lost_trainers_begins_after_the_rejoin_timeout(tmp_path):
    run = resumed(resuming_with_one_done(tmp_path, on_trainer_loss="continue", rejoin_timeout_seconds=30.0)).run
    run = join_run(run, joining("new", 0), NO_LEASE + 1)
    run = declare_model(run, 0, model(2))
    assert [trainer.rank for trainer in run.record.awaited] == [1, 2]
    run = note_heartbeat(run, 0, alive(2), NO_LEASE + 31)
    run = expire_trainers(run, NO_LEASE + 31, LEASE)
    assert (run.record.awaited, run.record.is_over) == ([], False)


# ---------------------------------------------------------------- the file


def test_a_record_is_made_and_written_only_if_something_has_changed(tmp_path, monkeypatch):
    """The plan of a large model is megabytes of JSON, and every heartbeat may have changed something."""
    cluster, file = rolled_back(), RecordFile(tmp_path)
    assert file.read() is None
    file.write(cluster.describe())
    (tmp_path / FILE).unlink()
    with monkeypatch.context() as patch:
        patch.delattr(shell, "seal")
        file.write(cluster.describe())
    assert not (tmp_path / FILE).exists()
    cluster.run = cluster.run.with_change()
    file.write(cluster.describe())
    written = RecordFile(tmp_path).read()
    assert written.run.change_number == cluster.run.record.change_number


@pytest.mark.parametrize("accident", ["a digit", "cut", "empty"])
def test_a_damaged_record_is_refused(tmp_path, accident):
    write_and_read(rolled_back(), tmp_path)
    path = tmp_path / FILE
    data = path.read_bytes()
    damaged = {"a digit": data.replace(b'"attempt":1', b'"attempt":3'), "cut": data[:-9], "empty": b""}[accident]
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(DamagedFile, match=r"coordinator\.json is damaged"):
        RecordFile(tmp_path).read()
