"""A checkpoint is complete when every pserver has written its shard; of the complete ones the newest are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.messages import PserverHeartbeatReply
from services.coordinator import manifests as manifests_module
from services.coordinator.cluster import Cluster
from services.coordinator.manifests import Manifests
from services.runtime.checkpoints import (
    MANIFEST,
    Manifest,
    all_checkpoints,
    complete_checkpoints,
    read_manifest,
    round_folder,
    write_manifest,
)
from services.runtime.failpoints import arm_failpoints
from services.runtime.storage import CheckpointStorage, open_checkpoint_storage

from .support import beat, make_cluster, shard_file, train

pytestmark = pytest.mark.asyncio


@pytest.fixture
def place(tmp_path: Path) -> CheckpointStorage:
    return open_checkpoint_storage(str(tmp_path))


@pytest.fixture
def cluster() -> Cluster:
    cluster = make_cluster(durability="log", on_trainer_loss="wait")
    train(cluster)
    return cluster


def tell(cluster: Cluster, pserver: int, *rounds: int, attempt: int = 0) -> PserverHeartbeatReply:
    """A heartbeat: these shards are written."""
    files = tuple(shard_file(pserver, round_, attempt) for round_ in rounds)
    return cluster.pserver_heartbeat(pserver, beat(run="run1", attempt=attempt, checkpoints=files), 1.0)


def forget(cluster: Cluster) -> None:
    """The coordinator dies and comes back."""
    cluster.complete_checkpoints.clear()
    cluster.checkpoints_known_for = None


def go_back(cluster: Cluster, round_: int) -> None:
    """The next attempt is decided."""
    run = cluster.run
    run.apply_decision(replace(run.decision, attempt=run.attempt + 1, resume=round_))


def found(place: CheckpointStorage) -> list[int]:
    return [manifest.round for manifest in complete_checkpoints(place, "run1")]


async def complete_round_4(cluster: Cluster, place: CheckpointStorage) -> Manifest:
    for pserver in (0, 1):
        tell(cluster, pserver, 4)
    await Manifests(cluster, place, max_complete=2).update()
    manifest = read_manifest(place, "run1", 4)
    assert manifest is not None
    return manifest


async def test_it_is_complete_when_all_have_written(cluster, place):
    manifests = Manifests(cluster, place, max_complete=2)
    tell(cluster, 0, 0, 4)
    tell(cluster, 1, 0)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [0]
    tell(cluster, 1, 4)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4, 0]
    manifest = read_manifest(place, "run1", 4)
    assert manifest is not None
    assert [file.pserver for file in manifest.shards] == [0, 1]


async def test_it_is_not_completed_after_a_pserver_has_written_a_later_shard(cluster, place):
    """The pserver may have deleted the earlier one since."""
    await complete_round_4(cluster, place)
    tell(cluster, 0, 4, 8, 12)
    tell(cluster, 1, 4, 8)
    await Manifests(cluster, place, max_complete=2).update()
    assert found(place) == cluster.complete_checkpoints == [4]
    tell(cluster, 1, 4, 8, 12)
    await Manifests(cluster, place, max_complete=2).update()
    assert found(place) == cluster.complete_checkpoints == [12, 4]


async def test_pservers_learn_nothing_of_checkpoints_while_one_is_being_completed(cluster, place, monkeypatch):
    """What is complete a moment later must not look as if it had been given up."""
    answers = []
    real = manifests_module.write_manifest

    def write(*arguments) -> None:
        answers.append(tell(cluster, 0, 4, 8).complete)
        real(*arguments)

    monkeypatch.setattr(manifests_module, "write_manifest", write)
    await complete_round_4(cluster, place)
    assert answers == [None]
    assert tell(cluster, 0, 4, 8).complete == (4,)


async def test_none_is_deleted_while_somebody_may_be_going_back_to_it(cluster, place):
    """A new one is complete between an administrator's word and the last pserver that has gone back."""
    manifests = Manifests(cluster, place, max_complete=2)
    run = cluster.run
    for round_ in (0, 4, 8):
        run.number += round_ == 8
        for pserver in (0, 1):
            tell(cluster, pserver, round_)
        await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [8, 4, 0]
    cluster.finish_change(run.number)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [8, 4]


async def test_older_ones_are_deleted(cluster, place):
    manifests = Manifests(cluster, place, max_complete=2)
    for round_ in (0, 4, 8, 12):
        for pserver in (0, 1):
            tell(cluster, pserver, round_)
        await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [12, 8]
    assert place.list("run1") == ["000000000008", "000000000012"]


async def test_one_that_is_deleted_in_part_is_none_any_more(cluster, place, monkeypatch):
    manifests, delete = Manifests(cluster, place, max_complete=1), place.delete

    def refuse_folders(name: str) -> None:
        if not name.endswith(".json"):
            raise PermissionError("read-only")
        delete(name)

    monkeypatch.setattr(place, "delete", refuse_folders)
    for round_ in (4, 8):
        for pserver in (0, 1):
            tell(cluster, pserver, round_)
        await manifests.update()
    assert found(place) == [8]


async def test_nothing_is_completed_in_an_attempt_that_not_all_have_heard_of(cluster, place):
    cluster.run.attempt = 1
    tell(cluster, 0, 4, attempt=1)
    tell(cluster, 1, 4, attempt=0)
    await Manifests(cluster, place, max_complete=2).update()
    assert found(place) == []


async def test_a_manifest_that_cannot_be_written_is_tried_again(cluster, place):
    """That of a finished run's last round is the last one that there will be."""
    manifests = Manifests(cluster, place, max_complete=2)
    for pserver in (0, 1):
        tell(cluster, pserver, 4)
    try:
        arm_failpoints("checkpoint.manifest=eio")
        assert not await manifests.update()
    finally:
        arm_failpoints("")
    assert cluster.complete_checkpoints == []
    assert await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4]


async def test_a_place_that_does_not_delete_is_survived(cluster, place, monkeypatch):
    def refuse(_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(place, "delete", refuse)
    manifests = Manifests(cluster, place, max_complete=1)
    for round_ in (4, 8):
        for pserver in (0, 1):
            tell(cluster, pserver, round_)
        await manifests.update()
    assert cluster.complete_checkpoints == [8]


async def test_what_an_earlier_life_completed_is_found_without_what_is_damaged(cluster, place, tmp_path):
    manifests = Manifests(cluster, place, max_complete=3)
    for round_ in (0, 4, 8):
        for pserver in (0, 1):
            tell(cluster, pserver, round_)
        await manifests.update()
    damage(tmp_path / round_folder("run1", 4) / MANIFEST)
    forget(cluster)
    await Manifests(cluster, place, max_complete=3).update()
    assert cluster.complete_checkpoints == [8, 0]
    damage(tmp_path / round_folder("run1", 8) / MANIFEST)
    assert [manifest.round for manifest in all_checkpoints(place)] == [0]


async def test_pservers_are_told_of_none_until_it_is_known_which_there_are(cluster, place, monkeypatch):
    await complete_round_4(cluster, place)
    assert tell(cluster, 0, 4).complete == (4,)
    forget(cluster)
    assert tell(cluster, 0, 4).complete is None

    def refuse(_: str) -> list[str]:
        raise PermissionError("not now")

    manifests = Manifests(cluster, place, max_complete=2)
    with monkeypatch.context() as patch:
        patch.setattr(place, "list", refuse)
        assert not await manifests.update()
    assert tell(cluster, 0, 4).complete is None
    assert await manifests.update()
    assert tell(cluster, 0, 4).complete == (4,)


async def test_a_run_that_went_back_takes_back_what_it_has_undone(cluster, place):
    manifests = Manifests(cluster, place, max_complete=3)
    for round_ in (4, 8, 12):
        for pserver in (0, 1):
            tell(cluster, pserver, round_)
        await manifests.update()
    go_back(cluster, 4)
    for pserver in (0, 1):  # they have deleted their shards of rounds 8 and 12
        tell(cluster, pserver, 4, attempt=1)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4]
    for pserver in (0, 1):
        tell(cluster, pserver, 4, 8, attempt=1)
    await manifests.update()
    assert [(m.attempt, m.round) for m in all_checkpoints(place)] == [(1, 8), (0, 4)]
    assert cluster.complete_checkpoints == [8, 4]


async def test_what_an_attempt_has_undone_is_taken_back_after_later_attempts_too(cluster, place, monkeypatch):
    """The place did not delete it at once, and the next attempt began behind it."""
    manifests = Manifests(cluster, place, max_complete=3)
    for round_ in (4, 8):
        for pserver in (0, 1):
            tell(cluster, pserver, round_)
        await manifests.update()
    go_back(cluster, 4)
    go_back(cluster, 12)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4]


async def test_a_place_that_cannot_be_read_is_not_one_without_checkpoints(cluster, place, monkeypatch):
    await complete_round_4(cluster, place)
    forget(cluster)
    read, errors = place.read, [OSError("Input/output error")]

    def read_badly(name: str) -> memoryview:
        if errors:
            raise errors.pop()
        return read(name)

    monkeypatch.setattr(place, "read", read_badly)
    manifests = Manifests(cluster, place, max_complete=2)
    await manifests.update()
    assert not cluster.knows_checkpoints
    await manifests.update()
    assert cluster.complete_checkpoints == [4]


async def test_a_manifest_of_a_round_that_was_undone_meanwhile_does_not_stay(cluster, place, monkeypatch):
    manifests, write = Manifests(cluster, place, max_complete=3), place.write

    def write_slowly(name: str, chunks: list[bytes]) -> None:
        go_back(cluster, 0)  # while the disk writes
        write(name, chunks)

    for pserver in (0, 1):
        tell(cluster, pserver, 4)
    with monkeypatch.context() as patch:
        patch.setattr(place, "write", write_slowly)
        await manifests.update()
    assert cluster.complete_checkpoints == []
    for pserver in (0, 1):
        tell(cluster, pserver, attempt=1)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == []


async def test_of_several_runs_the_newest_by_date_counts(cluster, place):
    manifest = await complete_round_4(cluster, place)
    older = manifest.model_copy(update={"run": "run0", "round": 900, "created": "2026-01-01T00:00:00+00:00"})
    write_manifest(place, older)
    assert all_checkpoints(place) == [manifest, older]
    assert all_checkpoints(open_checkpoint_storage(place.url + "/nowhere")) == []


async def test_of_one_run_the_newest_round_counts_whatever_the_clock_said(cluster, place):
    manifest = await complete_round_4(cluster, place)
    early = manifest.model_copy(update={"round": 8, "created": "2001-01-01T00:00:00+00:00"})
    other = manifest.model_copy(update={"run": "run0", "created": "2002-01-01T00:00:00+00:00"})
    for one in (early, other):
        write_manifest(place, one)
    assert [(m.run, m.round) for m in all_checkpoints(place)] == [("run0", 4), ("run1", 8), ("run1", 4)]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 2
    path.write_bytes(content)
