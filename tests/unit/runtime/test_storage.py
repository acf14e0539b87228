"""Files of a place are whole or missing, sealed files contain what was written, and damaged checkpoints are none."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.consistency import Consistency
from ps_protocol.fields import Message
from ps_protocol.messages import ShardFile
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.runtime import storage
from services.runtime.checkpoints import (
    Manifest,
    complete_checkpoints,
    list_rounds,
    read_manifest,
    round_folder,
    write_manifest,
)
from services.runtime.storage import (
    CheckpointStorage,
    DamagedFile,
    LocalStorage,
    RemoteStorage,
    open_checkpoint_storage,
    seal,
    unseal,
    write_file,
)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStorage]:
    if request.param == "local":
        yield open_checkpoint_storage(str(tmp_path / "checkpoints"))
        return
    place = open_checkpoint_storage(f"memory://{uuid.uuid4().hex}")  # there is one in a process
    yield place
    place.delete("")


def test_which_place_a_url_names(tmp_path):
    kinds = {str(tmp_path): LocalStorage, f"file://{tmp_path}": LocalStorage, f"local://{tmp_path}": LocalStorage}
    kinds["memory://here"] = RemoteStorage
    assert {url: type(open_checkpoint_storage(url)) for url in kinds} == kinds
    open_checkpoint_storage(f"file://{tmp_path}").write("a", [b"1"])
    assert (tmp_path / "a").read_bytes() == b"1"
    with pytest.raises(ValueError, match="no-such-scheme"):
        open_checkpoint_storage("no-such-scheme://somewhere")


def test_what_was_written_is_read_and_listed(place):
    place.write("run/1/shard", [b"ab", memoryview(b"cd"), b""])
    place.write("run/2/shard", [])
    assert bytes(place.read("run/1/shard")) == b"abcd"
    assert bytes(place.read("run/2/shard")) == b""
    assert place.list("run") == ["1", "2"]
    assert place.list("") == ["run"]
    assert place.list("run/3") == []


def test_a_file_is_replaced_and_what_was_read_before_belongs_to_the_reader(place):
    place.write("file", [b"first"])
    data = place.read("file")
    data[0] = ord("F")  # torch makes tensors of it, and steps them
    place.write("file", [b"second"])
    assert (bytes(place.read("file")), bytes(data)) == (b"second", b"First")


def test_files_and_folders_are_deleted(place):
    for name in ("run/1/a", "run/1/b", "run/2/a"):
        place.write(name, [b"1"])
    place.delete("run/1/a")
    assert place.list("run/1") == ["b"]
    place.delete("run/1")
    assert place.list("run") == ["2"]
    place.delete("nothing")
    with pytest.raises(FileNotFoundError):
        place.read("nothing")


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_no_half_file_is_left_by_a_disk_that_fails(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_file(path, [b"before"])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def chunks() -> Iterator[bytes]:
        yield b"after"
        if call == "write":
            fail()

    if call != "write":
        monkeypatch.setattr(os if call == "fsync" else Path, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, chunks())
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_and_its_name_are_synced_in_this_order(tmp_path, monkeypatch):
    done = []
    real = {"fsync": os.fsync, "replace": Path.replace}

    def fsync(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        real["fsync"](fd)

    def replace(source: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        return real["replace"](source, target)

    monkeypatch.setattr(storage.os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_file(tmp_path / "file", [b"1"])
    done[0] = done[0].rpartition(".")[0]
    assert done == ["fsync .file", "rename to file", f"fsync {tmp_path.name}"]


def test_a_process_with_the_same_number_may_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write_parts() -> Iterator[bytes]:
        yield b"first "
        write_file(path, [b"second"])
        yield b"whole"

    write_file(path, write_parts())
    assert (path.read_bytes(), [entry.name for entry in tmp_path.iterdir()]) == (b"first whole", ["file"])


def test_what_a_file_system_raises_is_an_error_of_the_disk(monkeypatch):
    place = open_checkpoint_storage("memory://broken")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("403")

    for method in ("makedirs", "cat_file", "ls", "rm"):
        monkeypatch.setattr(place._fs, method, refuse)
    for call, arguments in ((place.write, ("a/b", [])), (place.read, "a"), (place.list, "a"), (place.delete, "a")):
        with pytest.raises(OSError, match=r"memory://broken: RuntimeError\('403'\)"):
            call(*arguments)


class Numbers(Message):
    attempt: int
    names: tuple[str, ...]


NUMBERS = Numbers(attempt=7, names=("w", "größe", "a}\n"))


def test_what_was_written_is_read():
    assert unseal(memoryview(seal(NUMBERS)), Numbers, "numbers.json") == NUMBERS
    assert json.loads(seal(NUMBERS))["content"] == NUMBERS.model_dump(mode="json")  # for people and their tools


@given(at=st.integers(0, len(seal(NUMBERS)) - 1), bit=st.integers(0, 7))
def test_nothing_shorter_and_no_flipped_bit_is_read(at, bit):
    flipped = bytearray(seal(NUMBERS))
    flipped[at] ^= 1 << bit
    for data in (flipped, flipped[:at]):
        with pytest.raises(DamagedFile, match=r"numbers\.json is damaged"):
            unseal(memoryview(data), Numbers, "numbers.json")


# ---------------------------------------------------------------------- checkpoints


PLAN = make_plan([ParameterSpec("w", (4,))], 1)
SHARD = b"0123456789"


def shard_file(round_: int) -> ShardFile:
    return ShardFile(
        pserver=0, name="pserver-0-of-1.safetensors", num_bytes=len(SHARD), digest=xxhash.xxh3_128_hexdigest(SHARD),
        round=round_, attempt=0, torch="2", cpu="AVX2",
    )  # fmt: skip


def manifest(round_: int, run: str = "run1") -> Manifest:
    return Manifest(
        run=run, attempt=0, round=round_, consistency=Consistency(), plan=PLAN.as_json, aliases={"tied": "w"},
        shards=(shard_file(round_),), created="2026-11-21T10:00:00+00:00",
    )  # fmt: skip


def test_complete_checkpoints_have_a_manifest_and_come_newest_first(place):
    for round_ in (5, 10, 1000):
        write_manifest(place, manifest(round_))
    place.write(f"{round_folder('run1', 2000)}/pserver-0-of-1.safetensors", [SHARD])  # not complete yet
    place.write("run1/notes.txt", [b"of another program"])
    assert list_rounds(place, "run1") == [2000, 1000, 10, 5]
    complete = complete_checkpoints(place, "run1")
    assert complete == [manifest(round_) for round_ in (1000, 10, 5)]
    assert complete[0].plan == PLAN
    assert (complete_checkpoints(place, "run2"), read_manifest(place, "run1", 129)) == ([], None)
