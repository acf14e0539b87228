"""What another life of the coordinator begins with: its own record, or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import StorageFailed, TrainerLost
from ps_protocol.membership import Controls, Membership
from services.coordinator.coordinator import Coordinator
from services.coordinator.run import Run
from services.coordinator.settings import CoordinatorSettings
from services.runtime.checkpoints import Manifest, write_manifest
from services.runtime.storage import open_checkpoint_storage

from .coordinating import begin
from .support import joining, leaving, registration

pytestmark = pytest.mark.asyncio


async def recalled(folder: Path, **settings: Any) -> Coordinator:
    """A life of the coordinator that has taken up what the one before has left, and is gone again."""
    options = {"num_pservers": 2, "num_trainers": 2, "state_dir": folder, **settings}
    async with httpx.AsyncClient() as http:
        coordinator = Coordinator(CoordinatorSettings(**options), http)
        await coordinator.restore()
    coordinator._file.unlock()
    return coordinator


async def planned(folder: Path, **settings: Any) -> Run:
    """A run whose plan was made, by a coordinator that is gone."""
    coordinator = await recalled(folder, **settings)
    begin(coordinator)
    assert coordinator.cluster.start_run_if_complete()
    await coordinator.persist()
    return coordinator.cluster.run


async def test_those_who_cut_the_model_alike_go_on_with_their_disks(tmp_path):
    run = await planned(tmp_path)
    assert (await recalled(tmp_path, resume=True)).cluster.run.name == run.name


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("gone", [[0, 1], [1]])
async def test_who_was_done_is_waited_for_as_well(tmp_path, gone, mode):
    """Else whoever comes first would take the rounds that the run goes on with alone.

    Asynchronous modes have no rounds, and who counts already has no step to begin with: pservers would forget theirs.
    """
    await planned(tmp_path, mode=mode)
    coordinator = await recalled(tmp_path, mode=mode)
    run = coordinator.cluster.run
    run.has_begun = run.has_trained = True
    for rank in gone:
        run.leave(rank, leaving("done", run=run.name, incarnation=run.trainers[rank].incarnation, round=9), 1.0)
    run.membership = Membership({rank: t.incarnation for rank, t in run.trainers.items() if rank not in gone})
    await coordinator.persist()
    run = (await recalled(tmp_path, resume=True, mode=mode)).cluster.run
    counted = (0, 1) if mode == "sync" else [rank for rank in (0, 1) if rank not in gone]
    assert run.targets == {rank: run.trainers[rank].incarnation for rank in counted}
    assert [trainer.rank for trainer in run.awaited] == [0, 1]


@pytest.mark.parametrize("changes", [{"min_block_size": 10**6}, {"num_pservers": 3}, {"slice_parameters": False}])
async def test_those_who_cut_the_model_another_way_begin_with_a_checkpoint(tmp_path, changes):
    run = await planned(tmp_path)
    assert run.plan is not None
    manifest = Manifest(
        run="run0", attempt=0, round=7, consistency=Consistency(), plan=run.plan.to_json(), shards=(),
        created="2026-11-22T05:34:22Z",
    )  # fmt: skip
    write_manifest(open_checkpoint_storage(str(tmp_path / "checkpoints")), manifest)
    for resume in (True, False, True):  # its next lives begin with it, too
        coordinator = await recalled(tmp_path, resume=resume, **changes)
        beginning = coordinator.cluster.beginning
        assert beginning is not None
        assert (beginning.run, beginning.round, coordinator.cluster.run.plan) == ("run0", 7, None)


async def test_what_an_administrator_has_set_stands_on_other_pservers(tmp_path):
    """A paused run would go on, and a frozen layer would be trained again."""
    run = await planned(tmp_path)
    coordinator = await recalled(tmp_path)
    assert run.plan is not None
    at_first = Controls(since=3, frozen=("w",))
    manifest = Manifest(
        run=run.name, attempt=0, round=7, consistency=Consistency(), plan=run.plan.to_json(), shards=(),
        controls=at_first, created="2026-11-22T05:34:22Z",
    )  # fmt: skip
    write_manifest(open_checkpoint_storage(str(tmp_path / "checkpoints")), manifest)
    controls = at_first, Controls(since=9, rates={0: 0.5}, is_paused=True)
    coordinator.cluster.run.membership = Membership({}, controls=controls)
    await coordinator.persist()
    for resume in (True, False, True):
        coordinator = await recalled(tmp_path, resume=resume, num_pservers=3)
    begin(coordinator)
    coordinator.cluster.register_pserver(registration("2", index=2), coordinator.now())
    assert coordinator.cluster.start_run_if_complete()
    installed = coordinator.cluster.installation(0, 1, 7).membership.controls
    assert installed == (Controls(rates={0: 0.5}, is_paused=True),)
    # With nothing but the place it is what was set when the checkpoint was written.
    (tmp_path / "coordinator.json").unlink()
    coordinator = await recalled(tmp_path, resume=True, num_pservers=3)
    assert coordinator.cluster.beginning is not None
    assert coordinator.cluster.beginning.controls == at_first


async def test_a_checkpoint_that_was_undone_and_not_deleted_is_no_beginning(tmp_path):
    run = await planned(tmp_path)
    coordinator = await recalled(tmp_path)
    assert run.plan is not None
    for round_ in (4, 7):
        manifest = Manifest(
            run=run.name, attempt=0, round=round_, consistency=Consistency(), plan=run.plan.to_json(), shards=(),
            created="2026-11-22T05:34:22Z",
        )  # fmt: skip
        write_manifest(open_checkpoint_storage(str(tmp_path / "checkpoints")), manifest)
    coordinator.cluster.run.attempt, coordinator.cluster.run.resume = 1, 5
    await coordinator.persist()
    beginning = (await recalled(tmp_path, resume=True, num_pservers=3)).cluster.beginning
    assert beginning is not None
    assert beginning.round == 4


async def test_a_resumption_that_has_failed_begins_with_the_same_checkpoint_next_time(tmp_path):
    """The run had a plan and had not begun: nothing of it is on any disk."""
    run = await planned(tmp_path)
    place = open_checkpoint_storage(str(tmp_path / "checkpoints"))
    for name, round_ in (("run0", 7), ("another experiment", 9)):
        assert run.plan is not None
        manifest = Manifest(
            run=name, attempt=0, round=round_, consistency=Consistency(), plan=run.plan.to_json(), shards=(),
            created=f"2026-11-22T05:34:2{round_}Z",
        )  # fmt: skip
        write_manifest(place, manifest)
    coordinator = await recalled(tmp_path)
    run = coordinator.cluster.run
    run.resume, run.source = 7, "run0"
    run.fail(TrainerLost("somebody has pressed Ctrl-C", ranks=[0]), 1.0)
    await coordinator.persist()
    for _ in range(2):
        beginning = (await recalled(tmp_path, resume=True)).cluster.beginning
        assert beginning is not None
        assert (beginning.run, beginning.round) == ("run0", 7)


async def test_who_cannot_take_over_what_was_trained_does_not_begin_with_something_else(tmp_path):
    run = await planned(tmp_path)
    coordinator = await recalled(tmp_path)
    coordinator.cluster.run.has_trained = True
    await coordinator.persist()
    with pytest.raises(StorageFailed, match=f"run {run.name} has no checkpoint"):
        await recalled(tmp_path, resume=True, num_pservers=3)


async def test_a_run_that_is_to_begin_with_a_checkpoint_gathers_on(tmp_path):
    """Whoever has joined is known to the next life, whether that is told to resume or not."""
    for resume in (False, True, False):
        coordinator = await recalled(tmp_path, resume=resume)
        joined = coordinator.cluster.join_trainer(joining("a", 0), coordinator.now())
        await coordinator.persist()
        assert (joined.rank, joined.incarnation, joined.run) == (0, 1, coordinator.cluster.run.name)
