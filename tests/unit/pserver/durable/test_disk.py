"""The state folders of pservers: which one a process opens, its identity and log, and checkpoints that are damaged."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import StorageFailed
from ps_protocol.frames import encode_header
from services.coordinator.shell import RecordFile
from services.pserver.durable import storage as run_storage
from services.pserver.durable.disk import (
    IDENTITY,
    Disk,
    FolderTaken,
    StateFolder,
    list_folders,
    open_folder,
    open_standby_folder,
)
from services.pserver.durable.records import MARK_BYTES, PREVIOUS_KEY, Ending, Record, append_record, read_records
from services.pserver.durable.storage import Restored
from services.pserver.shard.shard_state import History
from services.runtime.checkpoints import MANIFEST, round_folder
from services.runtime.storage import DamagedFile, open_checkpoint_storage

from .support import alter, complete_checkpoint, cut, digest_after, flip, install_for, new_shard, plan_for, play, refuse

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


def test_a_restored_run_says_whether_the_machine_was_booted_since(tmp_path, monkeypatch):
    train(tmp_path, 2, (0,))
    disk = open_disk(tmp_path, 0)
    assert not disk.held.has_rebooted
    disk.close()
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr("services.runtime.storage.BOOT", tmp_path / "boot")
    disk = open_disk(tmp_path, 0)
    assert disk.held.has_rebooted
    disk.write_incarnation(0, 2)
    disk.close()
    assert not open_disk(tmp_path, 0).held.has_rebooted


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


def test_a_copy_that_is_interrupted_leaves_no_run(tmp_path, monkeypatch):
    train(tmp_path, 2, (0,))
    disk = open_disk(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(run_storage, "write_file", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            disk.begin_replica(install_for(PLAN), 0, memoryview(b""), Restored(new_shard(PLAN), History()))
    disk.close()
    assert open_disk(tmp_path, 0).held is None


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


def make_folder(state: Path, copy: int, incarnation: int, *, locked: bool = False) -> None:
    folder = StateFolder(state, 0, copy)
    folder.write_identity(incarnation, None)
    if not locked:
        folder.close()


@pytest.mark.parametrize(
    ("folders", "locked", "expected"),
    [
        ({}, [], 0),
        ({0: 3, 1: 0}, [], 0),
        ({0: 1, 1: 2, 2: 0}, [], 1),
        ({0: 2, 1: 2}, [], 0),
        ({1: 0}, [], 1),  # only the folder of a standby is left
        ({2: 0, 10: 4}, [], 10),
        ({0: 1, 1: 2}, [1], 0),  # the old leader restarts beside its successor
        ({0: 1, 1: 0}, [1], 0),
        ({1: 0}, [1], 0),  # the standby lives, and the pserver has lost its disk
        ({0: 1, 1: 0}, [0], None),  # a second process of a living pserver does not take the folder of a standby
        ({0: 1, 1: 2}, [0, 1], None),
    ],
)
def test_a_pserver_opens_the_folder_with_the_newest_incarnation(
    tmp_path: Path, folders: dict[int, int], locked: list[int], expected: int | None
) -> None:
    for copy, incarnation in folders.items():
        make_folder(tmp_path, copy, incarnation, locked=copy in locked)
    if expected is None:
        with pytest.raises(FolderTaken):
            open_folder(tmp_path, 0)
        assert open_folder(tmp_path, None) is None
        return
    folder = open_folder(tmp_path, 0)
    assert folder is not None
    assert folder.path.name == ("pserver-0" if expected == 0 else f"pserver-0-{expected}")


def test_a_pserver_whose_disk_is_lost_begins_beside_a_standby_in_its_first_folder(tmp_path: Path) -> None:
    standby = StateFolder(tmp_path, 0)
    standby.write_identity(0, install_for(plan_for(1)))
    folder = open_folder(tmp_path, 0)
    assert folder is not None
    assert folder.path.name == "pserver-0-1"


@pytest.mark.parametrize(
    ("folders", "locked", "expected"),
    [
        ({}, [], 1),
        ({0: 2}, [0], 1),
        ({0: 2}, [], 1),  # the leader has just ended, and may restart
        ({0: 3, 1: 0}, [], 1),
        ({0: 2, 1: 0}, [0, 1], 2),
        ({0: 1, 1: 2}, [1], 0),  # of an old leader
        ({0: 1, 1: 2, 2: 0}, [1], 2),
        ({0: 0}, [], 1),  # of a pserver that has not registered
    ],
)
def test_a_standby_takes_the_oldest_folder_that_no_pserver_needs(
    tmp_path: Path, folders: dict[int, int], locked: list[int], expected: int
) -> None:
    for copy, incarnation in folders.items():
        make_folder(tmp_path, copy, incarnation, locked=copy in locked)
    folder = open_standby_folder(tmp_path, 0, incarnation=2)
    assert folder.path.name == ("pserver-0" if expected == 0 else f"pserver-0-{expected}")


@pytest.mark.parametrize(
    ("folders", "locked", "expected"),
    [
        ({0: 1, 1: 2}, [], True),
        ({0: 1, 1: 2}, [1], False),
        ({0: 2, 1: 0}, [], False),  # the pserver restarts with it
        ({0: 1, 1: 1}, [], False),
    ],
)
def test_a_standby_leads_again_with_a_free_folder_of_the_newest_incarnation(
    tmp_path: Path, folders: dict[int, int], locked: list[int], expected: bool
) -> None:
    for copy, incarnation in folders.items():
        make_folder(tmp_path, copy, incarnation, locked=copy in locked)
    assert Disk(tmp_path, None).has_free_folder(0, incarnation=2) == expected
    if expected:
        StateFolder(tmp_path, 0, 1)  # it is not locked


def test_a_folder_with_a_damaged_identity_is_not_taken(tmp_path: Path) -> None:
    make_folder(tmp_path, 1, 0)
    flip(tmp_path / "pserver-0-1" / IDENTITY)
    assert open_standby_folder(tmp_path, 0, incarnation=2).path.name == "pserver-0-2"


def test_other_names_are_no_folders(tmp_path: Path) -> None:
    for name in ("pserver-x", "pserver-1-0", "pserver-1-2-3", "pserver-11", "pserver-1-2", "pserver-1"):
        (tmp_path / name).mkdir()
    assert list_folders(tmp_path) == [(1, 0), (1, 2), (11, 0)]


# ---------------------------------------------------------------------- records


MARK = b"\x00mark\xff\x01\x02"


def write(path: Path, bodies: list[bytes], mark: bytes = MARK) -> list[int]:
    """Over what is there; returns where each record ends, and first of all 0."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    ends, chain = [0], ""
    for number, body in enumerate(bodies):
        header = encode_header([("gradient", "U8", (len(body),))], {"number": str(number), PREVIOUS_KEY: chain})
        end, chain = append_record(fd, ends[-1], mark, [header, body[:3], body[3:]])
        ends.append(end)
    os.close(fd)
    return ends


def read(path: Path) -> tuple[list[bytes], Ending]:
    with path.open("rb") as file:
        # A record's memory is used again for the next one.
        *records, ending = (
            (r.frame.metadata["number"], bytes(r.data)) if isinstance(r, Record) else r
            for r in read_records(file.fileno(), MARK)
        )
    assert isinstance(ending, Ending)
    assert [number for number, _ in records] == [str(i) for i in range(len(records))]
    return [data for _, data in records], ending


bodies = st.lists(st.binary(max_size=300), min_size=1, max_size=5)


@given(bodies, st.data())
@settings(max_examples=100)
def test_a_file_that_was_cut_anywhere_ends_with_its_last_whole_record(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = write(path, written)
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = max(end for end in ends if end <= cut)
    assert read(path) == (written[: ends.index(whole)], Ending("torn" if cut - whole >= MARK_BYTES else "clean", whole))


@given(bodies, bodies, st.data())
@settings(max_examples=100)
def test_records_of_an_earlier_incarnation_are_ignored(tmp_path_factory, former, written, data):
    folder = tmp_path_factory.mktemp("log")
    ends = write(folder / "whole", written)
    whole = (folder / "whole").read_bytes()
    cut = data.draw(st.integers(0, ends[-1]))
    write(folder / "log", former, b"old mark")
    with (folder / "log").open("r+b") as file:
        file.write(whole[:cut])
    content = (folder / "log").read_bytes()  # where the rest of a record is the same, it is whole
    there = [content[begin:end] == whole[begin:end] for begin, end in itertools.pairwise(ends)]
    number = [*there, False].index(False)
    records, ending = read(folder / "log")
    assert records == written[:number]
    assert ending == Ending("torn" if cut - ends[number] >= MARK_BYTES else "clean", ends[number])


@given(bodies, st.data())
@settings(max_examples=200)
def test_a_flipped_bit_is_a_torn_tail_in_the_last_record_and_damage_before_it(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = write(path, written)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    number = max(i for i, end in enumerate(ends) if end <= at)
    is_last, in_mark = number == len(written) - 1, at < ends[number] + MARK_BYTES
    kind = "damaged" if not is_last else "clean" if in_mark else "torn"
    assert read(path) == (written[:number], Ending(kind, ends[number]))


@given(st.lists(st.binary(max_size=20), min_size=4, max_size=6), st.data())
@settings(max_examples=100)
def test_a_dropped_repeated_or_swapped_record_is_damage(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("log") / "log"
    ends = write(path, written)
    content = path.read_bytes()
    records = [content[begin:end] for begin, end in itertools.pairwise(ends)]
    altered, whole = alter(records, 1, data)
    path.write_bytes(b"".join(altered))
    assert read(path) == (written[:whole], Ending("damaged", ends[whole]))


def test_a_record_that_does_not_fit_ends_the_file_where_it_began(tmp_path, monkeypatch):
    path = tmp_path / "log"
    write(path, [b"former"] * 3, b"old mark")
    _, end = write(path, [b"first"])
    fd = os.open(path, os.O_WRONLY)
    real = os.pwritev

    def half(fd, chunks, at):
        monkeypatch.setattr(os, "pwritev", full)
        return real(fd, [chunks[0]], at)

    def full(fd, chunks, at):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", half)
    with pytest.raises(OSError, match="No space"):
        append_record(fd, end, MARK, [encode_header([], {"number": "1"})])
    assert path.stat().st_size == end
    monkeypatch.setattr(os, "pwritev", real)
    with path.open("rb") as file:
        chain = next(read_records(file.fileno(), MARK)).chain
    append_record(fd, end, MARK, [encode_header([], {"number": "1", PREVIOUS_KEY: chain})])
    os.close(fd)
    assert read(path)[1].kind == "clean"


def test_a_file_that_cannot_be_read_has_no_ending():
    with open("/proc/self/mem", "rb") as file, pytest.raises(OSError, match="Input/output error"):  # at 0 nothing is
        list(read_records(file.fileno(), MARK))
