"""Files of November 2026 stay readable: record, identity, log and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradpost.export import export_model
from ps_protocol.membership import Controls, Membership
from services.coordinator.restore import FILE, RecordFile
from services.coordinator.state.losses import evict_trainer
from services.coordinator.state.record import await_trainers
from services.pserver.durable.disk import Disk
from services.runtime.checkpoints import complete_checkpoints
from services.runtime.storage import open_checkpoint_storage

from .coordinator.support import make_cluster, train
from .earlier_files import rewrite_sealed
from .pserver.durable.support import digest_after, install_for, plan_for

# 6 rounds of the shards in pserver/durable/support.py with checkpoints 0 and 4, and a record of another run.
WRITTEN = Path(__file__).with_name("formats") / "202611"
PLAN = plan_for(2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN, tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize("index", [0, 1])
def test_a_pserver_goes_on_with_what_it_had_written(folder: Path, index: int) -> None:
    disk = Disk(folder)
    disk.open(index)
    assert disk.held is not None
    assert (disk.previous_incarnation, disk.held.run, disk.held.restorable) == (1, "run1", ((0, 6),))
    disk.write_incarnation(index, 2)
    storage, restored = disk.open_run(install_for(PLAN, restore=6, incarnation=2))
    assert restored is not None
    assert (restored.round, restored.shard.digest()) == (6, digest_after(PLAN, 6, index))
    storage.close()


def test_a_coordinator_goes_on_with_what_it_had_written(folder: Path) -> None:
    record = RecordFile(folder).read()
    assert record is not None
    cluster = make_cluster(on_trainer_loss="wait", durability="log")
    cluster.restore(record, 100.0)
    run = cluster.run
    assert (run.record.name, run.record.attempt, run.record.base_round, run.record.began) == ("run1", 1, 7, {1: 7})
    controls = Controls(since=3, rates={0: 0.5}, frozen=("b",))
    assert run.record.membership == Membership({0: 1, 1: 1}, {1: 9}, {9: (0,), 10: (0, 1)}, {9: (0,)}, (controls,))
    assert [trainer.state for trainer in run.record.trainers.values()] == ["declared", "done"]


def test_an_earlier_record_tells_who_was_evicted_by_the_reason_alone(folder: Path) -> None:
    cluster = make_cluster()
    train(cluster)
    cluster.run = evict_trainer(cluster.run, 1, 0)
    RecordFile(folder).write(cluster.describe())
    rewrite_sealed(
        folder / FILE, lambda content: [trainer.pop("was_evicted") for trainer in content["run"]["trainers"]]
    )
    record = RecordFile(folder).read()
    assert record is not None
    assert record.run is not None
    assert [trainer.was_evicted for trainer in record.run.trainers.values()] == [False, True]
    resumed = await_trainers(record.run, is_async=False)
    assert [(trainer.is_awaited, trainer.was_evicted) for trainer in resumed.trainers.values()] == [(True, False)] * 2


def test_checkpoints_are_found_and_exported(folder: Path, tmp_path: Path) -> None:
    place = open_checkpoint_storage(str(folder / "checkpoints"))
    assert [manifest.round for manifest in complete_checkpoints(place, "run1")] == [4, 0]
    export_model(tmp_path / "model.safetensors", place.url, "run1", 0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["a"], torch.arange(130) / 64)
