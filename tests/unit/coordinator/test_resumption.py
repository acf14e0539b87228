"""The state that a restarted coordinator begins with: its own record, or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import StorageFailed
from ps_protocol.membership import Controls, Membership
from services.coordinator.coordinator import Coordinator
from services.coordinator.reconcile import make_installation
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state.run import Run
from services.runtime.checkpoints import Manifest, write_manifest
from services.runtime.storage import open_checkpoint_storage

from .coordinating import begin
from .support import change_record, leaving, registration


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
