"""One run's durable state on one pserver: its log, its part of every checkpoint, and checkpoints of its own.

restore(r):   newest whole checkpoint c <= r ──► updates c + 1 … r from the log ──► the shard after round r

An own checkpoint is stored beside the log and serves this pserver alone: it keeps the log short while the coordinator
names no round (ADR 22).

log/000000000128.checkpoint    16 bytes XXH3-128 of the rest, and the shard after round 128
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import torch
import xxhash

from ps_protocol.errors import GradpostError, UnsupportedFormat
from ps_protocol.membership import InstallRun
from ps_protocol.messages import ShardFile
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PserverIndex, Rank, Round
from services.runtime.checkpoints import (
    is_undone,
    list_rounds,
    read_manifest,
    read_shard_file,
    round_folder,
    shard_name,
)
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.storage import (
    Buffer,
    CheckpointStorage,
    DamagedFile,
    digest_chunks,
    read_file,
    seal,
    unseal,
    write_file,
)

from ..shard.history import History
from ..shard.optimizer_blocks import LoadedState
from ..shard.shard import Shard
from ..shard.shard_state import ShardState
from .log_reader import LogReader
from .replay import replay_update
from .update_log import LoggedUpdate, UpdateLog

Ranges: TypeAlias = list[tuple[Round, Round]]  # the first and the last round of each range

CHAIN_KEY = "chain"
_DIGEST_BYTES = 16
_NAME = re.compile(r"(\d{12})\.checkpoint")


class OwnCheckpoints:
    """The own checkpoints in one pserver's folder. Every method blocks on the disk and may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        self._rounds = {int(found[1]) for name in names if (found := _NAME.fullmatch(name))}

    @property
    def rounds(self) -> Collection[Round]:
        """The rounds of the known complete checkpoints."""
        return tuple(self._rounds)

    def write(self, round_: Round, chunks: Sequence[Buffer]) -> None:
        """Write the shard after a round; it is on the disk when this returns."""
        write_file(self._path(round_), [digest_chunks(chunks).digest(), *chunks])
        self._rounds.add(round_)

    def read(self, round_: Round) -> memoryview:
        """Return the bytes of a shard. Raises DamagedFile."""
        path = self._path(round_)
        data = read_file(path)
        if xxhash.xxh3_128_digest(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            raise DamagedFile.wrong_digest(path)
        return data[_DIGEST_BYTES:]

    def discard(self, round_: Round) -> None:
        """Stop using a damaged checkpoint."""
        self._rounds.discard(round_)

    def delete_others(self, rounds: Collection[Round]) -> None:
        """Delete all other checkpoints."""
        for round_ in self._rounds - set(rounds):
            self._path(round_).unlink(missing_ok=True)
            self._rounds.discard(round_)

    def resume(self, round_: Round) -> None:
        """Delete the checkpoints after this round, and those that an earlier incarnation had begun to write."""
        self.delete_others([own for own in self._rounds if own <= round_])
        for path in self._folder.glob(".*.checkpoint.*"):
            path.unlink(missing_ok=True)

    def _path(self, round_: Round) -> Path:
        return self._folder / f"{round_:012}.checkpoint"


log = get_logger()


@dataclass(slots=True)
class Restored:
    """A shard as it was after a round, and the history of the newest rounds."""

    shard: Shard
    history: History
    chain: str | None = None  # of the newest update; None: it begins with this shard
    is_short: bool = False  # there were later rounds

    @property
    def round(self) -> Round:
        """The newest applied round."""
        return self.shard.version


class RunStorage:
    """The storage of one run. Synchronous; the writers that `snapshot` returns may run beside other calls."""

    def __init__(self, install: InstallRun, index: PserverIndex, log_path: Path, place: CheckpointStorage) -> None:
        self.plan = SlicePlan.from_json(install.plan)
        self.checkpoints: dict[Round, ShardFile] = {}  # complete ones of this shard, as far as is known
        self.undone: list[Round] = []  # rounds of checkpoints that a later attempt has rolled back
        self.own_checkpoints = OwnCheckpoints(log_path)
        self.is_over = False  # the run is finished, and needs its last checkpoint only
        self.newest_logged: Round = 0  # since it was opened; the last checkpoint may have a higher number
        self._install = install
        self._index = index
        self._place = place
        self._num_kept = install.keep_checkpoints
        self._name = shard_name(index, self.plan.num_pservers)
        self.log = UpdateLog(log_path, install.durability)
        self._pruning = threading.Lock()
        self._is_promised = False  # `find_restorable` was called: nothing is deleted before the next checkpoint

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all checkpoints from which this pserver can restore its shard, newest first."""
        return sorted({*self.checkpoints, *self.own_checkpoints.rounds}, reverse=True)

    @property
    def log_bytes(self) -> int:
        """Size of the log since the newest checkpoint."""
        return self.log.num_bytes

    @property
    def newest_update(self) -> tuple[Round, str] | None:
        """The round and chain of the newest logged update, for any thread; None without a log."""
        tail = self.log.tail
        return None if tail is None else (tail.round, tail.chain)

    @property
    def is_async(self) -> bool:
        """True if rounds are numbers of this pserver's own contributions."""
        return self._install.consistency.is_async

    @property
    def has_log(self) -> bool:
        """True if updates are logged."""
        return self._install.durability != "none"

    # ------------------------------------------------------------------ writing

    def append(self, update: LoggedUpdate, gradient: Sequence[Buffer], loaded: LoadedState | None = None) -> None:
        """Log an update with the optimizer state that it loads, if the run has a log. An OSError writes nothing."""
        if not self.has_log:
            return
        if loaded is not None:
            update, gradient = replace(update, loaded=loaded.describe()), [*gradient, *loaded.parts()]
        self.log.append(update, gradient)
        self.newest_logged = update.round

    def snapshot(
        self, shard: Shard, history: History, *, is_own: bool = False, copies: bool = True
    ) -> Callable[[], object]:
        """Copy the shard between two updates. The result writes the copy, on any thread, and may raise OSError.

        `copies` is false for a shard that does not change before it is written.
        """
        state = shard.state.clone() if copies else shard.state
        self._is_promised = False
        if self.has_log:
            self.log.begin_segment(state.version, shard.digest() if self.log.tail is None else None)
        metadata = self.describe_shard(history)
        if is_own:
            return lambda: self.own_checkpoints.write(state.version, state.encode(self.plan, metadata))
        steps = {rank: step for rank, (_, step) in history.steps.items()}
        return lambda: self.checkpoints.get(state.version) or self._write(state, metadata, steps)

    def describe_shard(self, history: History) -> dict[str, str]:
        """Return the metadata of a shard in a file; the shard has the newest logged update."""
        newest = self.newest_update
        return {
            **({} if newest is None else {CHAIN_KEY: newest[1]}),
            "run": self._install.run,
            "attempt": str(self._install.attempt),
            "pserver": str(self._index),
            "plan": self.plan.digest,
            "history": history.to_json(),
        }

    def _write(self, state: ShardState, metadata: Mapping[str, str], steps: dict[Rank, Round]) -> ShardFile:
        folder = round_folder(self._install.run, state.version)
        chunks = state.encode(self.plan, metadata)
        file = ShardFile(
            pserver=self._index,
            name=f"{self._name}.safetensors",
            num_bytes=sum(map(len, chunks)),
            digest=digest_chunks(chunks).hexdigest(),
            round=state.version,
            attempt=self._install.attempt,
            torch=str(torch.__version__),
            cpu=torch.backends.cpu.get_cpu_capability(),
            steps=steps,
        )
        self._place.write(f"{folder}/{file.name}", chunks)
        reach_failpoint("checkpoint.shard")
        try:
            self._place.write(f"{folder}/{self._name}.json", [seal(file)])
        except OSError:
            self._place.delete(f"{folder}/{file.name}")  # else it would stay, on a disk that may be full
            raise
        self.checkpoints[state.version] = file
        return file

    def prune_place(self, complete: Sequence[Round] | None, reported: Sequence[Round] = ()) -> None:
        """Delete shards that are older than the newest complete checkpoint, and part of no complete one that is kept.

        Of the shards that the coordinator knew of when it reported the complete checkpoints, the newest are kept too,
        as many as complete checkpoints. It names a later round only after an earlier checkpoint failed, and completes
        none before the newest of them. Shards that the log begins with are kept, complete or not. Nothing is deleted
        while the complete checkpoints are unknown. Raises OSError.
        """
        if not complete or self._is_promised:
            return
        newest = sorted(reported)[-self._num_kept :]
        needed = self.rounds[: self._num_kept]  # see `prune_folder`
        oldest = max(*complete, newest[0] if len(newest) == self._num_kept else 0)
        for round_ in tuple(self.checkpoints):  # another one may be written meanwhile
            if round_ < oldest and round_ not in complete and round_ not in needed:
                with self._pruning:
                    file = None if self._is_promised else self.checkpoints.pop(round_, None)
                if file is None:
                    continue
                try:
                    self._delete(round_)
                except OSError:
                    self.checkpoints[round_] = file  # so that it is tried again
                    raise

    def prune_folder(self, complete: Sequence[Round] | None) -> None:
        """Delete files that no restart needs. The log reaches back over as many checkpoints as are kept.

        A finished run needs its last checkpoint only, once that is complete. Raises OSError.
        """
        with self._pruning:
            rounds = self.rounds[: self._num_kept]
            if not rounds or self._is_promised:
                return
            is_over = self.is_over and (rounds[0] in (complete or ()) or self._has_manifest(rounds[0]))
            self.own_checkpoints.delete_others([] if is_over else rounds)
            self.log.prune(rounds[0 if is_over else -1])
            if is_over:
                self.log.shrink()

    def _has_manifest(self, round_: Round) -> bool:
        manifest = read_manifest(self._place, self._install.run, round_)
        return manifest is not None and manifest.attempt == self._install.attempt

    def _delete(self, round_: Round) -> None:
        folder = round_folder(self._install.run, round_)
        for suffix in ("json", "safetensors"):
            self._place.delete(f"{folder}/{self._name}.{suffix}")

    # ------------------------------------------------------------------ reading

    def find_checkpoints(self) -> None:
        """Find the checkpoints of this shard, without those that a later attempt has rolled back.

        Their contents are checked when they are read. Raises OSError if the place cannot be read.
        """
        self.checkpoints.clear()
        self.undone.clear()
        for round_ in list_rounds(self._place, self._install.run):
            name = f"{round_folder(self._install.run, round_)}/{self._name}.json"
            try:
                file = unseal(self._place.read(name), ShardFile, name)
            except FileNotFoundError:
                continue
            except DamagedFile as error:
                log.warning("a checkpoint is damaged", round=round_, error=str(error))
                continue
            if is_undone(round_, file.attempt, self._install.began):
                self.undone.append(round_)
            else:
                self.checkpoints[round_] = file

    def delete_checkpoints(self) -> None:
        """Delete the checkpoints of this shard, since the run begins again."""
        self.find_checkpoints()
        for round_ in [*self.checkpoints, *self.undone]:
            self._delete(round_)
        self.checkpoints.clear()

    def _delete_leftovers(self) -> None:
        """Delete checkpoints that were rolled back, and those that an earlier incarnation had begun to write."""
        for round_ in self.undone:
            self._delete(round_)
        for round_ in list_rounds(self._place, self._install.run):
            folder = round_folder(self._install.run, round_)
            names = self._place.list(folder)
            for name in names:
                is_incomplete = name == f"{self._name}.safetensors" and f"{self._name}.json" not in names
                if is_incomplete or name.startswith(f".{self._name}."):
                    self._place.delete(f"{folder}/{name}")

    def restore(self, newest: Round | None = None) -> Restored | None:
        """Return the shard after round `newest`, by default the newest that can be restored, or None."""
        for round_ in self.rounds:
            if newest is not None and round_ > newest:
                continue
            began = perf_counter()
            read = self._read(round_)
            if read is None:
                continue
            state, history, chain, num_bytes = read
            restored = Restored(Shard(self.plan, self._index), history, chain)
            restored.shard.load_state(state)
            loaded = perf_counter()
            self._replay(restored, newest)
            if newest is None or restored.round == newest:
                log.info(
                    "restored from disk", run=self._install.run, round=restored.round, checkpoint=round_,
                    bytes=num_bytes, load_seconds=round(loaded - began, 3),
                    updates=restored.round - round_, replay_seconds=round(perf_counter() - loaded, 3),
                )  # fmt: skip
                return restored
        return None

    def _read(self, round_: Round) -> tuple[ShardState, History, str | None, int] | None:
        """Return a checkpoint's shard, history, chain and bytes. Return None and discard it if it is damaged."""
        try:
            if round_ in self.own_checkpoints.rounds:
                data = self.own_checkpoints.read(round_)
            else:
                data = read_shard_file(self._place, self._install.run, self.checkpoints[round_])
            state, metadata = ShardState.decode(data)
            # A promoted standby may have been writing an own checkpoint when the run went back.
            if is_undone(round_, int(metadata.get("attempt", "0")), self._install.began):
                raise DamagedFile(f"the checkpoint of round {round_} is of an attempt that was rolled back")
            return state, History.from_json(metadata["history"]), metadata.get(CHAIN_KEY), len(data)
        except UnsupportedFormat:
            raise
        except (DamagedFile, GradpostError, KeyError, ValueError) as error:
            log.warning("a checkpoint is damaged", round=round_, error=str(error))
            self.own_checkpoints.discard(round_)
            self.checkpoints.pop(round_, None)
            return None

    def _replay(self, restored: Restored, newest: Round | None) -> None:
        for update, record in self.log.read_after(restored.round, restored.chain):
            if newest is not None and update.round > newest:
                break
            keep = self._install.consistency.max_delay + 1
            replay_update(restored.shard, restored.history, update, record.data, keep=keep)
            restored.chain = record.chain
        if restored.shard.published is not None:
            restored.shard.published.discard_deltas()
        restored.is_short = self.has_log and newest is None and self.log.is_short

    def read_updates(self, after: Round, chain: str | None = None) -> LogReader:
        """Return a reader of the log after this round: see `LogReader`."""
        return LogReader(self.log, after, chain, lambda: max(self.rounds, default=0))

    def find_restorable(self, newest: Round | None = None) -> Ranges:
        """Return the ranges of rounds, first and last, that the log's digests allow to restore, newest first.

        With `newest` the checkpoint that leads to that round is read, and left out if it is damaged. The run may go
        back to any of these rounds, so none is deleted before the run continues and makes another checkpoint.
        """
        ranges: Ranges = []
        with self._pruning:
            self._is_promised = True
        if newest is not None:
            leading = (round_ for round_ in self.rounds if round_ <= newest)
            next((round_ for round_ in leading if self._read(round_) is not None), None)
        for round_ in self.rounds:
            last = round_
            for update, _ in self.log.read_after(round_):
                last = update.round
                if ranges and last == ranges[-1][0]:
                    last = ranges.pop()[1]
                    break
            ranges.append((round_, last))
        return ranges

    def resume(self, restored: Restored, install: InstallRun) -> None:
        """Continue with this shard, and delete later checkpoints, of an attempt that was rolled back.

        A place that cannot delete now delays nothing: later incarnations recognise such checkpoints by their attempt.
        """
        self._install, round_ = install, restored.round
        for later in [later for later in self.checkpoints if later > round_]:
            self.undone.append(later)
            del self.checkpoints[later]
        self.own_checkpoints.resume(round_)
        if self.has_log:
            self.log.resume(round_, restored.chain or restored.shard.digest())
        try:
            self._delete_leftovers()
        except OSError as error:
            log.warning("incomplete checkpoints could not be deleted", error=str(error))

    def promise_restorable(self) -> Ranges:
        """Return the result of `find_restorable` for a log that this process has written, without reading it."""
        with self._pruning:
            self._is_promised = True
            assert self.log.tail is not None
            return [(min(self.rounds), self.log.tail.round)]

    def begin_with_copy(self, restored: Restored, data: memoryview) -> None:
        """Begin with the shard of another process: `data` is the file of its checkpoint."""
        self.own_checkpoints.write(restored.round, [data])
        self.log.begin_segment(restored.round, restored.chain or restored.shard.digest())

    def is_at(self, restored: Restored) -> bool:
        """Return whether the log is open, and ends with the newest update of this shard."""
        return self.newest_update is not None and self.newest_update == (restored.round, restored.chain)

    def continue_run(self, install: InstallRun) -> None:
        """Continue with the open log, after a promotion. Raises OSError if the place cannot be read."""
        self._install, self._num_kept = install, install.keep_checkpoints
        self.find_checkpoints()

    def close(self) -> None:
        """Close the log. Its readers end, since another attempt may overwrite the end of the file that they read."""
        self.log.tail = None
        self.log.close()
