"""The replica of a shard: a copy of it, which the updates of its leader are applied to one after another.

It holds what a pserver needs to continue the run: the shard, the history and the message that installed the run. Each
update is in its own log before it is applied, so that its folder restores the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from ps_protocol.errors import BadInput, RoundPending, StaleRound, TryAgain
from ps_protocol.membership import InstallRun
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.compute import ComputeExecutor

from ..durable.records import Record
from ..durable.replay import replay_update
from ..durable.snapshot_writer import SnapshotWriter
from ..durable.storage import Restored, RunStorage, read_shard
from ..durable.update_log import LoggedUpdate
from ..metrics import PserverMetrics
from ..run.run import Read
from ..shard.captures import Captures
from ..shard.shard import MASTER_BYTES
from ..shard.shard_state import ShardState

P = ParamSpec("P")
T = TypeVar("T")

MAX_TENSORS_OF_RECORD = 8  # a gradient and loaded optimizer state, all of the size of the shard
MAX_METADATA_BYTES = 1 << 14  # of a block in a record, most of it its name, several times


def restore_copy(installed: InstallRun, index: PserverIndex, data: memoryview) -> Restored:
    """Return the shard in a copy. Its tensors may be views of `data`. Raises BadInput for the copy of another shard."""
    _, metadata = ShardState.decode(data)
    plan = installed.plan
    expected = {"run": installed.run, "attempt": str(installed.attempt), "pserver": str(index), "plan": plan.digest}
    actual = {key: metadata.get(key) for key in expected}
    if actual != expected:
        raise BadInput("the copy is of another shard", code="malformed_frame", expected=expected, actual=actual)
    return read_shard(plan, index, data)


class Replica:
    """The shard of a pserver after its newest replayed update. Its compute thread applies updates and reads it."""

    def __init__(
        self,
        installed: InstallRun,
        index: PserverIndex,
        restored: Restored,
        storage: RunStorage,
        compute: ComputeExecutor,
        metrics: PserverMetrics,
    ) -> None:
        self.installed = installed
        self.index = index
        self.shard = restored.shard
        self.history = restored.history
        self.chain = restored.chain  # of the newest update; None if the leader does not know it
        self.held: Round = self.round  # the newest update that is in memory, to be logged and applied
        self.held_chain = self.chain
        self.confirmed: Round = 0  # the newest update that the leader may count on
        self.has_failed_to_log = False  # the newest try: until one succeeds, only applied updates are confirmed
        self.storage = storage
        self.writer = SnapshotWriter(storage, installed.checkpoint_rounds, metrics)
        self._compute = compute
        self._captures = Captures()
        self._kept_rounds = installed.consistency.max_delay + 1

    def __repr__(self) -> str:
        return f"<Replica of pserver {self.index} [round {self.round} of {self.installed.run}]>"

    @property
    def restored(self) -> Restored:
        """The shard and the history with which a pserver continues."""
        return Restored(self.shard, self.history, self.chain)

    @property
    def round(self) -> Round:
        """The newest applied round."""
        return self.shard.version

    @property
    def max_record_bytes(self) -> int:
        """The size that no record of the leader exceeds."""
        layout = self.shard.layout
        tensors = MAX_TENSORS_OF_RECORD * MASTER_BYTES * layout.num_elements
        return tensors + len(layout.places) * MAX_METADATA_BYTES + (1 << 20)

    def continues(self, installed: InstallRun) -> bool:
        """Return whether the updates of this installation may continue those of the replica; no rollback is between.

        The log of another incarnation must confirm that, with the chain of the newest update.
        """
        own, other = self.installed, installed
        is_same = (own.run, own.attempt, own.durability) == (other.run, other.attempt, other.durability)
        return is_same and (self.chain is not None or own.incarnation == other.incarnation)

    # ------------------------------------------------------------------ updates

    def hold_update(self, record: Record) -> LoggedUpdate:
        """Return the next update, which is held from now on. After an error nothing has changed.

        Raises BadInput (`malformed_frame`) for another update, and UnsupportedFormat.
        """
        update = LoggedUpdate.from_record(record)
        if update.round != self.held + 1:
            raise BadInput(
                f"an update of pserver {self.index} is not the next one",
                code="malformed_frame", expected=f"round {self.held + 1}", actual=f"round {update.round}",
            )  # fmt: skip
        self.held, self.held_chain = update.round, record.chain
        return update

    def discard_held(self) -> None:
        """Hold nothing but the applied updates any more."""
        self.held, self.held_chain = self.round, self.chain

    async def log_update(self, update: LoggedUpdate, record: Record) -> None:
        """Write the next update to the log. Raises OSError, after which nothing has changed."""
        newest = self.storage.newest_update
        assert newest is not None
        assert newest[0] == self.round == update.round - 1
        await self._run(self.storage.log.append_frame, update.round, [record.body], record.chain)

    async def apply(self, update: LoggedUpdate, record: Record) -> None:
        """Apply an update that was logged. After an error the replica must not be used any more."""
        await self._run(self._replay, update, record)
        self._captures.expire_rounds(self.round)

    async def _run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await (self._compute.run_at_once if self.shard.is_small else self._compute.run)(fn, *args, **kwargs)

    def _replay(self, update: LoggedUpdate, record: Record) -> None:
        replay_update(self.shard, self.history, update, record.data, keep=self._kept_rounds)
        self.chain = record.chain
        self._captures.capture_round(self.round)

    async def write_snapshot_if_due(self) -> None:
        """Copy the shard, if a snapshot is due, and begin to write the copy."""
        if self.writer.begin_if_due(self.round):
            with suppress(TryAgain):  # the writer has logged the error
                await self.writer.write(self.shard, self.history, self._compute)

    async def find_difference(self, expected: dict[str, str]) -> str | None:
        """Return the name of the first block, or else buffer, whose digest is not the expected one; None if all are."""
        own = await self._compute.run(self.shard.digest_blocks)
        return next((name for name in {**own, **expected} if own.get(name) != expected.get(name)), None)

    def end(self, reason: Exception) -> None:
        """End the reads that wait for a round."""
        self._captures.end(reason)

    # ------------------------------------------------------------------ reads, as of `ReadableShard`

    def check_readable(self) -> None:
        """Return immediately, since a replica is complete."""

    async def wait_until_held(self) -> None:
        """Return immediately, since the updates of a replica are in the log of its leader."""

    async def read_now(self, read: Read[T]) -> T:
        """Return what `read` returns between two updates."""
        return await self._compute.run(lambda: read(self._metadata()))

    def _metadata(self) -> dict[str, str]:
        return {"run": self.installed.run, "attempt": str(self.installed.attempt), "round": str(self.round)}

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Return what `read` returns right after a round, waiting up to `wait_seconds` for it; None is any round.

        Raises StaleRound if the round is over, FutureRound, and RoundPending.
        """

        def read_in_time() -> T:
            if round_ not in (None, self.round):
                raise StaleRound(f"round {round_} is over", current=self.round)
            return read(self._metadata())

        if round_ is None or round_ <= self.round:
            return await self._compute.run(read_in_time)
        try:
            return await self._captures.wait_for_round(round_, read_in_time, wait_seconds, self.round)
        except TimeoutError:
            raise RoundPending(f"the replica is at round {self.round}", round=self.round) from None
