"""A restored shard has the bits that it had, from the files that are left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.pserver.durable import snapshots, update_log
from services.pserver.durable.storage import RunStorage
from services.pserver.durable.update_log import LoggedUpdate, UpdateLog
from services.pserver.shard.history import History
from services.runtime import storage as storage_module
from services.runtime.failpoints import arm_failpoints

from .support import (
    TWO_SHARDS,
    assert_restores,
    cut,
    flip,
    install_for,
    new_shard,
    open_storage,
    refuse,
    reopen,
    segment,
    segment_bases,
    snapshot,
    step,
    train,
)


@pytest.mark.parametrize(("rounds", "durability"), [(0, "log"), (4, "log"), (11, "log"), (11, "fsync")])
def test_any_round_since_the_oldest_snapshot_is_restored_bit_for_bit(tmp_path, rounds, durability):
    train(tmp_path, rounds, durability=durability)
    restored = assert_restores(tmp_path, rounds)
    assert restored.history.participants.get(rounds) == ((0,) if rounds else None)
    for round_ in range(rounds + 1):
        assert_restores(tmp_path, round_, newest=round_)
    assert reopen(tmp_path).restore(rounds + 1) is None
    assert reopen(tmp_path).find_restorable() == [(0, rounds)]


@pytest.mark.parametrize("is_torn", [False, True])
def test_the_log_goes_on_after_its_last_whole_record(tmp_path, is_torn):
    train(tmp_path, 10)
    if is_torn:
        cut(segment(tmp_path, 8))
    storage = reopen(tmp_path)
    restored = storage.restore()
    assert restored.round == (9 if is_torn else 10)
    storage.resume(restored, storage._install)
    for round_ in range(restored.round + 1, 13):
        step(restored.shard, round_, storage)
    assert_restores(tmp_path, 12)


def test_damage_in_the_log_costs_only_the_rounds_of_its_segment(tmp_path):
    train(tmp_path, 11)
    flip(segment(tmp_path, 4), 0.4)  # in round 6 of 5 to 8
    assert reopen(tmp_path).find_restorable() == [(8, 11), (0, 5)]
    assert reopen(tmp_path).restore(6) is None
    for round_ in (5, 11):
        assert_restores(tmp_path, round_, newest=round_)
    flip(segment(tmp_path, 8), 0.1)  # in round 9 of 9 to 11
    assert reopen(tmp_path).find_restorable() == [(8, 8), (0, 5)]


def empty_the_newest_segment(folder: Path) -> None:
    newest = segment(folder, 8)
    flip(newest, 0.99)
    newest.with_name(newest.name.replace(f"{8:012}", f"{12:012}")).write_bytes(b"")


def delete_log(folder: Path) -> None:
    for base in segment_bases(folder):
        segment(folder, base).unlink()


@pytest.mark.parametrize(
    ("accident", "round_", "is_short"),
    [
        pytest.param(lambda folder: None, 12, False, id="none"),
        pytest.param(lambda folder: cut(segment(folder, 8)), 11, False, id="torn tail"),  # it was not acknowledged
        pytest.param(lambda folder: flip(segment(folder, 8), 0.1), 8, True, id="damaged record"),
        pytest.param(empty_the_newest_segment, 11, True, id="damaged last record before an empty file"),
        pytest.param(delete_log, 8, True, id="no log"),
        pytest.param(lambda folder: flip(snapshot(folder, 8)), 12, False, id="damaged snapshot"),
        pytest.param(lambda folder: cut(snapshot(folder, 8)), 12, False, id="short snapshot"),
        pytest.param(lambda folder: snapshot(folder, 8).unlink(), 12, False, id="no snapshot"),
    ],
)
def test_the_newest_restorable_round_is_restored_and_known_to_be_short(tmp_path, accident, round_, is_short):
    train(tmp_path, 12)
    accident(tmp_path)
    assert_restores(tmp_path, round_, is_short=is_short)


def test_a_snapshot_that_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch):
    train(tmp_path, 11)
    storage = reopen(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "read_file", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            storage.restore()
    assert storage.restore().round == 11


@pytest.mark.parametrize(
    ("began", "expected"), [({1: 8}, 8), ({1: 6}, 4), ({1: 6, 2: 9}, 4), ({1: None}, None)], ids=str
)
def test_snapshots_that_a_later_attempt_has_rolled_back_are_passed_over(tmp_path, began, expected):
    train(tmp_path, 11, durability="none")
    restored = RunStorage(install_for(TWO_SHARDS, "none", began=began), 0, tmp_path / "log-0").restore()
    assert (restored and restored.round) == expected


def test_without_a_log_the_newest_snapshot_is_restored(tmp_path):
    train(tmp_path, 11, durability="none")
    storage = open_storage(tmp_path, TWO_SHARDS, "none")
    assert storage.restore().round == 8
    assert sorted(storage.find_restorable()) == [(0, 0), (4, 4), (8, 8)]
    flip(snapshot(tmp_path, 4))
    assert sorted(storage.find_restorable(newest=3)) == [(0, 0), (4, 4), (8, 8)]
    assert sorted(storage.find_restorable(newest=4)) == [(0, 0), (8, 8)]


def test_the_newest_snapshots_and_the_log_behind_them_are_kept(tmp_path):
    train(tmp_path, 30, checkpoints=tuple(range(4, 30, 4)))
    assert reopen(tmp_path).rounds == [28, 24, 20]  # as many as are kept, before the newest one was written
    assert segment_bases(tmp_path) == [20, 24, 28]
    assert reopen(tmp_path).find_restorable() == [(20, 30)]
    assert assert_restores(tmp_path, 30).history.participants[30] == (0,)
    flip(snapshot(tmp_path, 28))  # costs replay and no rounds
    assert_restores(tmp_path, 30)


def test_complete_checkpoints_are_kept_until_others_are_complete(tmp_path):
    storage, shard = train(tmp_path, 11)
    storage.complete = (4, 0)
    for round_ in (12, 13, 14, 15):
        step(shard, round_, storage)
        storage.snapshot(shard, History())()
        storage.complete = (4, 0) if round_ < 14 else (12, 4)
    assert reopen(tmp_path).find_restorable() == [(13, 15), (12, 12), (4, 4)]


def test_a_snapshot_that_cannot_be_deleted_prevents_no_other(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 11)
    step(shard, 12, storage)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        storage.snapshot(shard, History())()
    assert reopen(tmp_path).rounds == [12, 8, 4, 0]
    step(shard, 13, storage)
    storage.snapshot(shard, History())()
    assert reopen(tmp_path).rounds == [13, 12, 8]


def test_a_rollback_deletes_later_snapshots_and_half_written_ones(tmp_path):
    train(tmp_path, 11)
    half = tmp_path / "log-0" / f".{snapshot(tmp_path, 8).name}.12345678"
    half.write_bytes(b"half")
    storage = reopen(tmp_path)
    storage.resume(storage.restore(6), storage._install.model_copy(update={"attempt": 1}))
    assert reopen(tmp_path).find_restorable() == [(0, 6)]
    assert not half.exists()


def test_a_snapshot_that_was_written_during_a_rollback_is_passed_over(tmp_path):
    train(tmp_path, 11)
    late = snapshot(tmp_path, 8)
    content = late.read_bytes()
    storage = reopen(tmp_path)
    install = storage._install.model_copy(update={"attempt": 1, "began": {1: 6}})
    storage.resume(storage.restore(6), install)
    storage.close()
    late.write_bytes(content)
    assert RunStorage(install, 0, late.parent).restore().round == 6


def test_a_finished_run_keeps_its_last_snapshot_and_no_log(tmp_path):
    storage, shard = train(tmp_path, 11)
    storage.snapshot(shard, History())()
    storage.finish()
    [last] = (path for path in (tmp_path / "log-0").iterdir() if path.stat().st_size)
    assert last == snapshot(tmp_path, 11)
    assert_restores(tmp_path, 11)


def test_a_segment_that_is_not_needed_any_more_is_written_over(tmp_path):
    storage, shard = train(tmp_path, 0)
    files = set()
    for round_ in range(1, 17):
        step(shard, round_, storage)
        if round_ % 2 == 0:
            storage.snapshot(shard, History())()
            files |= {path.stat().st_ino for path in (tmp_path / "log-0").glob("*.log")}
    assert len(files) == 4  # three for the snapshots that are kept
    step(shard, 17, storage)
    assert segment(tmp_path, 16).stat().st_size > storage.log.num_bytes
    assert_restores(tmp_path, 17)


def test_a_segment_that_was_long_once_becomes_short_again(tmp_path):
    storage, shard = train(tmp_path, 19, checkpoints=())
    long = storage.log.num_bytes
    for round_ in range(20, 26):
        storage.snapshot(shard, History())()
        step(shard, round_, storage)
    assert max(path.stat().st_size for path in (tmp_path / "log-0").glob("*.log")) < long / 9


def test_a_log_is_read_to_its_end_while_a_checkpoint_begins_another_file(tmp_path):
    log = UpdateLog(tmp_path, "log")
    gradient = memoryview(bytes(100_000))

    def append(first: int, last: int) -> None:
        for round_ in range(first, last + 1):
            log.append(LoggedUpdate(round_, (0,), [], None), [gradient])

    log.begin_segment(0, "0" * 32)
    append(1, 8)
    log.begin_segment(8)
    log.prune(8)
    append(9, 9)
    log.begin_segment(9)  # into the file of rounds 1 to 8
    append(10, 10)
    updates = UpdateLog(tmp_path, "log").read_after(8)
    assert [next(updates)[0].round, next(updates)[0].round] == [9, 10]
    log.begin_segment(10)
    assert list(updates) == []
    log.close()


@pytest.fixture
def arm() -> Iterator[Callable[[str], None]]:
    yield arm_failpoints
    arm_failpoints("")


def failing_once(real: Callable[[int], None]) -> Callable[[int], None]:
    failures = [OSError(errno.EIO, "Input/output error")]

    def call(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    return call


def test_a_record_that_could_not_be_synced_is_cut_off_and_written_again(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 3, durability="fsync")
    size, before = segment(tmp_path, 0).stat().st_size, shard.digest()
    monkeypatch.setattr(os, "fdatasync", failing_once(os.fdatasync))
    with pytest.raises(OSError, match="Input/output error"):
        step(shard, 4, storage)
    assert segment(tmp_path, 0).stat().st_size == storage.log.num_bytes == size
    assert shard.digest() == before
    step(shard, 4, storage)
    assert_restores(tmp_path, 4)


def test_a_log_that_gets_no_new_file_goes_on_in_the_old_one(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 3)
    monkeypatch.setattr(update_log, "sync_folder", failing_once(storage_module.sync_folder))
    write = storage.snapshot(shard, History())
    for round_ in (4, 5):
        step(shard, round_, storage)
    assert segment_bases(tmp_path) == [0]
    assert_restores(tmp_path, 5)
    write()
    assert_restores(tmp_path, 5)


def test_an_error_while_a_log_file_is_closed_loses_nothing(tmp_path, monkeypatch):
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
    storage = open_storage(tmp_path, TWO_SHARDS)
    monkeypatch.setattr(update_log, "sync_folder", failing_once(storage_module.sync_folder))
    with pytest.raises(OSError, match="Input/output error"):
        storage.snapshot(new_shard(TWO_SHARDS), History())


def test_half_a_snapshot_is_deleted(tmp_path, arm):
    storage, shard = train(tmp_path, 3)
    arm("checkpoint.rename=enospc")
    with pytest.raises(OSError, match="No space left"):
        storage.snapshot(shard, History())()
    assert storage.rounds == [0]
    assert [path.name for path in (tmp_path / "log-0").glob("*safetensors*")] == [snapshot(tmp_path, 0).name]
    step(shard, 4, storage)
    assert_restores(tmp_path, 4)
