"""Reading a run whose services have stopped from their checkpoints and logs, without changing them.

{state_dir}/coordinator.json    the run, and the rounds that rollbacks have undone
            pserver-0/ …        the folder of every pserver, unless it ran on another machine
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PserverIndex, Round
from services.coordinator.decision import newest_common
from services.coordinator.record import RecordFile, RunRecord
from services.pserver.durable.disk import IDENTITY, FolderTaken, StateFolder
from services.pserver.durable.storage import RunStorage
from services.pserver.shard_state import ShardState
from services.runtime.storage import CheckpointStorage, DamagedFile


class NotRestorable(Exception):  # noqa: N818 - an adjective, as the field uses it
    """No round of the run can be restored from the folders, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """The storage of all pservers of a run, with the ranges (first, last) of rounds that each can restore."""

    record: RunRecord
    plan: SlicePlan
    storages: tuple[RunStorage, ...]
    ranges: tuple[list[tuple[Round, Round]], ...]

    @property
    def newest(self) -> Round:
        """The newest round that any pserver can restore."""
        return max(last for one in self.ranges for _, last in one)

    @property
    def aliases(self) -> dict[str, str]:
        """The names of tied tensors, by alias."""
        return {} if self.record.declaration is None else self.record.declaration.aliases

    def find_round(self, wanted: Round | None) -> Round | None:
        """Return the wanted round, by default the newest, if all pservers can restore it; else None.

        In asynchronous modes pservers have no round in common: return the number of contributions that all of them
        have applied, and `read` each pserver's newest values.
        """
        if self.storages[0].is_async:
            return min(max(last for _, last in one) for one in self.ranges) if wanted is None else None
        found = newest_common(self.newest if wanted is None else wanted, self.ranges)
        return found if wanted in (None, found) else None

    def read(self, round_: Round) -> list[tuple[PserverIndex, ShardState]]:
        """Return all shards after a round of `find_round`. Raises NotRestorable for a damaged checkpoint, OSError."""
        shards = []
        for index, storage in enumerate(self.storages):
            restored = storage.restore(None if storage.is_async else round_)
            if restored is None:
                raise NotRestorable(f"pserver {index} cannot restore round {round_:,}")
            shards.append((index, restored.shard.state))
        return shards


def read_record(state_dir: Path) -> RunRecord:
    """Return the coordinator's record of the newest run. Raises NotRestorable if there is none, OSError."""
    try:
        record = RecordFile(state_dir).read()
    except DamagedFile as error:
        raise NotRestorable(str(error)) from None
    if record is None or record.run is None:
        raise NotRestorable(f"{state_dir} has no run")
    return record.run


@contextmanager
def open_stopped_run(state_dir: Path, place: CheckpointStorage, name: str | None) -> Iterator[StoppedRun]:
    """Lock and read the folders of the newest run (`name`, if given). Raises NotRestorable, OSError."""
    run = read_record(state_dir)
    if run.plan is None:
        raise NotRestorable(f"{state_dir} has no run that has begun")
    if name not in (None, run.name):
        raise NotRestorable(f"{state_dir} has run {run.name}")
    plan = SlicePlan.from_json(run.plan)
    with ExitStack() as stack:
        storages, ranges = [], []
        for index in range(plan.num_pservers):
            folder = _open_folder(state_dir, index)
            stack.callback(folder.close)
            storage = _open_storage(run, plan, folder, place)
            stack.callback(storage.close)
            found = _find_ranges(run, folder, storage)
            if not found:
                raise NotRestorable(f"pserver {index} cannot restore anything of run {run.name}")
            storages.append(storage)
            ranges.append(found)
        yield StoppedRun(run, plan, tuple(storages), tuple(ranges))


def _open_folder(state_dir: Path, index: PserverIndex) -> StateFolder:
    if not (state_dir / f"pserver-{index}" / IDENTITY).exists():
        raise NotRestorable(f"the folder of pserver {index} is not in {state_dir}")
    try:
        return StateFolder(state_dir, index)
    except FolderTaken:
        raise NotRestorable(f"pserver {index} is running") from None
    except DamagedFile as error:
        raise NotRestorable(str(error)) from None


def _open_storage(run: RunRecord, plan: SlicePlan, folder: StateFolder, place: CheckpointStorage) -> RunStorage:
    install = folder.identity.run
    if install is None or install.run != run.name or SlicePlan.from_json(install.plan).digest != plan.digest:
        raise NotRestorable(f"the folder of pserver {folder.index} has nothing of run {run.name}")
    storage = RunStorage(install.model_copy(update={"began": run.began}), folder.index, folder.log_path, place)
    storage.find_checkpoints()
    return storage


def _find_ranges(run: RunRecord, folder: StateFolder, storage: RunStorage) -> list[tuple[Round, Round]]:
    """Exclude rounds that were undone by attempts which this pserver did not take part in."""
    assert folder.identity.run is not None
    attempt, ranges = folder.identity.run.attempt, storage.find_restorable()
    for start in [-1 if start is None else start for later, start in run.began.items() if later > attempt]:
        ranges = [(first, min(last, start)) for first, last in ranges if first <= start]
    return ranges
