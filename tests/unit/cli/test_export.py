"""`gradpost checkpoint export` of a run that has stopped: the newest round that all pservers have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradpost.export import export_model
from gradpost.output import CommandError
from ps_protocol.consistency import Consistency
from ps_protocol.messages import ShardFile
from services.coordinator.restore import RecordFile
from services.coordinator.state.record import ClusterRecord
from services.pserver.durable.disk import Disk, StateFolder
from services.pserver.shard.history import History
from services.pserver.shard.shard_state import concatenate
from services.runtime.checkpoints import Manifest, round_folder, write_manifest
from services.runtime.storage import lock_folder, open_checkpoint_storage

from ..coordinator.support import make_cluster
from ..coordinator.support import train as begin_training
from ..pserver.durable.support import install_for, new_shard, plan_for, step

PLAN = plan_for(2)


def write_record(folder: Path, began: dict[int, int | None]) -> None:
    cluster = make_cluster(durability="log")
    begin_training(cluster)
    record = cluster.describe()
    assert record.run is not None
    run = record.run.model_copy(update={"plan": PLAN, "attempt": len(began), "began": began})
    RecordFile(folder).write(ClusterRecord(**{**dict(record), "run": run}))


def stop_at(
    folder: Path,
    *rounds: int,
    attempts: tuple[int, int] = (0, 0),
    began: dict[int, int | None] | None = None,
    **settings: Any,
):
    """Two pservers that end after these rounds; checkpoints 0 and 4 are complete."""
    shards: dict[int, list[ShardFile]] = {0: [], 4: []}
    place = open_checkpoint_storage(str(folder / "checkpoints"))
    for index, last in enumerate(rounds):
        disk = Disk(folder)
        disk.open(index)
        disk.write_incarnation(index, 1)
        storage, _ = disk.open_run(install_for(PLAN, attempt=attempts[index], **settings))
        shard = new_shard(PLAN, index)
        for round_ in range(last + 1):
            if round_:
                step(shard, round_, storage)
            if round_ in shards:
                file, path = storage.snapshot(shard, History({round_: (0,)} if round_ else {}))()
                place.copy_file(path, f"{round_folder('run1', round_)}/{file.name}")
                shards[round_].append(file)
        if not storage.has_log:
            storage.snapshot(shard, History())()
        storage.close()
        assert disk.folder is not None
        disk.folder.close()
    for round_, files in shards.items():
        manifest = Manifest(
            run="run1", attempt=0, round=round_, consistency=Consistency(), plan=PLAN.as_json, shards=tuple(files),
            created="2026-11-24T10:00:00+00:00",
        )  # fmt: skip
        write_manifest(place, manifest)
    write_record(folder, began or {})


def export(folder: Path, round_: int | None = None) -> dict[str, torch.Tensor]:
    export_model(folder / "model.safetensors", str(folder / "checkpoints"), None, round_, folder)
    return load_file(folder / "model.safetensors")


def expected(round_: int) -> dict[str, torch.Tensor]:
    shards = []
    for index in (0, 1):
        shard = new_shard(PLAN, index)
        for number in range(1, round_ + 1):
            step(shard, number)
        shards.append((index, shard.state))
    return concatenate(shards, PLAN)


def assert_is_round(tensors: dict[str, torch.Tensor], round_: int) -> None:
    for name, value in expected(round_).items():
        assert torch.equal(tensors[name], value.to(tensors[name].dtype)), name


def test_the_newest_round_of_the_logs_is_exported(tmp_path, capsys):
    stop_at(tmp_path, 7, 6)
    assert_is_round(export(tmp_path), 6)
    said = capsys.readouterr().out
    assert "of round 6 of run run1" in said
    assert "round 7 is newer, but not all pservers have it" in said


def test_the_folder_of_a_promoted_standby_is_exported(tmp_path, capsys):
    stop_at(tmp_path, 7, 7)
    shutil.copytree(tmp_path / "pserver-0", tmp_path / "pserver-0-1")
    shutil.rmtree(tmp_path / "pserver-0" / "log")
    promoted = StateFolder(tmp_path, 0, copy=1)
    promoted.write_identity(2, promoted.identity.run)
    export(tmp_path)
    assert "without the logs: pserver 0 is still running" in capsys.readouterr().out
    promoted.close()
    assert_is_round(export(tmp_path), 7)


def test_an_asynchronous_run_is_exported_with_the_newest_values_of_each_pserver(tmp_path, capsys):
    stop_at(tmp_path, 7, 6, consistency=Consistency(mode="async"), durability="none")
    export(tmp_path)
    said = capsys.readouterr().out
    assert "of round 6 of run run1" in said
    assert "these are the newest values of each pserver; one of them has 7 contributions" in said


def test_without_a_log_the_newest_common_checkpoint_is_exported(tmp_path, capsys):
    stop_at(tmp_path, 7, 6, durability="none")
    assert_is_round(export(tmp_path), 4)
    said = capsys.readouterr().out
    assert "round 7 is newer, but not all pservers have it (with durability=log they keep the rounds before it)" in said
    stop_at(tmp_path, 7, 7, durability="none")
    assert_is_round(export(tmp_path), 7)


def test_any_round_of_the_logs_can_be_exported(tmp_path):
    stop_at(tmp_path, 7, 6)
    assert_is_round(export(tmp_path, 5), 5)
    assert_is_round(export(tmp_path, 4), 4)
    with pytest.raises(
        CommandError, match=r"no complete checkpoint of round 7 in .* of rounds 4 of run run1, 0 of run"
    ):
        export(tmp_path, 7)


def test_the_newest_complete_checkpoint_of_a_running_run_is_exported(tmp_path, capsys):
    stop_at(tmp_path, 7, 6)
    assert lock_folder(tmp_path / "pserver-1") is not None
    assert_is_round(export(tmp_path), 4)
    assert (
        "exporting complete checkpoints only, without the logs: pserver 1 is still running" in capsys.readouterr().out
    )


def test_rounds_that_were_undone_while_a_pserver_was_down_are_not_exported(tmp_path):
    """Pserver 1 died before a rollback to round 5; pserver 0 has applied rounds 6 and 7 again."""
    stop_at(tmp_path, 7, 7, attempts=(1, 0), began={1: 5})
    assert_is_round(export(tmp_path), 5)


def test_a_checkpoint_that_was_undone_and_not_deleted_is_not_exported(tmp_path):
    """The coordinator has decided on a rollback to round 2, and all processes have stopped."""
    stop_at(tmp_path, 7, 7, began={1: 2})
    assert_is_round(export(tmp_path), 2)
    for index in (0, 1):
        (tmp_path / f"pserver-{index}" / "identity.json").unlink()
    assert_is_round(export(tmp_path), 0)


def test_without_folders_the_newest_complete_checkpoint_is_exported(tmp_path):
    stop_at(tmp_path, 7, 6)
    export_model(tmp_path / "model.safetensors", str(tmp_path / "checkpoints"), None, None)
    assert_is_round(load_file(tmp_path / "model.safetensors"), 4)
