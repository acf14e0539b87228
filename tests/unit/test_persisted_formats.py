"""Files of another format are refused, and stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_protocol.errors import UnsupportedFormat
from services.pserver.durable import update_log
from services.pserver.durable.disk import IDENTITY, Identity, StateFolder, folder_path
from services.pserver.shard import shard_state
from services.runtime.checkpoints import Manifest, complete_checkpoints, write_manifest
from services.runtime.storage import seal

from .pserver.durable import support
from .pserver.durable.support import complete_checkpoint, place_in, play

PLAN = support.TWO_SHARDS


def restore(folder: Path) -> None:
    support.reopen(folder).restore()


@pytest.mark.parametrize(
    ("module", "read"),
    [(update_log, restore), (shard_state, restore)],
    ids=["log", "shard"],
)
@pytest.mark.parametrize("number", [-1, 1])
def test_another_format_is_refused_and_stays(
    module, read, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = []
    for index in (0, 1):
        storage = support.open_storage(tmp_path, PLAN, index=index)
        shards += play(storage, support.new_shard(PLAN, index), 5, (0, 4))[-1:]
        storage.close()
    complete_checkpoint(place_in(tmp_path), PLAN, *shards)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + number)
    with pytest.raises(UnsupportedFormat, match="another version"):
        read(tmp_path)
    assert {path: path.read_bytes() for path in before} == before


def test_a_manifest_of_another_format_is_refused_and_stays(tmp_path: Path) -> None:
    class OtherManifest(Manifest):
        format: int = 2  # type: ignore[assignment]

    place, storage = place_in(tmp_path), support.open_storage(tmp_path, PLAN)
    complete_checkpoint(place, PLAN, play(storage, support.new_shard(PLAN), 1, (0,))[-1])
    storage.close()
    [known] = complete_checkpoints(place, "run1")
    write_manifest(place, OtherManifest(**{**dict(known), "format": 2}))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UnsupportedFormat, match="another version"):
        complete_checkpoints(place, "run1")
    assert {path: path.read_bytes() for path in before} == before


def test_the_identity_of_another_version_is_refused_and_stays(tmp_path: Path) -> None:
    class OtherIdentity(Identity):
        epoch: int = 1

    path = folder_path(tmp_path, 0, 0) / IDENTITY
    path.parent.mkdir()
    path.write_bytes(seal(OtherIdentity()))
    for _ in range(2):  # the folder is not left locked
        with pytest.raises(UnsupportedFormat, match="another version"):
            StateFolder(tmp_path, 0)
    assert path.exists()
