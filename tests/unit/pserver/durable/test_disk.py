"""The state folder of a pserver: its identity, its log, checkpoints that are missing or damaged, and disk errors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ps_protocol.errors import StorageFailed
from services.coordinator.restore import RecordFile
from services.pserver.durable.disk import IDENTITY, Disk, FolderTaken, StateFolder, open_folder
from services.runtime.checkpoints import MANIFEST, round_folder
from services.runtime.storage import DamagedFile, open_checkpoint_storage

from .support import complete_checkpoint, cut, digest_after, flip, install_for, new_shard, plan_for, play, refuse

PLAN = plan_for(1)


def train(folder: Path, rounds: int, checkpoints: tuple[int, ...], url: str = "") -> None:
    """One life of a pserver, with a coordinator that completes its checkpoints."""
    url = url or str(folder / "shared")
    disk, place = Disk(folder / "state", url), open_checkpoint_storage(url)
    disk.open(0)
    disk.write_incarnation(0, 1)
    storage, _ = disk.open_run(install_for(PLAN))
    for file in play(storage, new_shard(PLAN), rounds, checkpoints, place):
        complete_checkpoint(place, PLAN, file)
    storage.close()
    disk.folder.close()


def open_disk(folder: Path, index: int | None = None) -> Disk:
    disk = Disk(folder / "state", str(folder / "shared"))
    disk.open(index)
    return disk


def reopened(folder: Path) -> Disk:
    disk = open_disk(folder, 0)
    disk.write_incarnation(0, 2)
    return disk


@pytest.mark.parametrize("accident", [flip, cut])
def test_an_identity_that_is_damaged_is_not_believed(tmp_path, accident):
    train(tmp_path, 2, (0,))
    path = tmp_path / "state" / "pserver-0" / IDENTITY
    accident(path)
    with pytest.raises(DamagedFile, match="delete this file to continue the run from the newest checkpoint"):
        Disk(tmp_path / "state").open(0)
    path.unlink()
    disk = Disk(tmp_path / "state")  # the lock was let go
    disk.open(0)
    assert (disk.index, disk.previous_incarnation, disk.held) == (0, 0, None)


def test_an_identity_that_cannot_be_read_is_not_damaged(tmp_path):
    train(tmp_path, 2, (0,))
    path = tmp_path / "state" / "pserver-0" / IDENTITY
    path.rename(path.with_suffix(".whole"))
    path.symlink_to("/proc/self/mem")  # reads of it are input/output errors
    with pytest.raises(OSError, match="Input/output error"):
        Disk(tmp_path / "state").open(0)
    path.with_suffix(".whole").rename(path)
    disk = Disk(tmp_path / "state")
    disk.open(0)
    assert disk.previous_incarnation == 1


def find(disk: Disk, newest: int, *, is_complete: bool = True, run: str = "run1") -> list[tuple[int, int]]:
    return disk.find_restorable(None, run, newest, is_complete=is_complete)


@pytest.mark.parametrize("lost", ["identity", "folder"])
@pytest.mark.parametrize("url", ["{}/shared", "memory://{}"])
def test_without_its_disk_it_goes_back_to_a_complete_checkpoint(tmp_path, lost, url):
    url = url.format(tmp_path)
    train(tmp_path, 6, (0, 4), url)
    folder = tmp_path / "state" / "pserver-0"
    if lost == "folder":
        shutil.rmtree(folder)
    else:  # the log is not replayed: its owner is unknown
        (folder / IDENTITY).unlink()
    disk = Disk(tmp_path / "state", url)
    disk.open(0)
    disk.write_incarnation(0, 2)
    assert (find(disk, 4), find(disk, 0)) == ([(4, 4)], [(0, 0)])
    assert find(disk, 4, is_complete=False) == find(disk, 5) == find(disk, 4, run="run2") == []
    storage, restored = disk.open_run(install_for(PLAN, restore=4, attempt=1, incarnation=2))
    assert (restored.round, restored.shard.digest()) == (4, digest_after(PLAN, 4))
    assert storage.find_restorable() == [(4, 4)]


def test_a_folder_that_leads_to_the_round_needs_no_shared_storage(tmp_path, monkeypatch):
    train(tmp_path, 6, (0, 4))
    monkeypatch.setattr(Disk, "find_place", refuse)
    disk = reopened(tmp_path)
    assert find(disk, 5) == [(0, 6)]
    storage, restored = disk.open_run(install_for(PLAN, restore=5, attempt=1, incarnation=2))
    assert restored.round == 5
    storage.close()
    disk.folder.close()
    assert open_disk(tmp_path, 0).held.rounds.applied == 5


def test_damaged_checkpoints_are_no_way_back(tmp_path):
    train(tmp_path, 6, (0, 4, 6))
    shared = tmp_path / "shared"
    [shard] = (shared / round_folder("run1", 6)).glob("*.safetensors")
    flip(shard)
    flip(shared / round_folder("run1", 4) / MANIFEST)
    disk = Disk(tmp_path / "other", str(shared))
    disk.write_incarnation(0, 1)
    assert [find(disk, round_) for round_ in (6, 4, 0)] == [[], [], [(0, 0)]]


def test_the_shared_storage_is_by_default_in_the_state_folder_of_the_coordinator(tmp_path):
    disk = Disk(tmp_path)
    assert disk.find_place() is None
    RecordFile(tmp_path).lock()
    assert disk.find_place().url == str(tmp_path / "checkpoints")
    assert Disk(tmp_path, "memory://elsewhere").find_place().url == "memory://elsewhere"


def test_nothing_is_deleted_for_a_checkpoint_that_is_not_there(tmp_path):
    train(tmp_path, 6, (0,))
    disk = reopened(tmp_path)
    with pytest.raises(StorageFailed, match="there is no checkpoint of round 7 of run run1"):
        disk.open_run(install_for(PLAN, run="run2", restore=7, source="run1", incarnation=2))
    with pytest.raises(StorageFailed, match="there is no checkpoint of round 6 of run run0"):
        disk.open_run(install_for(PLAN, restore=6, source="run0", incarnation=2))
    disk.folder.close()
    again = open_disk(tmp_path, 0)
    assert again.held.rounds.applied == 6


@pytest.mark.parametrize("name", ["pserver-0-of-1.0-1.safetensors", MANIFEST])
def test_a_run_does_not_begin_with_a_damaged_checkpoint(tmp_path, name):
    train(tmp_path, 4, (0, 4))
    flip(tmp_path / "shared" / round_folder("run1", 4) / name)
    disk = Disk(tmp_path / "other", str(tmp_path / "shared"))
    disk.write_incarnation(0, 1)
    with pytest.raises(DamagedFile, match=rf"{name} in .* is damaged"):
        disk.open_run(install_for(PLAN, run="run2", restore=4, source="run1"))


def test_a_run_that_resumes_another_one_begins_its_chain_with_the_shard(tmp_path):
    train(tmp_path, 6, (0, 4))
    disk = reopened(tmp_path)
    storage, restored = disk.open_run(install_for(PLAN, run="run2", restore=4, source="run1", incarnation=2))
    assert storage.newest_update == (4, restored.shard.digest())


def test_a_folder_has_one_holder(tmp_path):
    first = StateFolder(tmp_path, 0)
    with pytest.raises(FolderTaken, match="is in use by another process"):
        StateFolder(tmp_path, 0)
    assert open_folder(tmp_path, None) is None
    StateFolder(tmp_path, 3).close()
    other = open_folder(tmp_path, None)
    assert other.index == 3
    first.close()
    StateFolder(tmp_path, 0).close()


def test_a_later_life_fences_off_an_earlier_one(tmp_path):
    folder = StateFolder(tmp_path, 0)
    folder.write_identity(2, None)
    with pytest.raises(FolderTaken, match="belongs to a later incarnation of pserver 0"):
        folder.write_identity(1, None)


def test_initial_values_of_an_attempt_that_was_given_up_do_not_come_back(tmp_path):
    train(tmp_path, 0, (0,))
    disk = reopened(tmp_path)
    storage, restored = disk.open_run(install_for(PLAN, attempt=1, restore=None, uploader=1))
    assert restored is None
    storage.close()
    disk.folder.close()  # it dies before there are others
    again = open_disk(tmp_path, 0)
    assert again.held is None


def test_a_log_that_cannot_be_deleted_now_does_not_become_the_next_runs(tmp_path, monkeypatch):
    train(tmp_path, 2, (0,))
    disk = reopened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            disk.open_run(install_for(PLAN, run="run2"))
    storage, _ = disk.open_run(install_for(PLAN, run="run2"))
    assert list(disk.folder.log_path.iterdir()) == []
    storage.close()


def test_a_run_that_cannot_be_opened_leaves_no_file_open(tmp_path, monkeypatch):
    train(tmp_path, 2, (0,))
    disk = reopened(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(disk.folder, "write_identity", refuse)
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            with pytest.raises(OSError, match="Input/output error"):
                disk.open_run(install_for(PLAN, restore=2))
        assert len(list(Path("/proc/self/fd").iterdir())) <= num_open + 1  # of the log
    _, restored = disk.open_run(install_for(PLAN, restore=2))
    assert restored.round == 2
