"""The replica of a shard: a run that replays the updates of its leader instead of applying contributions.

Each update is in its own log before it is applied, so that its folder restores the same bits. Reads, captures,
snapshots and their ends are those of any run in the synchronous mode.
"""

from __future__ import annotations

from collections import deque

from ps_protocol.errors import BadInput, Conflict
from ps_protocol.membership import InstallRun
from ps_protocol.vocabulary import PserverIndex, Round

from ..durable.records import Record
from ..durable.storage import Restored, RunStorage, read_shard, replay_update
from ..durable.update_log import LoggedUpdate
from ..run.rounds import Apply
from ..run.sync_run import SyncRun
from ..shard.shard import MASTER_BYTES
from ..shard.shard_state import ShardState

MAX_TENSORS_OF_RECORD = 8  # a gradient and loaded optimizer state, all of the size of the shard
MAX_REPORTS = 1000  # of a lag, whose seconds are counted from the oldest one
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


class Replica(SyncRun):
    """The run of a pserver, as a standby repeats it. Only the follower lets it apply updates."""

    follows = True
    storage: RunStorage

    def prepare(self, restored: Restored | None) -> None:
        """Begin with the copy, which is complete."""
        super().prepare(restored)
        self.is_readable = True
        self.held: Round = self.round  # the newest update that is in memory, to be logged and applied
        self.held_chain = self.chain
        self.confirmed: Round = 0  # the newest update that the leader may count on
        self.has_failed_to_log = False  # the newest try: until one succeeds, only applied updates are confirmed

    def __repr__(self) -> str:
        return f"<Replica of pserver {self.index} [round {self.round} of {self.installed.run}]>"

    @property
    def chain(self) -> str:
        """The chain of the newest logged update, which is applied, too, between two updates."""
        assert self.storage.log.tail is not None
        return self.storage.log.tail.chain

    @property
    def restored(self) -> Restored:
        """The shard and the history with which a pserver continues."""
        return Restored(self.shard, self.schedule.history, self.chain)

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
        return (own.run, own.attempt, own.durability) == (other.run, other.attempt, other.durability)

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

    async def replay(self, update: LoggedUpdate, record: Record) -> None:
        """Log the next update and apply it. An OSError changes nothing; after another error the replica is broken.

        Conflict (`diverged`) is an update for another shard.
        """
        self.schedule.applying = Apply(update.round, update.ranks, ())
        try:
            await self.compute.run(self._replay, update, record)  # never on the loop, since it waits for a disk
        except BaseException:
            self.schedule.applying = None
            raise
        self.schedule.finish_apply(self.stepped_history)
        self._captures.expire_rounds(self.round)

    def _replay(self, update: LoggedUpdate, record: Record) -> None:
        assert self.storage.log.tail is not None
        assert self.storage.log.tail.round == self.shard.version == update.round - 1
        if update.shard is not None and update.shard != self.shard.digest():
            text = f"the replica differs from pserver {self.index} after round {self.shard.version}"
            raise Conflict(text, code="diverged", current=self.shard.version)
        self.storage.log.append_frame(update.round, [record.body], record.chain)
        history = self.schedule.copy_history()
        replay_update(self.shard, history, update, record.data, keep=self.schedule.max_delay + 1)
        self._captures.capture_round(update.round)
        self.stepped_history = history


class Lag:
    """The rounds that the leader of a replica has reported, and the replica has not applied."""

    def __init__(self) -> None:
        self.round: Round = 0  # of the replica
        self._reports: deque[tuple[Round, float]] = deque()  # later rounds than the replica's, with their times

    def note_leader(self, round_: Round, now: float) -> None:
        """Note the newest round of the leader."""
        if round_ > max(self.round, self._newest) and len(self._reports) < MAX_REPORTS:
            self._reports.append((round_, now))
        elif round_ > max(self.round, self._newest):
            self._reports[-1] = round_, self._reports[-1][1]

    def note_applied(self, round_: Round) -> None:
        """Note the newest round of the replica."""
        self.round = round_
        while self._reports and self._reports[0][0] <= round_:
            self._reports.popleft()

    def reset(self, round_: Round) -> None:
        """Begin again with a replica after this round: the reports may be of another attempt."""
        self.round = round_
        self._reports.clear()

    @property
    def _newest(self) -> Round:
        return self._reports[-1][0] if self._reports else 0

    @property
    def rounds(self) -> int:
        """The number of rounds that the replica lacks."""
        return max(0, self._newest - self.round)

    def seconds(self, now: float) -> float:
        """Return the time since the leader reported the first round that the replica lacks; 0 if it lacks none."""
        return now - self._reports[0][1] if self._reports else 0.0
