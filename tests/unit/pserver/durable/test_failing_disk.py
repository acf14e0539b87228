"""An error of the disk costs what was being written, and nothing that stood there before."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.pserver.durable import update_log
from services.pserver.durable.storage import RunStorage
from services.pserver.history import History
from services.pserver.shard import Shard
from services.runtime import storage as storage_module
from services.runtime.failpoints import arm_failpoints

from .support import new_shard, open_storage, plan_for, step
from .test_storage import assert_restores

PLAN = plan_for(2)


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    arm_failpoints("")


def train(folder: Path, rounds: int, durability: str = "log") -> tuple[RunStorage, Shard]:
    storage, shard = open_storage(folder, PLAN, durability), new_shard(PLAN)
    storage.snapshot(shard, History())()
    for round_ in range(1, rounds + 1):
        step(shard, round_, storage)
    return storage, shard


def failing_once(real: Callable[[int], None]) -> Callable[[int], None]:
    failures = [OSError(errno.EIO, "Input/output error")]

    def call(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    return call


def test_a_record_that_could_not_be_synced_is_taken_back_and_written_again(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 3, "fsync")
    [path] = (tmp_path / "log-0").iterdir()
    size = path.stat().st_size
    monkeypatch.setattr(os, "fdatasync", failing_once(os.fdatasync))
    before = shard.digest()
    with pytest.raises(OSError, match="Input/output error"):
        step(shard, 4, storage)
    assert path.stat().st_size == storage.log_bytes == size
    assert shard.digest() == before
    step(shard, 4, storage)
    assert_restores(tmp_path, 4)


def test_a_log_that_gets_no_new_file_goes_on_in_the_old_one(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 3)
    monkeypatch.setattr(update_log, "sync_folder", failing_once(storage_module.sync_folder))
    write = storage.snapshot(shard, History())
    for round_ in (4, 5):
        step(shard, round_, storage)
    assert [segment.base for segment in update_log.list_segments(tmp_path / "log-0")] == [0]
    assert_restores(tmp_path, 5)
    write()
    assert_restores(tmp_path, 5)


def test_a_log_file_that_is_closed_with_an_error_ends_no_round_twice(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 3)
    real, failures = os.close, [OSError(errno.EIO, "Input/output error")]

    def close(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        if failures and path.endswith(".log"):
            raise failures.pop()

    monkeypatch.setattr(os, "close", close)
    write = storage.snapshot(shard, History())
    assert not failures
    step(shard, 4, storage)
    write()
    assert_restores(tmp_path, 4)


def test_a_log_that_gets_no_file_at_all_is_an_error(tmp_path, monkeypatch):
    storage = open_storage(tmp_path, PLAN)
    monkeypatch.setattr(update_log, "sync_folder", failing_once(storage_module.sync_folder))
    with pytest.raises(OSError, match="Input/output error"):
        storage.snapshot(new_shard(PLAN), History())


@pytest.mark.parametrize("passage", [1, 2])
def test_half_a_checkpoint_does_not_stay(tmp_path, passage):
    storage, shard = train(tmp_path, 3)
    arm_failpoints(f"checkpoint.rename=enospc@{passage}")
    with pytest.raises(OSError, match="No space left"):
        storage.snapshot(shard, History())()
    assert sorted(storage.checkpoints) == [0]
    assert not list((tmp_path / "checkpoints" / "run1").glob(f"{3:012}/*"))
    step(shard, 4, storage)
    assert_restores(tmp_path, 4)
