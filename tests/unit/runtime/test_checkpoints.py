"""Which checkpoints a place holds, and that damaged ones are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from ps_protocol.consistency import Consistency
from ps_protocol.messages import ShardFile
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.runtime.checkpoints import (
    Manifest,
    complete_checkpoints,
    list_rounds,
    read_manifest,
    read_shard_file,
    round_folder,
    write_manifest,
)
from services.runtime.storage import DamagedFile, open_checkpoint_storage

PLAN = make_plan([ParameterSpec("w", (4,))], 1)
SHARD = b"0123456789"


def shard_file(round_: int) -> ShardFile:
    return ShardFile(
        pserver=0, name="pserver-0-of-1.safetensors", num_bytes=len(SHARD), digest=xxhash.xxh3_128_hexdigest(SHARD),
        round=round_, attempt=0, torch="2", cpu="AVX2",
    )  # fmt: skip


def manifest(round_: int, run: str = "run1") -> Manifest:
    return Manifest(
        run=run, attempt=0, round=round_, consistency=Consistency(), plan=PLAN.to_json(), aliases={"tied": "w"},
        shards=(shard_file(round_),), created="2026-11-21T10:00:00+00:00",
    )  # fmt: skip


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "path" else f"memory://{tmp_path.name}"


def test_a_manifest_says_what_was_written_into_it(url):
    place = open_checkpoint_storage(url)
    write_manifest(place, manifest(128))
    found = read_manifest(place, "run1", 128)
    assert found == manifest(128)
    assert found.slice_plan().digest == PLAN.digest
    assert read_manifest(place, "run1", 129) is None


def test_complete_checkpoints_have_a_manifest_and_come_newest_first(url):
    place = open_checkpoint_storage(url)
    for round_ in (5, 10, 1000):
        write_manifest(place, manifest(round_))
    place.write(f"{round_folder('run1', 2000)}/pserver-0-of-1.safetensors", [SHARD])  # not complete yet
    place.write("run1/notes.txt", [b"of somebody else"])
    assert list_rounds(place, "run1") == [2000, 1000, 10, 5]
    assert [found.round for found in complete_checkpoints(place, "run1")] == [1000, 10, 5]
    assert complete_checkpoints(place, "run2") == []


def test_one_with_a_damaged_manifest_is_none(tmp_path):
    place = open_checkpoint_storage(str(tmp_path))
    for round_ in (5, 10):
        write_manifest(place, manifest(round_))
    flip(tmp_path / round_folder("run1", 10) / "manifest.json")
    with pytest.raises(DamagedFile, match=r"run1/000000000010/manifest\.json in .* is damaged"):
        read_manifest(place, "run1", 10)
    assert [found.round for found in complete_checkpoints(place, "run1")] == [5]


def test_a_shard_is_read_whole_or_not_at_all(tmp_path):
    place, name = open_checkpoint_storage(str(tmp_path)), f"{round_folder('run1', 5)}/pserver-0-of-1.safetensors"
    with pytest.raises(DamagedFile, match="is missing"):
        read_shard_file(place, "run1", shard_file(5))
    place.write(name, [SHARD])
    assert bytes(read_shard_file(place, "run1", shard_file(5))) == SHARD
    for damaged in (SHARD[:-1], b"1" + SHARD[1:]):
        place.write(name, [damaged])
        with pytest.raises(DamagedFile, match="is damaged"):
            read_shard_file(place, "run1", shard_file(5))
