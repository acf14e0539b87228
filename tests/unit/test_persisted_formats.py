"""Files of November 2026 stay readable: record, identity, log and checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradpost.export import export_model
from ps_protocol.errors import UnsupportedFormat
from ps_protocol.frames import encode_header
from ps_protocol.membership import Controls, Membership
from services.coordinator.restore import FILE, RecordFile
from services.coordinator.state.losses import evict_trainer
from services.coordinator.state.record import await_trainers
from services.pserver.durable.disk import Disk
from services.pserver.durable.records import PREVIOUS_KEY, Record, append_record, read_records
from services.pserver.durable.update_log import list_segments
from services.pserver.shard import shard_state
from services.runtime.checkpoints import complete_checkpoints
from services.runtime.storage import open_checkpoint_storage

from .coordinator.support import make_cluster, train
from .earlier_files import rewrite_sealed
from .pserver.durable import support
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
    assert storage.newest_update == (6, restored.shard.digest())  # a chain begins where format 1 ends
    support.step(restored.shard, 7, storage)
    newest = storage.newest_update
    storage.close()
    assert newest is not None
    again = support.open_storage(folder, PLAN, index=index, log=folder / f"pserver-{index}" / "log")
    again.find_checkpoints()
    found = again.restore()
    assert found is not None
    assert (found.round, found.chain) == newest


def rewrite_records(log: Path, edit: Callable[[dict[str, str]], None]) -> None:
    """Write the log of a shard again with other metadata."""
    for segment in list_segments(log):
        with segment.path.open("rb") as file:
            records = [(dict(r.frame.metadata), bytes(r.data)) for r in read_records(file.fileno(), segment.mark)
                       if isinstance(r, Record)]  # fmt: skip
        fd, end, chain = os.open(segment.path, os.O_WRONLY | os.O_TRUNC), 0, ""
        for metadata, data in records:
            edit(metadata)
            header = encode_header([("g", "U8", (len(data),))], {**metadata, PREVIOUS_KEY: chain})
            end, chain = append_record(fd, end, segment.mark, [header, data])
        os.close(fd)


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_log_of_a_later_format_is_refused_and_stays_as_it_is(folder: Path) -> None:
    rewrite_records(folder / "pserver-0" / "log", lambda metadata: metadata.update(format="3"))
    before = files_in(folder)
    with pytest.raises(UnsupportedFormat, match="later version"):
        Disk(folder).open(0)
    assert files_in(folder) == before


def test_a_checkpoint_of_a_later_format_is_refused_and_stays_as_it_is(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(shard_state, "FORMAT", 3)
        storage, _ = support.train(tmp_path, 5)
        storage.close()
    before = files_in(tmp_path)
    storage = support.open_storage(tmp_path, PLAN)
    storage.find_checkpoints()
    with pytest.raises(UnsupportedFormat, match="later version"):
        storage.restore()
    assert files_in(tmp_path) == before


def test_a_manifest_of_a_later_format_is_refused_and_not_passed_over(folder: Path) -> None:
    place = open_checkpoint_storage(str(folder / "checkpoints"))
    rewrite_sealed(
        folder / "checkpoints" / "run1" / f"{4:012}" / "manifest.json",
        lambda content: content.update(format=2, unknown="of a later version"),
    )
    with pytest.raises(UnsupportedFormat, match="later version"):
        complete_checkpoints(place, "run1")


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
