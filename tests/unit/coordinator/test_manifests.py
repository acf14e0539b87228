"""Manifests: they complete a checkpoint when all its shards are written, and the newest are kept."""

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


@pytest.fixture
def manifests(cluster: Cluster, place: CheckpointStorage) -> Manifests:
    return Manifests(cluster, place, max_complete=2)


def report(cluster: Cluster, pserver: int, *rounds: int, attempt: int = 0) -> PserverHeartbeatReply:
    """Send the heartbeat of a pserver that has written the shards of these rounds."""
    files = tuple(shard_file(pserver, round_, attempt) for round_ in rounds)
    return cluster.pserver_heartbeat(pserver, beat(run="run1", attempt=attempt, checkpoints=files), 1.0)


def report_all(cluster: Cluster, *rounds: int, attempt: int = 0) -> None:
    for pserver in (0, 1):
        report(cluster, pserver, *rounds, attempt=attempt)


async def complete(manifests: Manifests, cluster: Cluster, *rounds: int) -> None:
    for round_ in rounds:
        report_all(cluster, round_)
        await manifests.update()


def restart(cluster: Cluster) -> None:
    """Forget what a restarted coordinator does not know."""
    cluster.complete_checkpoints.clear()
    cluster.checkpoints_known_for = None


def roll_back(cluster: Cluster, round_: int) -> None:
    run = cluster.run
    run.apply_decision(replace(run.decision, attempt=run.attempt + 1, resume=round_))


def found(place: CheckpointStorage) -> list[int]:
    return [manifest.round for manifest in complete_checkpoints(place, "run1")]


def refuse(_: object) -> None:
    raise PermissionError("read-only")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 2
    path.write_bytes(content)


async def test_a_checkpoint_is_complete_when_all_pservers_have_written_their_shards(cluster, place, manifests):
    report(cluster, 0, 0, 4)
    report(cluster, 1, 0)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [0]
    report(cluster, 1, 4)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4, 0]
    manifest = read_manifest(place, "run1", 4)
    assert manifest is not None
    assert [file.pserver for file in manifest.shards] == [0, 1]


async def test_a_checkpoint_is_not_completed_after_a_pserver_has_written_a_later_shard(cluster, place, manifests):
    """The pserver may have deleted the earlier one since."""
    await complete(manifests, cluster, 4)
    report(cluster, 0, 4, 8, 12)
    report(cluster, 1, 4, 8)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4]
    report(cluster, 1, 4, 8, 12)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [12, 4]


async def test_pservers_receive_no_list_of_checkpoints_while_one_is_being_completed(
    cluster, place, manifests, monkeypatch
):
    """They would delete the shard of a checkpoint that is complete a moment later."""
    answers = []
    real = manifests_module.write_manifest

    def write(*arguments) -> None:
        answers.append(report(cluster, 0, 4, 8).complete)
        real(*arguments)

    monkeypatch.setattr(manifests_module, "write_manifest", write)
    await complete(manifests, cluster, 4)
    assert answers == [None]
    assert report(cluster, 0, 4, 8).complete == (4,)


async def test_older_checkpoints_are_deleted_unless_a_change_is_under_way(cluster, place, manifests):
    """Until the last pserver has been changed, the run may be rolling back to an older one."""
    await complete(manifests, cluster, 0, 4)
    cluster.run.number += 1
    await complete(manifests, cluster, 8)
    assert found(place) == cluster.complete_checkpoints == [8, 4, 0]
    cluster.finish_change(cluster.run.number)
    await complete(manifests, cluster, 12)
    assert found(place) == cluster.complete_checkpoints == [12, 8]
    assert place.list("run1") == ["000000000008", "000000000012"]


async def test_a_checkpoint_that_is_deleted_in_part_is_not_complete(cluster, place, manifests, monkeypatch):
    delete = place.delete
    monkeypatch.setattr(place, "delete", lambda name: delete(name) if name.endswith(".json") else refuse(name))
    await complete(manifests, cluster, 4, 8, 12)
    assert found(place) == [12, 8]


async def test_checkpoints_are_completed_though_a_place_refuses_to_delete(cluster, place, manifests, monkeypatch):
    monkeypatch.setattr(place, "delete", refuse)
    await complete(manifests, cluster, 4, 8, 12)
    assert cluster.complete_checkpoints == [12, 8]


async def test_a_checkpoint_is_not_completed_from_shards_of_several_attempts(cluster, place, manifests):
    cluster.run.attempt = 1
    report(cluster, 0, 4, attempt=1)
    report(cluster, 1, 4, attempt=0)
    await manifests.update()
    assert found(place) == []


async def test_a_manifest_that_cannot_be_written_is_tried_again(cluster, place, manifests):
    """The one of a finished run's last round is the last one."""
    report_all(cluster, 4)
    try:
        arm_failpoints("checkpoint.manifest=eio")
        assert not await manifests.update()
    finally:
        arm_failpoints("")
    assert cluster.complete_checkpoints == []
    assert await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4]


async def test_a_restarted_coordinator_finds_complete_and_undamaged_checkpoints(cluster, place, tmp_path):
    manifests = Manifests(cluster, place, max_complete=3)
    await complete(manifests, cluster, 0, 4, 8)
    damage(tmp_path / round_folder("run1", 4) / MANIFEST)
    restart(cluster)
    await Manifests(cluster, place, max_complete=3).update()
    assert cluster.complete_checkpoints == [8, 0]
    damage(tmp_path / round_folder("run1", 8) / MANIFEST)
    assert [manifest.round for manifest in all_checkpoints(place)] == [0]


@pytest.mark.parametrize("method", ["list", "read"])
async def test_pservers_receive_no_list_of_checkpoints_before_the_place_was_read(
    cluster, place, manifests, monkeypatch, method
):
    await complete(manifests, cluster, 4)
    restart(cluster)
    assert report(cluster, 0, 4).complete is None
    manifests = Manifests(cluster, place, max_complete=2)
    with monkeypatch.context() as patch:
        patch.setattr(place, method, refuse)
        assert not await manifests.update()
    assert (cluster.knows_checkpoints, report(cluster, 0, 4).complete) == (False, None)
    assert await manifests.update()
    assert report(cluster, 0, 4).complete == (4,)


async def test_checkpoints_of_rounds_that_a_rollback_has_undone_are_deleted(cluster, place):
    manifests = Manifests(cluster, place, max_complete=3)
    await complete(manifests, cluster, 4, 8, 12)
    roll_back(cluster, 4)
    report_all(cluster, 4, attempt=1)  # the pservers have deleted their shards of rounds 8 and 12
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4]
    report_all(cluster, 4, 8, attempt=1)
    await manifests.update()
    assert [(m.attempt, m.round) for m in all_checkpoints(place)] == [(1, 8), (0, 4)]
    assert cluster.complete_checkpoints == [8, 4]


async def test_checkpoints_that_an_earlier_rollback_has_undone_are_deleted(cluster, place, manifests):
    await complete(manifests, cluster, 4, 8)
    roll_back(cluster, 4)
    roll_back(cluster, 12)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == [4]


async def test_a_manifest_that_is_written_during_a_rollback_of_its_round_is_deleted(
    cluster, place, manifests, monkeypatch
):
    write = place.write

    def write_slowly(name: str, chunks: list[bytes]) -> None:
        roll_back(cluster, 0)
        write(name, chunks)

    report_all(cluster, 4)
    with monkeypatch.context() as patch:
        patch.setattr(place, "write", write_slowly)
        await manifests.update()
    assert cluster.complete_checkpoints == []
    report_all(cluster, attempt=1)
    await manifests.update()
    assert found(place) == cluster.complete_checkpoints == []


async def test_the_newest_run_counts_by_date_and_the_newest_checkpoint_of_a_run_by_round(cluster, place, manifests):
    await complete(manifests, cluster, 4)
    manifest = read_manifest(place, "run1", 4)
    assert manifest is not None
    older = manifest.model_copy(update={"run": "run0", "round": 900, "created": "2026-01-01T00:00:00+00:00"})
    write_manifest(place, older)
    assert all_checkpoints(place) == [manifest, older]
    early = manifest.model_copy(update={"round": 8, "created": "2001-01-01T00:00:00+00:00"})
    write_manifest(place, early)
    assert [(m.run, m.round) for m in all_checkpoints(place)] == [("run0", 900), ("run1", 8), ("run1", 4)]
    assert all_checkpoints(open_checkpoint_storage(place.url + "/nowhere")) == []
