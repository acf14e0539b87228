"""Checkpoints as files: what their folders and files are called, and what their manifests say.

{run}/{round}/pserver-0-of-2.safetensors    the shard, flat tensors in its layout
              pserver-0-of-2.json           its digest; written after it
              manifest.json                 written when all of them are there: now it is a checkpoint of the model
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import xxhash
from pydantic import BeforeValidator, Field

from ps_protocol.consistency import Consistency
from ps_protocol.fields import Message
from ps_protocol.membership import Controls
from ps_protocol.messages import ShardFile
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PserverIndex, Rank, Round

from .logs import get_logger
from .storage import CheckpointStorage, DamagedFile, seal, unseal

log = get_logger()

MANIFEST = "manifest.json"
FORMAT = 1

_ROUND = re.compile(r"\d{12}")

PassOver = Callable[[str, Round, OSError], None]


def leave_out_removed(consistency: Any) -> Any:
    """Return a `Consistency`, as a file has it, without the settings that only earlier versions had."""
    if not isinstance(consistency, dict):
        return consistency
    return {name: value for name, value in consistency.items() if name not in ("max_merged", "step_count")}


class Manifest(Message):
    """What makes shard files a checkpoint. The same bits are promised for the `torch` and `cpu` of its shards only."""

    format: int = FORMAT
    run: str
    attempt: int
    round: Round
    consistency: Annotated[Consistency, BeforeValidator(leave_out_removed)]
    plan: dict[str, Any]
    aliases: dict[str, str] = Field(default={}, description="names of tied parameters, and what they are tied to")
    shards: tuple[ShardFile, ...]
    controls: Controls = Field(default=Controls(), description="what an administrator had set when it was written")
    created: str = Field(description="date and time in UTC, ISO 8601")

    @property
    def newest_steps(self) -> dict[Rank, Round]:
        """Asynchronous modes: the newest step of each rank that is in any shard."""
        newest: dict[Rank, Round] = {}
        for file in self.shards:
            for rank, step in file.steps.items():
                newest[rank] = max(step, newest.get(rank, 0))
        return newest

    def slice_plan(self) -> SlicePlan:
        """The plan that the shards were cut by."""
        return SlicePlan.from_json(self.plan)


def round_folder(run: str, round_: Round) -> str:
    """Where the checkpoint of a round lies.

    >>> round_folder("4f1c", 128)
    '4f1c/000000000128'
    """
    return f"{run}/{round_:012}"


def shard_name(index: PserverIndex, num_pservers: int) -> str:
    """What the files of one shard are called, without their suffix.

    >>> shard_name(0, 2)
    'pserver-0-of-2'
    """
    return f"pserver-{index}-of-{num_pservers}"


def list_rounds(storage: CheckpointStorage, run: str) -> list[Round]:
    """Rounds of which there is anything at all, newest first."""
    return sorted((int(name) for name in storage.list(run) if _ROUND.fullmatch(name)), reverse=True)


def read_manifest(storage: CheckpointStorage, run: str, round_: Round) -> Manifest | None:
    """The manifest of a round; None if it has none yet. Raises DamagedFile, OSError."""
    name = f"{round_folder(run, round_)}/{MANIFEST}"
    try:
        data = storage.read(name)
    except FileNotFoundError:
        return None
    return unseal(data, Manifest, f"{name} in {storage.url}")


def is_undone(round_: Round, attempt: int, began: Mapping[int, Round | None]) -> bool:
    """Return whether a later attempt than this one has begun before this round.

    `began` has the round after which each attempt has begun, None for one that has begun with initial values.

    >>> is_undone(10, 0, {1: 12, 2: 7}), is_undone(10, 1, {1: 12, 2: 10}), is_undone(0, 0, {1: None})
    (True, False, True)
    """
    return any(later > attempt and (start is None or start < round_) for later, start in began.items())


def _pass_over_damage(run: str, round_: Round, error: OSError) -> None:
    """A manifest that cannot be read now may be whole: what rests on an older one would be lost rounds."""
    if not isinstance(error, DamagedFile):
        raise error
    log.warning("the manifest of a checkpoint cannot be used", run=run, round=round_, error=str(error))


def complete_checkpoints(
    storage: CheckpointStorage, run: str, pass_over: PassOver = _pass_over_damage
) -> list[Manifest]:
    """The manifests of a run, newest first; `pass_over` is called with errors, by default it raises all but damage.

    Those of a later attempt come before those of rounds that it has undone.
    """
    found = []
    for round_ in list_rounds(storage, run):
        try:
            manifest = read_manifest(storage, run, round_)
        except OSError as error:
            pass_over(run, round_, error)
            continue
        if manifest is not None:
            found.append(manifest)
    return sorted(found, key=lambda manifest: (manifest.attempt, manifest.round), reverse=True)


def all_checkpoints(storage: CheckpointStorage, pass_over: PassOver = _pass_over_damage) -> list[Manifest]:
    """The manifests of all runs, newest first: what `--resume` goes on with, and what `export` writes, is the first.

    Runs stand in the order of the dates of their newest ones, and dates order nothing within a run: a clock that jumps
    puts no checkpoint before a later one. Raises OSError.
    """
    runs = [found for run in storage.list("") if (found := complete_checkpoints(storage, run, pass_over))]
    return [manifest for one in sorted(runs, key=lambda one: one[0].created, reverse=True) for manifest in one]


def write_manifest(storage: CheckpointStorage, manifest: Manifest) -> None:
    """Make it a checkpoint."""
    storage.write(f"{round_folder(manifest.run, manifest.round)}/{MANIFEST}", [seal(manifest)])


def delete_manifest(storage: CheckpointStorage, manifest: Manifest) -> None:
    """Make it none any more; its shards are left."""
    storage.delete(f"{round_folder(manifest.run, manifest.round)}/{MANIFEST}")


def read_shard_file(storage: CheckpointStorage, run: str, file: ShardFile) -> memoryview:
    """The bytes of a shard, checked. Raises DamagedFile."""
    name = f"{round_folder(run, file.round)}/{file.name}"
    try:
        data = storage.read(name)
    except FileNotFoundError:
        raise DamagedFile(f"{name} is missing in {storage.url}") from None
    if len(data) != file.num_bytes or xxhash.xxh3_128_hexdigest(data) != file.digest:
        raise DamagedFile.wrong_digest(f"{name} in {storage.url}")
    return data
