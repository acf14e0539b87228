"""The replica of a shard: a copy of it, which the updates of its leader are applied to one after another.

It holds what a pserver needs to continue the run: the shard, the history and the message that installed the run.
"""

from __future__ import annotations

from typing import TypeVar

from ps_protocol.errors import BadInput, RoundPending, StaleRound
from ps_protocol.membership import InstallRun
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import APPLIED_KEY, HISTORY_KEY
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.compute import ComputeExecutor

from ..durable.records import Record
from ..durable.replay import replay_update
from ..durable.storage import CHAIN_KEY
from ..durable.update_log import LoggedUpdate
from ..run.schedule import Read
from ..shard.captures import Captures
from ..shard.history import History
from ..shard.shard import MASTER_BYTES, Shard
from ..shard.shard_state import ShardState

T = TypeVar("T")

MAX_TENSORS_OF_RECORD = 8  # a gradient, pulled values, and loaded optimizer state, all of the size of the shard
MAX_METADATA_BYTES = 1 << 14  # of a block in a record, most of it its name, several times


class Replica:
    """The shard of a pserver after its newest replayed update. Its compute thread applies updates and reads it."""

    def __init__(
        self,
        installed: InstallRun,
        index: PserverIndex,
        shard: Shard,
        history: History,
        compute: ComputeExecutor,
        chain: str | None,
    ) -> None:
        self.installed = installed
        self.index = index
        self.shard = shard
        self.history = history
        self.chain = chain  # of the newest update; None if the leader does not know it
        self._compute = compute
        self._captures = Captures()
        self._kept_rounds = installed.consistency.max_delay + 1

    def __repr__(self) -> str:
        return f"<Replica of pserver {self.index} [round {self.round} of {self.installed.run}]>"

    @classmethod
    def from_copy(
        cls, installed: InstallRun, index: PserverIndex, data: memoryview, compute: ComputeExecutor
    ) -> Replica:
        """Return the replica in a copy of the shard. Raises BadInput for the copy of another shard."""
        state, metadata = ShardState.decode(data)
        plan = SlicePlan.from_json(installed.plan)
        expected = {"run": installed.run, "attempt": str(installed.attempt), "pserver": str(index), "plan": plan.digest}
        actual = {key: metadata.get(key) for key in expected}
        if actual != expected:
            raise BadInput("the copy is of another shard", code="malformed_frame", expected=expected, actual=actual)
        shard = Shard(plan, index)
        shard.load_state(state)
        history = History.from_json(metadata["history"])
        return cls(installed, index, shard, history, compute, metadata.get(CHAIN_KEY))

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
        """Return whether the updates that follow are those of this installation: no restart or rollback is between."""
        own, other = self.installed, installed
        return (own.run, own.attempt, own.incarnation) == (other.run, other.attempt, other.incarnation)

    # ------------------------------------------------------------------ updates

    async def apply(self, record: Record) -> None:
        """Apply the next update. Raises BadInput (`malformed_frame`) for another one, and UnsupportedFormat.

        After any error the replica must not be used any more.
        """
        run = self._compute.run_at_once if self.shard.is_small else self._compute.run
        await run(self._replay, record)
        self._captures.expire_rounds(self.round)

    def _replay(self, record: Record) -> None:
        update = LoggedUpdate.from_record(record)
        if update.round != self.round + 1:
            raise BadInput(
                f"an update of pserver {self.index} is not the next one",
                code="malformed_frame", expected=f"round {self.round + 1}", actual=f"round {update.round}",
            )  # fmt: skip
        replay_update(self.shard, self.history, update, record.data, keep=self._kept_rounds)
        self._captures.capture_round(self.round)

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
            is_async = self.installed.consistency.is_async
            extra = {APPLIED_KEY: str(self.round), HISTORY_KEY: self.history.to_json()} if is_async else {}
            return read({**self._metadata(), **extra})

        if round_ is None or round_ <= self.round:
            return await self._compute.run(read_in_time)
        try:
            return await self._captures.wait_for_round(round_, read_in_time, wait_seconds, self.round)
        except TimeoutError:
            raise RoundPending(f"the replica is at round {self.round}", round=self.round) from None
