"""`gradpost checkpoint export`: the newest complete checkpoint that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradpost.checkpoint import export_model
from gradpost.output import CommandError
from ps_protocol.consistency import Consistency
from services.pserver.durable.disk import Disk
from services.pserver.shard.shard_state import History, concatenate
from services.runtime.checkpoints import Manifest, round_folder, write_manifest
from services.runtime.storage import open_checkpoint_storage

from ..pserver.durable.support import install_for, new_shard, plan_for, step

PLAN = plan_for(2)
ROUNDS = (0, 4)


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Write two checkpoints of two pservers."""
    storage, shards = open_checkpoint_storage(str(tmp_path / "checkpoints")), {round_: [] for round_ in ROUNDS}
    for index in range(PLAN.num_pservers):
        disk = Disk(tmp_path)
        disk.open(index)
        disk.write_incarnation(index, 1)
        own, _ = disk.open_run(install_for(PLAN))
        shard = new_shard(PLAN, index)
        for round_ in range(max(ROUNDS) + 1):
            if round_:
                step(shard, round_, own)
            if round_ in shards:
                file, path = own.snapshot(shard, History({round_: (0,)} if round_ else {}))()
                storage.copy_file(path, f"{round_folder('run1', round_)}/{file.name}")
                shards[round_].append(file)
        own.close()
    for round_, files in shards.items():
        manifest = Manifest(
            run="run1", attempt=0, round=round_, consistency=Consistency(), plan=PLAN.as_json, shards=tuple(files),
            created="2026-11-24T10:00:00+00:00", aliases={"tied": "a"},
        )  # fmt: skip
        write_manifest(storage, manifest)
    return storage.url


def assert_is_round(file: Path, round_: int) -> None:
    shards = [(index, new_shard(PLAN, index)) for index in range(PLAN.num_pservers)]
    for _, shard in shards:
        for number in range(1, round_ + 1):
            step(shard, number)
    tensors = load_file(file)
    for name, value in concatenate([(index, shard.state) for index, shard in shards], PLAN).items():
        assert torch.equal(tensors[name], value.to(tensors[name].dtype)), name
    assert torch.equal(tensors["tied"], tensors["a"])
    assert tensors["seen"].dtype == torch.int64


def test_the_newest_readable_or_the_wanted_round_is_exported(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.safetensors"
    export_model(target, place, None, None)
    assert_is_round(target, 4)
    assert "of round 4 of run run1, " in capsys.readouterr().out
    export_model(target, place, "run1", 0)
    assert_is_round(target, 0)
    for file in (tmp_path / "checkpoints" / round_folder("run1", 4)).glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    export_model(target, place, None, None)
    assert_is_round(target, 0)
    assert capsys.readouterr().out.startswith("skipping round 4 of run run1: ")


def test_a_missing_checkpoint_is_named_with_the_others(place: str, tmp_path: Path) -> None:
    message = r"no complete checkpoint of round 7 in .* Choose one of rounds 4 of run run1, 0 of run run1"
    with pytest.raises(CommandError, match=message):
        export_model(tmp_path / "m", place, None, 7)
    with pytest.raises(CommandError, match=r"no complete checkpoint of run run2 in .*"):
        export_model(tmp_path / "m", place, "run2", None)
