"""A restored shard has the bits that it had, from whatever the disk still holds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from services.pserver.durable.storage import Restored, RunStorage
from services.pserver.durable.update_log import Update, UpdateLog, list_segments
from services.pserver.history import History
from services.pserver.shard import Shard

from .support import digest_after, install_for, new_shard, open_storage, place_in, plan_for, step

PLAN = plan_for(2)


def train(folder: Path, rounds: int, checkpoints: tuple[int, ...] = (0, 4, 8), durability="log") -> RunStorage:
    storage, shard = open_storage(folder, PLAN, durability), new_shard(PLAN)
    storage.snapshot(shard, History())()
    for round_ in range(1, rounds + 1):
        step(shard, round_, storage)
        if round_ in checkpoints:
            storage.snapshot(shard, History({round_: (0,)}))()
    storage.close()
    return storage


def reopen(folder: Path) -> RunStorage:
    storage = open_storage(folder, PLAN)
    storage.find_checkpoints()
    return storage


def segment(folder: Path, base: int) -> Path:
    [path] = (folder / "log-0").glob(f"{base:012}-*.log")
    return path


def assert_restores(folder: Path, round_: int, *, newest: int | None = None, is_short: bool = False) -> Restored:
    restored = reopen(folder).restore(newest)
    assert restored is not None
    assert (restored.round, restored.is_short) == (round_, is_short)
    assert restored.shard.digest() == digest_after(PLAN, round_)
    return restored


def flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 4
    path.write_bytes(content)


def refuse(*_: object) -> None:
    raise PermissionError("read-only")


@pytest.mark.parametrize(("rounds", "durability"), [(0, "log"), (1, "log"), (4, "log"), (11, "log"), (11, "fsync")])
def test_a_shard_is_restored_bit_for_bit(tmp_path, rounds, durability):
    train(tmp_path, rounds, durability=durability)
    restored = assert_restores(tmp_path, rounds)
    assert restored.history.participants.get(rounds) == ((0,) if rounds else None)


def test_any_round_since_the_oldest_checkpoint_can_be_restored(tmp_path):
    train(tmp_path, 11)
    for round_ in range(12):
        assert_restores(tmp_path, round_, newest=round_)
    assert reopen(tmp_path).restore(12) is None
    assert reopen(tmp_path).find_restorable() == [(0, 11)]


@pytest.mark.parametrize("is_torn", [False, True])
def test_the_log_goes_on_after_its_last_whole_record(tmp_path, is_torn):
    train(tmp_path, 10)
    if is_torn:
        path = segment(tmp_path, 8)
        os.truncate(path, path.stat().st_size - 5)
    storage = reopen(tmp_path)
    restored = storage.restore()
    assert restored is not None
    assert restored.round == (9 if is_torn else 10)
    storage.resume(restored.round, storage._install)
    for round_ in range(restored.round + 1, 13):
        step(restored.shard, round_, storage)
    storage.close()
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


@pytest.mark.parametrize(
    ("accident", "round_", "is_short"),
    [
        ("nothing", 12, False),
        ("torn tail", 11, False),  # what was being written was not acknowledged
        ("damaged record", 8, True),
        ("last record before an empty file", 11, True),
        ("no file at all", 8, True),
        ("damaged checkpoint", 12, False),
    ],
)
def test_it_is_known_whether_there_was_more(tmp_path, accident, round_, is_short):
    train(tmp_path, 12, checkpoints=(4, 8))
    newest = segment(tmp_path, 8)
    if accident == "torn tail":
        os.truncate(newest, newest.stat().st_size - 5)
    elif accident == "damaged record":
        flip(newest, 0.1)
    elif accident == "last record before an empty file":
        flip(newest, 0.99)
        newest.with_name(newest.name.replace(f"{8:012}", f"{12:012}")).write_bytes(b"")
    elif accident == "no file at all":
        shutil.rmtree(tmp_path / "log-0")
    elif accident == "damaged checkpoint":
        flip(tmp_path / "checkpoints" / "run1" / f"{8:012}" / "pserver-0-of-2.safetensors", 0.5)
    assert_restores(tmp_path, round_, is_short=is_short)


def test_a_log_of_an_earlier_version_ends_where_it_sets_values(tmp_path, monkeypatch):
    describe = Update.to_metadata
    replaced = {9: ["a.block0"]}
    with monkeypatch.context() as earlier:
        earlier.setattr(
            Update, "to_metadata", lambda self: {**describe(self), "replaced": json.dumps(replaced.get(self.round, []))}
        )
        train(tmp_path, 11)
    storage = reopen(tmp_path)
    assert storage.find_restorable() == [(0, 8)]
    restored = assert_restores(tmp_path, 8, is_short=True)
    storage.resume(8, storage._install)
    step(restored.shard, 9, storage)
    assert reopen(tmp_path).find_restorable() == [(0, 9)]


@pytest.mark.parametrize("name", ["pserver-0-of-2.safetensors", "pserver-0-of-2.json"])
@pytest.mark.parametrize("accident", ["flip", "truncate", "delete"])
def test_a_damaged_checkpoint_costs_replay_and_no_rounds(tmp_path, name, accident):
    train(tmp_path, 11)
    path = tmp_path / "checkpoints" / "run1" / f"{8:012}" / name
    if accident == "flip":
        flip(path, 0.5)
    elif accident == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert_restores(tmp_path, 11)


def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch):
    train(tmp_path, 11)
    storage = open_storage(tmp_path, PLAN)
    read, errors = storage._place.read, [OSError("Input/output error")]

    def read_badly(name: str) -> memoryview:
        if errors:
            raise errors.pop()
        return read(name)

    monkeypatch.setattr(storage._place, "read", read_badly)
    with pytest.raises(OSError, match="Input/output error"):
        storage.find_checkpoints()
    storage.find_checkpoints()
    assert sorted(storage.checkpoints) == [0, 4, 8]


@pytest.mark.parametrize(
    ("began", "expected"),
    [({}, [0, 4, 8]), ({1: 8}, [0, 4, 8]), ({1: 6}, [0, 4]), ({1: 6, 2: 9}, [0, 4]), ({1: None}, [])],
)
def test_checkpoints_of_rounds_that_a_later_attempt_has_undone_are_not_believed(tmp_path, began, expected):
    train(tmp_path, 11)
    install = install_for(PLAN, attempt=len(began), began=began)
    storage = RunStorage(install, 0, tmp_path / "log-0", place_in(tmp_path))
    storage.find_checkpoints()
    assert sorted(storage.checkpoints) == expected
    storage.resume(11, install)
    assert sorted(reopen(tmp_path).checkpoints) == expected


def test_without_a_log_the_newest_checkpoint_is_restored(tmp_path):
    train(tmp_path, 11, durability="none")
    storage = open_storage(tmp_path, PLAN, "none")
    storage.find_checkpoints()
    restored = storage.restore()
    assert restored is not None
    assert restored.round == 8
    assert sorted(storage.find_restorable()) == [(0, 0), (4, 4), (8, 8)]
    flip(tmp_path / "checkpoints" / "run1" / f"{4:012}" / "pserver-0-of-2.safetensors", 0.5)
    assert sorted(storage.find_restorable(newest=3)) == [(0, 0), (4, 4), (8, 8)]
    assert sorted(storage.find_restorable(newest=4)) == [(0, 0), (8, 8)]


def test_the_log_reaches_back_over_as_many_checkpoints_as_are_kept(tmp_path):
    storage = train(tmp_path, 11)
    storage.prune_folder(complete=None)
    assert sorted(storage.checkpoints) == [0, 4, 8]
    assert [segment.base for segment in list_segments(tmp_path / "log-0")] == [4, 8]
    assert reopen(tmp_path).find_restorable() == [(4, 11), (0, 0)]


@pytest.mark.parametrize(
    ("complete", "reported", "kept"),
    [
        (None, (0, 2, 4, 6, 8), [0, 2, 4, 6, 8]),
        ((), (0, 2, 4, 6, 8), [0, 2, 4, 6, 8]),
        ((0,), (0, 2), [0, 2, 4, 6, 8]),
        ((0,), (8,), [0, 2, 4, 6, 8]),
        ((0,), (0, 2, 4, 6), [0, 4, 6, 8]),  # that of round 2 did not come about
        ((2, 0), (), [0, 2, 4, 6, 8]),
        ((6, 2), (), [2, 6, 8]),  # other pservers may be writing theirs of round 8
        ((8, 6), (), [6, 8]),
    ],
)
def test_only_checkpoints_that_no_complete_one_can_need_are_deleted(tmp_path, complete, reported, kept):
    storage = train(tmp_path, 11, checkpoints=(2, 4, 6, 8))
    storage.prune_place(complete, reported)
    assert sorted(storage.checkpoints) == kept
    again = reopen(tmp_path)
    assert sorted(again.checkpoints) == kept


def test_nothing_is_deleted_that_the_run_may_go_back_to_before_it_goes_on(tmp_path):
    storage = train(tmp_path, 11, checkpoints=(2, 4, 8))
    ranges = storage.find_restorable()
    storage.prune_place((8, 4))
    storage.prune_folder(complete=(8, 4))
    assert reopen(tmp_path).find_restorable() == ranges
    restored = storage.restore()
    assert restored is not None
    storage.snapshot(restored.shard, restored.history, is_own=True)  # the run goes on
    storage.close()
    storage.prune_place((8, 4))
    storage.prune_folder(complete=(8, 4))
    assert reopen(tmp_path).find_restorable() == [(4, 11)]


def test_a_checkpoint_that_cannot_be_deleted_now_is_deleted_later(tmp_path, monkeypatch):
    storage = train(tmp_path, 11)
    with monkeypatch.context() as patch:
        patch.setattr(storage._place, "delete", refuse)
        with pytest.raises(PermissionError):
            storage.prune_place((8, 4))
    storage.prune_place((8, 4))
    assert sorted(reopen(tmp_path).checkpoints) == [4, 8]


def train_alone(folder: Path, rounds: int) -> RunStorage:
    """The coordinator names no round: checkpoint 0, and one of its own after every fourth round."""
    storage, shard = open_storage(folder, PLAN), new_shard(PLAN)
    storage.snapshot(shard, History())()
    for round_ in range(1, rounds + 1):
        step(shard, round_, storage)
        if round_ % 4 == 0:
            storage.snapshot(shard, History({round_: (0,)}), is_own=True)()
            storage.prune_folder(complete=None)
    storage.close()
    return storage


def test_a_pserver_that_is_named_no_round_keeps_its_log_short_by_itself(tmp_path):
    storage = train_alone(tmp_path, 30)
    assert [segment.base for segment in list_segments(tmp_path / "log-0")] == [24, 28]
    assert list(storage.checkpoints) == [0]  # of which others may have their part
    assert reopen(tmp_path).find_restorable() == [(24, 30), (0, 0)]
    restored = assert_restores(tmp_path, 30)
    assert restored.history.participants[30] == (0,)


def test_a_damaged_checkpoint_of_its_own_costs_replay_and_no_rounds(tmp_path):
    train_alone(tmp_path, 30)
    flip(tmp_path / "log-0" / f"{28:012}.checkpoint", 0.5)
    assert_restores(tmp_path, 30)


def test_going_back_deletes_checkpoints_of_its_own_that_lie_behind(tmp_path):
    train_alone(tmp_path, 30)
    (tmp_path / "log-0" / f".{28:012}.checkpoint.123").write_bytes(b"half")
    storage = reopen(tmp_path)
    assert storage.restore(26) is not None
    storage.resume(26, storage._install.model_copy(update={"attempt": 1}))
    assert reopen(tmp_path).find_restorable() == [(24, 26), (0, 0)]
    assert [path.name for path in (tmp_path / "log-0").glob("*.checkpoint*")] == [f"{24:012}.checkpoint"]


def test_a_shard_to_which_the_log_reaches_back_stays_though_its_checkpoint_was_never_complete(tmp_path):
    storage, shard = open_storage(tmp_path, PLAN), new_shard(PLAN)
    for round_ in range(18):
        if round_:
            step(shard, round_, storage)
        if round_ in (0, 7, 14):
            storage.snapshot(shard, History())()
            storage.prune_folder(complete=(0,))
    storage.prune_place((14, 0), (0, 7, 14))  # another pserver has no shard of round 7
    [newest] = tmp_path.glob(f"checkpoints/*/{14:012}/*.safetensors")
    newest.write_bytes(bytes(newest.stat().st_size))
    assert_restores(tmp_path, 17)


def test_a_run_that_is_over_keeps_its_last_checkpoint_and_no_log(tmp_path):
    storage = train_alone(tmp_path, 30)
    shard = new_shard(PLAN)
    for round_ in range(1, 31):
        step(shard, round_)
    storage.snapshot(shard, History())()
    storage.is_over = True
    storage.prune_folder(complete=(0,))
    assert reopen(tmp_path).find_restorable() == [(28, 30), (0, 0)]  # until the coordinator says that it is complete
    storage.prune_folder(complete=(30, 0))
    assert sum(path.stat().st_size for path in (tmp_path / "log-0").iterdir()) == 0
    assert_restores(tmp_path, 30)


def test_a_segment_that_is_not_needed_any_more_is_written_over(tmp_path):
    storage, shard = open_storage(tmp_path, PLAN), new_shard(PLAN)
    files = set()
    for round_ in range(13):
        if round_:
            step(shard, round_, storage)
        if round_ % 2 == 0:
            storage.snapshot(shard, History())()
            storage.prune_folder(complete=None)
            files |= {path.stat().st_ino for path in (tmp_path / "log-0").iterdir()}
    assert len(files) == 3  # two for the checkpoints that are kept
    step(shard, 13, storage)
    storage.close()
    assert segment(tmp_path, 12).stat().st_size > storage.log_bytes
    assert_restores(tmp_path, 13)


def test_a_segment_that_was_long_once_does_not_stay_so(tmp_path):
    storage, shard = open_storage(tmp_path, PLAN), new_shard(PLAN)
    storage.snapshot(shard, History())()
    for round_ in range(1, 20):
        step(shard, round_, storage)
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
            log.append(Update(round_, (0,), [], None), [gradient])

    log.begin_segment(0)
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


def test_a_rollback_deletes_later_rounds(tmp_path):
    train(tmp_path, 11)
    storage = reopen(tmp_path)
    restored = storage.restore(6)
    assert restored is not None
    storage.resume(6, storage._install.model_copy(update={"attempt": 1}))
    assert sorted(storage.checkpoints) == [0, 4]
    storage.close()
    storage = reopen(tmp_path)
    assert storage.find_restorable() == [(0, 6)]
    step(Shard(PLAN, 0), 1)  # nothing is shared with another shard
    assert storage.restore(7) is None


def test_a_place_that_does_not_delete_does_not_keep_the_run_from_going_back(tmp_path, monkeypatch):
    train(tmp_path, 11)
    storage = reopen(tmp_path)
    assert storage.restore(6) is not None
    monkeypatch.setattr(storage._place, "delete", refuse)
    storage.resume(6, storage._install.model_copy(update={"attempt": 1, "began": {1: 6}}))
    assert sorted(storage.checkpoints) == [0, 4]
    storage.close()
    storage = RunStorage(storage._install, 0, tmp_path / "log-0", place_in(tmp_path))
    storage.find_checkpoints()
    assert storage.find_restorable() == [(0, 6)]


def test_histories_from_before_there_were_norms_are_read():
    assert History.from_json("[[[7, [0, 1]]], [[7, [1]]], []]") == History({7: (0, 1)}, {7: (1,)})
