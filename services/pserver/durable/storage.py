"""One run's durable state on one pserver: its log, and snapshots of its shard.

log/000000000128-1f0c….safetensors    the shard after round 128; the name has the XXH3-128 of the file

restore(r):   newest whole snapshot c <= r ──► updates c + 1 … r from the log ──► the shard after round r

The file of a snapshot is never changed, so that the shared storage of checkpoints may have a link to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import torch
import xxhash

from ps_protocol.errors import GradpostError, UnsupportedFormat
from ps_protocol.membership import FrozenRounds, HeldRun, InstallRun
from ps_protocol.messages import ShardFile
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PserverIndex, Rank, Round
from services.runtime.checkpoints import is_undone, round_folder, shard_name
from services.runtime.logs import get_logger
from services.runtime.storage import Buffer, DamagedFile, digest_chunks, read_file, write_file

from ..shard.optimizer import LoadedState
from ..shard.shard import Shard
from ..shard.shard_state import History, ShardState
from .update_log import LoggedUpdate, UpdateLog

Ranges: TypeAlias = list[tuple[Round, Round]]  # the first and the last round of each range

CHAIN_KEY = "chain"
_NAME = re.compile(r"(\d{12})-([0-9a-f]{32})\.safetensors")

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


def read_shard(plan: SlicePlan, index: PserverIndex, data: memoryview) -> Restored:
    """Return the shard in a snapshot. Its tensors may be views of `data`. Raises UnsupportedFormat, BadInput."""
    state, metadata = ShardState.decode(data)
    shard = Shard(plan, index)
    shard.load_state(state)
    return Restored(shard, History.from_json(metadata["history"]), metadata.get(CHAIN_KEY))


def replay_update(shard: Shard, history: History, update: LoggedUpdate, data: memoryview, *, keep: int) -> None:
    """Apply a logged update, with the same bits as the first time. The history keeps the newest `keep` rounds."""
    present = tuple(place.name for place in shard.layout.places) if update.present is None else update.present
    loaded = None
    if update.loaded is not None:
        loaded, data = LoadedState.from_log(update.loaded, data, shard.layout)
    shard.apply(shard.aggregator.decode(data, update.present, update.rows), present, update.hyper_parameters, loaded)
    history.add_round(update.round, update.ranks, update.nonfinite, update.norm, keep=keep)


def read_digest(path: Path) -> str:
    """Return the digest in the name of a snapshot.

    >>> read_digest(Path("log/000000000128-0123456789abcdef0123456789abcdef.safetensors"))
    '0123456789abcdef0123456789abcdef'
    """
    return path.stem.partition("-")[2]


class RunStorage:
    """The storage of one run. Synchronous; the writers that `snapshot` returns may run beside other calls."""

    def __init__(self, install: InstallRun, index: PserverIndex, log_path: Path) -> None:
        self.plan = install.plan
        paths = sorted(log_path.iterdir()) if log_path.is_dir() else []
        self._paths = {int(found[1]): path for path in paths if (found := _NAME.fullmatch(path.name))}
        self.complete: tuple[Round, ...] = ()  # the complete checkpoints of the model, as far as is known
        self._install = install
        self._index = index
        self.log = UpdateLog(log_path, install.durability)

    @property
    def rounds(self) -> list[Round]:
        """The rounds of the snapshots, newest first."""
        return sorted(self._paths, reverse=True)

    @property
    def has_log(self) -> bool:
        """True if updates are logged."""
        return self._install.durability != "none"

    def has_long_log(self, share: float = 1.0) -> bool:
        """Return whether the log has reached this share of its limit in bytes, if it has one."""
        return 0 < share * self._install.max_log_bytes <= self.log.num_bytes

    def describe_held(self, restored: Restored, *, has_rebooted: bool = False) -> HeldRun:
        """Return the description of a restored run for the coordinator."""
        history = restored.history
        rounds = FrozenRounds(
            applied=restored.round,
            is_short=restored.is_short,
            participants=history.participants,
            verdicts=history.nonfinite,
            opens={rank: step + 1 for rank, (_, step) in history.steps.items()},
        )
        return HeldRun(
            run=self._install.run,
            attempt=self._install.attempt,
            plan=self.plan.digest,
            rounds=rounds,
            has_rebooted=has_rebooted,
        )

    # ------------------------------------------------------------------ writing

    def snapshot(self, shard: Shard, history: History) -> Callable[[], tuple[ShardFile, Path]]:
        """Copy the shard between two updates. The result writes the copy, on any thread, and may raise OSError.

        It returns the description of the file for its manifest, and the path of the file.
        """
        state = shard.state.clone()
        if self.has_log:
            self.log.begin_segment(state.version, shard.digest() if self.log.tail is None else None)
        steps = {rank: step for rank, (_, step) in history.steps.items()}
        return partial(self._write, state, self.describe_shard(history), steps)

    def describe_shard(self, history: History) -> dict[str, str]:
        """Return the metadata of a shard in a file; the shard has the newest logged update."""
        newest = self.log.tail
        return {
            **({} if newest is None else {CHAIN_KEY: newest.chain}),
            "run": self._install.run,
            "attempt": str(self._install.attempt),
            "pserver": str(self._index),
            "plan": self.plan.digest,
            "history": history.to_json(),
        }

    def _write(
        self, state: ShardState, metadata: Mapping[str, str], steps: dict[Rank, Round]
    ) -> tuple[ShardFile, Path]:
        self._prune()
        chunks, install = state.encode(self.plan, metadata), self._install
        path = self.write_snapshot(state.version, chunks)
        file = ShardFile(
            pserver=self._index,
            name=shard_name(self._index, self.plan.num_pservers, install.attempt, install.incarnation),
            num_bytes=sum(map(len, chunks)),
            digest=read_digest(path),
            round=state.version,
            attempt=install.attempt,
            torch=str(torch.__version__),
            cpu=torch.backends.cpu.get_cpu_capability(),
            steps=steps,
        )
        return file, path

    def write_snapshot(self, round_: Round, chunks: Sequence[Buffer]) -> Path:
        """Write the snapshot after a round; it is on the disk when this returns."""
        path = self.log.folder / f"{round_:012}-{digest_chunks(chunks).hexdigest()}.safetensors"
        write_file(path, chunks)
        self._paths[round_] = path
        return path

    def _delete_others(self, rounds: Collection[Round]) -> None:
        """Delete all other snapshots."""
        for round_ in self.rounds:
            if round_ not in rounds:
                self._paths[round_].unlink(missing_ok=True)
                del self._paths[round_]

    def name_shared(self, file: ShardFile) -> str:
        """Return the name of a snapshot in the shared storage."""
        return f"{round_folder(self._install.run, file.round)}/{file.name}"

    def _prune(self) -> None:
        """Delete what is older than the newest `keep_checkpoints` snapshots, except for complete checkpoints.

        The log reaches back over the same number. This is done before a snapshot is written, so that all rounds which
        could be restored when members began to change can still be restored when the change ends.
        """
        newest = self.rounds[: self._install.keep_checkpoints]
        try:
            self._delete_others({*newest, *self.complete})
            self.log.prune(newest[-1] if newest else 0)
        except OSError as error:
            log.warning("old snapshots and updates could not be deleted", error=str(error))

    def finish(self) -> None:
        """Delete all but the newest snapshot, once it is a checkpoint of the finished run. Raises OSError."""
        self._delete_others(self.rounds[:1])
        self.log.prune(self.rounds[0])
        self.log.shrink()

    # ------------------------------------------------------------------ reading

    def restore(self, newest: Round | None = None) -> Restored | None:
        """Return the shard after round `newest`, by default the newest that can be restored, or None."""
        for round_ in self.rounds:
            if newest is not None and round_ > newest:
                continue
            began = perf_counter()
            data = self.read_snapshot(round_)
            if data is None:
                continue
            restored = read_shard(self.plan, self._index, data)
            loaded = perf_counter()
            self._replay(restored, newest)
            if newest is None or restored.round == newest:
                log.info(
                    "restored from disk", run=self._install.run, round=restored.round, snapshot=round_,
                    bytes=len(data), load_seconds=round(loaded - began, 3),
                    updates=restored.round - round_, replay_seconds=round(perf_counter() - loaded, 3),
                )  # fmt: skip
                return restored
        return None

    def read_snapshot(self, round_: Round) -> memoryview | None:
        """Return the bytes of a snapshot. Return None and discard it if it is damaged."""
        path = self._paths[round_]
        try:
            data = read_file(path)
            if xxhash.xxh3_128_hexdigest(data) != read_digest(path):
                raise DamagedFile.wrong_digest(path)
            _, metadata = ShardState.decode(data)
            # A promoted standby may have been writing a snapshot when the run went back.
            if is_undone(round_, int(metadata["attempt"]), self._install.began):
                raise DamagedFile(f"the snapshot of round {round_} is of an attempt that was rolled back")
        except UnsupportedFormat:
            raise
        except (DamagedFile, FileNotFoundError, GradpostError, KeyError, ValueError) as error:
            log.warning("a snapshot is damaged", round=round_, error=str(error))
            del self._paths[round_]
            return None
        return data

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

    def find_restorable(self, newest: Round | None = None) -> Ranges:
        """Return the ranges of rounds, first and last, that the log's digests allow to restore, newest first.

        With `newest` the snapshot that leads to that round is read, and left out if it is damaged.
        """
        ranges: Ranges = []
        if newest is not None:
            leading = (round_ for round_ in self.rounds if round_ <= newest)
            next((round_ for round_ in leading if self.read_snapshot(round_) is not None), None)
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
        """Continue with this shard, and delete later snapshots, of an attempt that was rolled back."""
        self._install, round_ = install, restored.round
        self.log.durability = install.durability
        if (tail := self.log.tail) is not None and (tail.round, tail.chain) == (round_, restored.chain):
            return  # the log of a replica that was promoted is open
        self._delete_others([kept for kept in self.rounds if kept <= round_])
        for path in [*self.log.folder.glob("*.safetensors"), *self.log.folder.glob(".*.safetensors.*")]:
            if path not in self._paths.values():  # an earlier incarnation had begun to write it
                path.unlink(missing_ok=True)
        if self.has_log:
            self.log.resume(round_, restored.chain or restored.shard.digest())

    def begin_with_copy(self, restored: Restored, data: memoryview) -> None:
        """Begin with the shard of another process: `data` is the file of its snapshot."""
        self.write_snapshot(restored.round, [data])
        self.log.begin_segment(restored.round, restored.chain or restored.shard.digest())

    def close(self) -> None:
        """Close the log. Its readers end, since another attempt may overwrite the end of the file that they read."""
        self.log.positions = []
        self.log.close()
