"""Names and manifests of checkpoint files.

{run}/{round}/pserver-0-of-2.0-3.safetensors    the shard of pserver 0, written in attempt 0 by incarnation 3
              manifest.json                     written last: it makes the shards that it names a checkpoint

No two processes write the same file, so that a process which was replaced harms no checkpoint. The coordinator alone
writes manifests, and alone deletes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

import xxhash
from pydantic import Field

from ps_protocol.consistency import Consistency
from ps_protocol.errors import UnsupportedFormat
from ps_protocol.fields import Message
from ps_protocol.membership import Controls, Plan
from ps_protocol.messages import ShardFile
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

from .logs import get_logger
from .storage import CheckpointStorage, DamagedFile, seal, unseal

log = get_logger()

MANIFEST = "manifest.json"
COORDINATOR_FOLDER = "coordinator"  # in the state folder of the coordinator

_ROUND = re.compile(r"\d{12}")

PassOver = Callable[[str, Round, OSError | UnsupportedFormat], None]


class Manifest(Message):
    """The file that makes shards a checkpoint. Bits are reproducible with the `torch` and `cpu` of its shards only."""

    format: Literal[1] = 1
    run: str
    attempt: int
    round: Round
    consistency: Consistency
    plan: Plan
    aliases: dict[str, str] = Field(
        default={}, description="names of tied parameters, and the parameters that they share"
    )
    shards: tuple[ShardFile, ...]
    controls: Controls = Field(default=Controls(), description="administrator's controls at the time of writing")
    created: str = Field(description="date and time in UTC, ISO 8601")

    @property
    def newest_steps(self) -> dict[Rank, Round]:
        """The newest step of each rank in any shard; asynchronous modes only."""
        newest: dict[Rank, Round] = {}
        for file in self.shards:
            for rank, step in file.steps.items():
                newest[rank] = max(step, newest.get(rank, 0))
        return newest


def round_folder(run: str, round_: Round) -> str:
    """Return the folder of the checkpoint of a round.

    >>> round_folder("4f1c", 128)
    '4f1c/000000000128'
    """
    return f"{run}/{round_:012}"


def shard_name(index: PserverIndex, num_pservers: int, attempt: int, incarnation: Incarnation) -> str:
    """Return the name of a shard's file, which only this incarnation of the pserver writes.

    >>> shard_name(0, 2, attempt=1, incarnation=3)
    'pserver-0-of-2.1-3.safetensors'
    """
    return f"pserver-{index}-of-{num_pservers}.{attempt}-{incarnation}.safetensors"


def list_rounds(storage: CheckpointStorage, run: str) -> list[Round]:
    """Return the rounds with any file, newest first."""
    return sorted((int(name) for name in storage.list(run) if _ROUND.fullmatch(name)), reverse=True)


def read_manifest(storage: CheckpointStorage, run: str, round_: Round) -> Manifest | None:
    """Return the manifest of a round, None if it is missing. Raises DamagedFile, OSError, UnsupportedFormat."""
    name = f"{round_folder(run, round_)}/{MANIFEST}"
    try:
        data = storage.read(name)
    except FileNotFoundError:
        return None
    return unseal(data, Manifest, f"{name} in {storage.url}")


def is_undone(round_: Round, attempt: int, began: Mapping[int, Round | None]) -> bool:
    """Return True if a later attempt started before this round, so that the round was discarded.

    `began` has the round from which each attempt started, None if it started with initial values.

    >>> is_undone(10, 0, {1: 12, 2: 7}), is_undone(10, 1, {1: 12, 2: 10}), is_undone(0, 0, {1: None})
    (True, False, True)
    """
    return any(later > attempt and (start is None or start < round_) for later, start in began.items())


def _pass_over_damage(run: str, round_: Round, error: OSError | UnsupportedFormat) -> None:
    """Raise errors other than damage: an unreadable manifest may be intact, and an older one would lose rounds."""
    if not isinstance(error, DamagedFile):
        raise error
    log.warning("skipping a checkpoint with a damaged manifest", run=run, round=round_, error=str(error))


def _pass_over_runs_of_others(run: str, round_: Round, error: OSError | UnsupportedFormat) -> None:
    """Pass over another format, too: the place may be shared with users of another version."""
    if not isinstance(error, UnsupportedFormat):
        _pass_over_damage(run, round_, error)
    else:
        log.warning("skipping a checkpoint of another version", run=run, round=round_, error=str(error))


def complete_checkpoints(
    storage: CheckpointStorage, run: str, pass_over: PassOver = _pass_over_damage
) -> list[Manifest]:
    """Return the manifests of a run, newest first. `pass_over` handles errors; by default it raises all but damage.

    Manifests of a later attempt come before the rounds that it discarded.
    """
    found = []
    for round_ in list_rounds(storage, run):
        try:
            manifest = read_manifest(storage, run, round_)
        except (OSError, UnsupportedFormat) as error:
            pass_over(run, round_, error)
            continue
        if manifest is not None:
            found.append(manifest)
    return sorted(found, key=lambda manifest: (manifest.attempt, manifest.round), reverse=True)


def all_checkpoints(storage: CheckpointStorage, pass_over: PassOver = _pass_over_runs_of_others) -> list[Manifest]:
    """Return the manifests of all runs, newest first; `--resume` and `export` use the first.

    Runs are sorted by the date of their newest manifest. Within a run dates are ignored, since clocks may jump. Raises
    OSError.
    """
    runs = [found for run in storage.list("") if (found := complete_checkpoints(storage, run, pass_over))]
    return [manifest for one in sorted(runs, key=lambda one: one[0].created, reverse=True) for manifest in one]


def write_manifest(storage: CheckpointStorage, manifest: Manifest) -> None:
    """Write a manifest, which completes its checkpoint."""
    storage.write(f"{round_folder(manifest.run, manifest.round)}/{MANIFEST}", [seal(manifest)])


def read_shard_file(storage: CheckpointStorage, run: str, file: ShardFile) -> memoryview:
    """Return the bytes of a shard after checking their digest. Raises DamagedFile."""
    name = f"{round_folder(run, file.round)}/{file.name}"
    try:
        data = storage.read(name)
    except FileNotFoundError:
        raise DamagedFile(f"{name} is missing in {storage.url}") from None
    if len(data) != file.num_bytes or xxhash.xxh3_128_hexdigest(data) != file.digest:
        raise DamagedFile.wrong_digest(f"{name} in {storage.url}")
    return data
