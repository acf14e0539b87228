"""A restored shard has the bits that it had, from the files that are left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.pserver.durable import update_log
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
    place_in,
    refuse,
    reopen,
    segment,
    segment_bases,
    step,
    train,
    train_alone,
)

SHARD_FILE, DESCRIPTION = "pserver-0-of-2.safetensors", "pserver-0-of-2.json"


def checkpoint(folder: Path, round_: int, name: str = SHARD_FILE) -> Path:
    return folder / "checkpoints" / "run1" / f"{round_:012}" / name


@pytest.mark.parametrize(("rounds", "durability"), [(0, "log"), (4, "log"), (11, "log"), (11, "fsync")])
def test_any_round_since_the_oldest_checkpoint_is_restored_bit_for_bit(tmp_path, rounds, durability):
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


@pytest.mark.parametrize(
    ("accident", "round_", "is_short"),
    [
        pytest.param(lambda folder: None, 12, False, id="none"),
        pytest.param(lambda folder: cut(segment(folder, 8)), 11, False, id="torn tail"),  # it was not acknowledged
        pytest.param(lambda folder: flip(segment(folder, 8), 0.1), 8, True, id="damaged record"),
        pytest.param(empty_the_newest_segment, 11, True, id="damaged last record before an empty file"),
        pytest.param(lambda folder: shutil.rmtree(folder / "log-0"), 8, True, id="no log"),
        pytest.param(lambda folder: flip(checkpoint(folder, 8)), 12, False, id="damaged checkpoint"),
        pytest.param(lambda folder: cut(checkpoint(folder, 8)), 12, False, id="short checkpoint"),
        pytest.param(lambda folder: checkpoint(folder, 8).unlink(), 12, False, id="no checkpoint"),
        pytest.param(lambda folder: flip(checkpoint(folder, 8, DESCRIPTION)), 12, False, id="damaged description"),
        pytest.param(lambda folder: checkpoint(folder, 8, DESCRIPTION).unlink(), 12, False, id="no description"),
    ],
)
def test_the_newest_restorable_round_is_restored_and_known_to_be_short(tmp_path, accident, round_, is_short):
    train(tmp_path, 12)
    accident(tmp_path)
    assert_restores(tmp_path, round_, is_short=is_short)


def test_a_log_of_an_earlier_version_ends_where_it_sets_values(tmp_path, monkeypatch):
    describe = LoggedUpdate.to_metadata
    replaced = {9: ["a.block0"]}
    with monkeypatch.context() as earlier:
        earlier.setattr(
            LoggedUpdate,
            "to_metadata",
            lambda self: {**describe(self), "replaced": json.dumps(replaced.get(self.round, []))},
        )
        train(tmp_path, 11)
    storage = reopen(tmp_path)
    assert storage.find_restorable() == [(0, 8)]
    restored = assert_restores(tmp_path, 8, is_short=True)
    storage.resume(restored, storage._install)
    step(restored.shard, 9, storage)
    assert reopen(tmp_path).find_restorable() == [(0, 9)]


def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch):
    train(tmp_path, 11)
    storage = open_storage(tmp_path, TWO_SHARDS)
    with monkeypatch.context() as patch:
        patch.setattr(storage._place, "read", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            storage.find_checkpoints()
    storage.find_checkpoints()
    assert sorted(storage.checkpoints) == [0, 4, 8]


@pytest.mark.parametrize(
    ("began", "expected"), [({1: 8}, [0, 4, 8]), ({1: 6}, [0, 4]), ({1: 6, 2: 9}, [0, 4]), ({1: None}, [])]
)
def test_checkpoints_that_a_later_attempt_has_rolled_back_are_ignored_and_deleted(tmp_path, began, expected):
    train(tmp_path, 11)
    restored = reopen(tmp_path).restore()
    install = install_for(TWO_SHARDS, attempt=len(began), began=began)
    storage = RunStorage(install, 0, tmp_path / "log-0", place_in(tmp_path))
    storage.find_checkpoints()
    assert sorted(storage.checkpoints) == expected
    storage.resume(restored, install)
    assert sorted(reopen(tmp_path).checkpoints) == expected


def test_without_a_log_the_newest_checkpoint_is_restored(tmp_path):
    train(tmp_path, 11, durability="none")
    storage = open_storage(tmp_path, TWO_SHARDS, "none")
    storage.find_checkpoints()
    assert storage.restore().round == 8
    assert sorted(storage.find_restorable()) == [(0, 0), (4, 4), (8, 8)]
    flip(checkpoint(tmp_path, 4))
    assert sorted(storage.find_restorable(newest=3)) == [(0, 0), (4, 4), (8, 8)]
    assert sorted(storage.find_restorable(newest=4)) == [(0, 0), (8, 8)]


def test_the_log_reaches_back_over_as_many_checkpoints_as_are_kept(tmp_path):
    storage, _ = train(tmp_path, 11)
    storage.prune_folder(complete=None)
    assert sorted(storage.checkpoints) == [0, 4, 8]
    assert segment_bases(tmp_path) == [4, 8]
    assert reopen(tmp_path).find_restorable() == [(4, 11), (0, 0)]


@pytest.mark.parametrize(
    ("complete", "reported", "kept"),
    [
        (None, (0, 2, 4, 6, 8), [0, 2, 4, 6, 8]),
        ((), (0, 2, 4, 6, 8), [0, 2, 4, 6, 8]),
        ((0,), (0, 2), [0, 2, 4, 6, 8]),
        ((0,), (8,), [0, 2, 4, 6, 8]),
        ((0,), (0, 2, 4, 6), [0, 4, 6, 8]),  # the checkpoint of round 2 failed elsewhere
        ((2, 0), (), [0, 2, 4, 6, 8]),
        ((6, 2), (), [2, 6, 8]),  # other pservers may be writing theirs of round 8
        ((8, 6), (), [6, 8]),
    ],
)
def test_only_checkpoints_that_no_complete_one_can_need_are_deleted(tmp_path, complete, reported, kept):
    storage, _ = train(tmp_path, 11, checkpoints=(2, 4, 6, 8))
    storage.prune_place(complete, reported)
    assert sorted(storage.checkpoints) == sorted(reopen(tmp_path).checkpoints) == kept


def test_restorable_rounds_are_kept_until_the_run_goes_on(tmp_path):
    storage, shard = train(tmp_path, 11, checkpoints=(2, 4, 8))
    for is_going_on in (False, True):
        ranges = storage.find_restorable()
        if is_going_on:
            storage.snapshot(shard, History(), is_own=True)
        storage.prune_place((8, 4))
        storage.prune_folder(complete=(8, 4))
        assert reopen(tmp_path).find_restorable() == ([(4, 11)] if is_going_on else ranges)


def test_a_checkpoint_that_cannot_be_deleted_now_is_deleted_later(tmp_path, monkeypatch):
    storage, _ = train(tmp_path, 11)
    with monkeypatch.context() as patch:
        patch.setattr(storage._place, "delete", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            storage.prune_place((8, 4))
    storage.prune_place((8, 4))
    assert sorted(reopen(tmp_path).checkpoints) == [4, 8]


def test_own_checkpoints_keep_the_log_short(tmp_path):
    storage, _ = train_alone(tmp_path)
    assert segment_bases(tmp_path) == [24, 28]
    assert list(storage.checkpoints) == [0]  # other pservers may have their part of it
    assert reopen(tmp_path).find_restorable() == [(24, 30), (0, 0)]
    assert assert_restores(tmp_path, 30).history.participants[30] == (0,)
    flip(tmp_path / "log-0" / f"{28:012}.checkpoint")  # costs replay and no rounds
    assert_restores(tmp_path, 30)


def test_a_rollback_deletes_later_own_checkpoints(tmp_path):
    train_alone(tmp_path)
    (tmp_path / "log-0" / f".{28:012}.checkpoint.123").write_bytes(b"half")
    storage = reopen(tmp_path)
    storage.resume(storage.restore(26), storage._install.model_copy(update={"attempt": 1}))
    assert reopen(tmp_path).find_restorable() == [(24, 26), (0, 0)]
    assert [path.name for path in (tmp_path / "log-0").glob("*.checkpoint*")] == [f"{24:012}.checkpoint"]


def test_an_own_checkpoint_that_was_written_during_a_rollback_is_passed_over(tmp_path):
    train_alone(tmp_path)
    late = tmp_path / "log-0" / f"{28:012}.checkpoint"
    content = late.read_bytes()
    storage = reopen(tmp_path)
    install = storage._install.model_copy(update={"attempt": 1, "began": {1: 26}})
    storage.resume(storage.restore(26), install)
    storage.close()
    late.write_bytes(content)
    again = RunStorage(install, 0, late.parent, place_in(tmp_path))
    again.find_checkpoints()
    assert again.restore().round == 26


def test_a_shard_that_the_log_begins_with_is_kept_though_its_checkpoint_was_never_complete(tmp_path):
    storage, shard = train(tmp_path, 0)
    for round_ in range(1, 18):
        step(shard, round_, storage)
        if round_ in (7, 14):
            storage.snapshot(shard, History())()
            storage.prune_folder(complete=(0,))
    storage.prune_place((14, 0), (0, 7, 14))  # another pserver has no shard of round 7
    flip(checkpoint(tmp_path, 14))
    assert_restores(tmp_path, 17)


def test_a_finished_run_keeps_its_last_checkpoint_and_no_log(tmp_path):
    storage, shard = train_alone(tmp_path)
    storage.snapshot(shard, History())()
    storage.is_over = True
    storage.prune_folder(complete=(0,))
    assert reopen(tmp_path).find_restorable() == [(28, 30), (0, 0)]  # until the checkpoint is complete
    storage.prune_folder(complete=(30, 0))
    assert sum(path.stat().st_size for path in (tmp_path / "log-0").iterdir()) == 0
    assert_restores(tmp_path, 30)


def test_a_segment_that_is_not_needed_any_more_is_written_over(tmp_path):
    storage, shard = train(tmp_path, 0)
    files = set()
    for round_ in range(1, 13):
        step(shard, round_, storage)
        if round_ % 2 == 0:
            storage.snapshot(shard, History())()
            storage.prune_folder(complete=None)
            files |= {path.stat().st_ino for path in (tmp_path / "log-0").iterdir()}
    assert len(files) == 3  # two for the checkpoints that are kept
    step(shard, 13, storage)
    assert segment(tmp_path, 12).stat().st_size > storage.log_bytes
    assert_restores(tmp_path, 13)


def test_a_segment_that_was_long_once_becomes_short_again(tmp_path):
    storage, shard = train(tmp_path, 19, checkpoints=())
    long = storage.log_bytes
    for round_ in range(20, 26):
        storage.snapshot(shard, History())()
        storage.prune_folder(complete=None)
        step(shard, round_, storage)
    assert max(path.stat().st_size for path in (tmp_path / "log-0").iterdir()) < long / 9


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


@pytest.mark.parametrize("deletes", [True, False])
def test_a_rollback_deletes_later_rounds_or_ignores_those_that_it_cannot_delete(tmp_path, monkeypatch, deletes):
    train(tmp_path, 11)
    storage = reopen(tmp_path)
    if not deletes:
        monkeypatch.setattr(storage._place, "delete", refuse)
    storage.resume(storage.restore(6), storage._install.model_copy(update={"attempt": 1, "began": {1: 6}}))
    assert sorted(storage.checkpoints) == [0, 4]
    assert checkpoint(tmp_path, 8).exists() != deletes
    storage = RunStorage(storage._install, 0, tmp_path / "log-0", place_in(tmp_path))
    storage.find_checkpoints()
    assert storage.find_restorable() == [(0, 6)]
    assert storage.restore(7) is None


def test_histories_from_before_there_were_norms_are_read():
    assert History.from_json("[[[7, [0, 1]]], [[7, [1]]], []]") == History({7: (0, 1)}, {7: (1,)})


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
    assert segment(tmp_path, 0).stat().st_size == storage.log_bytes == size
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


@pytest.mark.parametrize("passage", [1, 2])
def test_half_a_checkpoint_is_deleted(tmp_path, arm, passage):
    storage, shard = train(tmp_path, 3)
    arm(f"checkpoint.rename=enospc@{passage}")
    with pytest.raises(OSError, match="No space left"):
        storage.snapshot(shard, History())()
    assert sorted(storage.checkpoints) == [0]
    assert not list(checkpoint(tmp_path, 3).parent.iterdir())
    step(shard, 4, storage)
    assert_restores(tmp_path, 4)
