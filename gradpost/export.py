"""`gradpost checkpoint export`: a model file from a checkpoint, or from the logs of a run whose services have stopped.

The logs are read without changing them. Needs torch.

{state_dir}/coordinator.json    the run, and the rounds that rollbacks have undone
            pserver-0/ …        the folder of every pserver, unless it ran on another machine
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES
from ps_protocol.errors import UnsupportedFormat
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PserverIndex, Round
from services.coordinator.restore import RecordFile
from services.coordinator.state.decision import newest_common
from services.coordinator.state.record import RunRecord
from services.pserver.durable.disk import IDENTITY, FolderTaken, StateFolder, folder_path, rank_copies
from services.pserver.durable.storage import RunStorage
from services.pserver.shard.shard_state import ShardState, concatenate
from services.runtime.checkpoints import Manifest, all_checkpoints, read_shard_file
from services.runtime.storage import CheckpointStorage, DamagedFile, open_checkpoint_storage

from .checkpoint import pass_over
from .output import EXIT_FAILED, CommandError, count, print_line, whole_file


def export_model(
    target: Path, place_url: str, run: str | None, round_: int | None, state_dir: Path | None = None
) -> None:
    """Write whole tensors, buffers and tied names of a round into one safetensors file.

    Without `run` and `round_`, export the newest round: of a complete checkpoint or, if the services of the run have
    stopped and left their folders in `state_dir`, of their logs. Unreadable checkpoints are skipped with a line on
    stdout. Raises CommandError if there is no such round.
    """
    place = open_checkpoint_storage(place_url)
    manifests = _exclude_undone(all_checkpoints(place, pass_over), state_dir)
    wanted = [one for one in manifests if run in (None, one.run) and round_ in (None, one.round)]
    if (round_ is None or not wanted) and _export_stopped_run(target, state_dir, run, round_, manifests):
        return
    for manifest in wanted:
        try:
            tensors = read_model(place, manifest)
        except (OSError, UnsupportedFormat) as error:
            print_line(f"skipping round {manifest.round:,}: {error}")
            continue
        _write(target, tensors, manifest.run, manifest.round)
        return
    what = ("" if round_ is None else f" of round {round_:,}") + ("" if run is None else f" of run {run}")
    others = [f"{one.round:,} of run {one.run}" for one in manifests if one not in wanted]
    there = f"Choose one of rounds {', '.join(others)}" if others else "Give another location with --checkpoints"
    raise CommandError(f"there is no complete checkpoint{what} in {place.url}. {there}", exit_code=EXIT_FAILED)


def _exclude_undone(manifests: list[Manifest], state_dir: Path | None) -> list[Manifest]:
    """Return the checkpoints that no rollback of the recorded run has undone."""
    try:
        run = None if state_dir is None else read_record(state_dir)
    except (NotRestorable, OSError):  # `_export_stopped_run` prints it
        run = None
    return [manifest for manifest in manifests if run is None or not run.has_undone(manifest)]


def _export_stopped_run(
    target: Path, state_dir: Path | None, run: str | None, round_: int | None, manifests: list[Manifest]
) -> bool:
    """Write the newest round in the pservers' folders if it is newer than the run's complete checkpoints.

    Returns True if a round was written. Prints which newer rounds are incomplete.
    """
    if state_dir is None:
        return False
    try:
        with open_stopped_run(state_dir, run) as stopped:
            name, found = stopped.record.name, stopped.find_round(round_)
            complete = max((one.round for one in manifests if one.run == name and round_ is None), default=-1)
            is_newer = found is not None and found > complete
            if found is not None and is_newer:
                _write(target, to_tensors(stopped.read(found), stopped.plan, stopped.aliases), name, found)
            newest = complete if found is None else max(found, complete)
            if round_ is None and stopped.newest > newest:
                _print_newer(stopped, is_async=is_newer and stopped.storages[0].is_async)
            return is_newer
    except (NotRestorable, OSError) as error:
        print_line(f"exporting complete checkpoints only, without the logs: {error}")
        return False


def _print_newer(stopped: StoppedRun, *, is_async: bool) -> None:
    if is_async:
        print_line(f"these are the newest values of each pserver; one of them has {stopped.newest:,} contributions")
        return
    remedy = "" if stopped.storages[0].has_log else " (with durability=log they keep the rounds before it)"
    print_line(f"round {stopped.newest:,} is newer, but not all pservers have it{remedy}")


def _write(target: Path, tensors: dict[str, Tensor], run: str, round_: Round) -> None:
    try:
        with whole_file(target) as partial:
            save_file(tensors, partial, {"format": "pt", "run": run, "round": str(round_)})
    except SafetensorError as error:
        raise CommandError(f"{target} cannot be written: {error}", exit_code=EXIT_FAILED) from None
    size = count(target.stat().st_size, "byte")
    print_line(f"{target}: {count(len(tensors), 'tensor')} of round {round_:,} of run {run}, {size}")


def read_model(place: CheckpointStorage, manifest: Manifest) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by their names in the state_dict. Raises DamagedFile."""
    shards = (
        (file.pserver, ShardState.decode(read_shard_file(place, manifest.run, file))[0]) for file in manifest.shards
    )  # one after another, since they may be large
    return to_tensors(shards, manifest.plan, manifest.aliases)


def to_tensors(
    shards: Iterable[tuple[PserverIndex, ShardState]], plan: SlicePlan, aliases: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return tensors by their names in the model's state_dict, in their own dtypes and shapes."""
    stored: dict[str, bytes] = {}

    def collect_buffers() -> Iterable[tuple[PserverIndex, ShardState]]:
        for index, shard in shards:
            stored.update(shard.buffers)
            yield index, shard

    values = concatenate(collect_buffers(), plan)
    tensors = {name: value.to(TORCH_DTYPES[plan.parameter[name].dtype]) for name, value in values.items()}
    for spec in plan.buffers:
        dtype = TORCH_DTYPES[spec.dtype]
        flat = (
            torch.frombuffer(bytearray(stored[spec.name]), dtype=dtype)
            if spec.num_bytes
            else torch.empty(0, dtype=dtype)
        )
        tensors[spec.name] = flat.reshape(spec.shape)
    # safetensors cannot share storage, so a tied name gets a copy; load_state_dict ties it again.
    return tensors | {alias: tensors[name].clone() for alias, name in aliases.items()}


# ---------------------------------------------------------------------- a run whose services have stopped


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
        return max(last for one in self.ranges for _, last in one)

    @property
    def aliases(self) -> dict[str, str]:
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
    except (DamagedFile, UnsupportedFormat) as error:
        raise NotRestorable(str(error)) from None
    if record is None or record.run is None:
        raise NotRestorable(f"{state_dir} has no run")
    return record.run


@contextmanager
def open_stopped_run(state_dir: Path, name: str | None) -> Iterator[StoppedRun]:
    """Lock the folders of the newest run, and yield what they can restore.

    Raises NotRestorable if that fails or the run is not `name`; raises OSError.
    """
    run = read_record(state_dir)
    if run.plan is None:
        raise NotRestorable(f"{state_dir} has no run that has begun")
    if name not in (None, run.name):
        raise NotRestorable(f"{state_dir} has run {run.name}")
    plan = run.plan
    with ExitStack() as stack:
        storages, ranges = [], []
        for index in range(plan.num_pservers):
            folder = _open_folder(state_dir, index)
            stack.callback(folder.close)
            storage = _open_storage(run, plan, folder)
            stack.callback(storage.close)
            found = _find_ranges(run, folder, storage)
            if not found:
                raise NotRestorable(f"pserver {index} cannot restore anything of run {run.name}")
            storages.append(storage)
            ranges.append(found)
        yield StoppedRun(run, plan, tuple(storages), tuple(ranges))


def _open_folder(state_dir: Path, index: PserverIndex) -> StateFolder:
    try:
        copy = next((copy for _, copy in rank_copies(state_dir, index)), 0)
        if not (folder_path(state_dir, index, copy) / IDENTITY).exists():
            raise NotRestorable(f"the folder of pserver {index} is not in {state_dir}")
        return StateFolder(state_dir, index, copy)
    except FolderTaken:
        raise NotRestorable(f"pserver {index} is still running") from None
    except (DamagedFile, UnsupportedFormat) as error:
        raise NotRestorable(str(error)) from None


def _open_storage(run: RunRecord, plan: SlicePlan, folder: StateFolder) -> RunStorage:
    install = folder.identity.run
    if install is None or install.run != run.name or install.plan != plan:
        raise NotRestorable(f"the folder of pserver {folder.index} contains no data of run {run.name}")
    return RunStorage(install.model_copy(update={"began": run.began}), folder.index, folder.log_path)


def _find_ranges(run: RunRecord, folder: StateFolder, storage: RunStorage) -> list[tuple[Round, Round]]:
    """Exclude rounds that were undone by attempts which this pserver did not take part in."""
    assert folder.identity.run is not None
    attempt, ranges = folder.identity.run.attempt, storage.find_restorable()
    for start in [-1 if start is None else start for later, start in run.began.items() if later > attempt]:
        ranges = [(first, min(last, start)) for first, last in ranges if first <= start]
    return ranges
