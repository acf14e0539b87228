"""The two parts of a run that a mode chooses: a schedule decides what counts, and an executor applies it.

                    decides, pure            carries out, on the event loop           with
synchronous mode    Rounds, rounds.py        RoundsExecutor, rounds_executor.py       round_work.py
asynchronous modes  Clocks, clocks.py        QueueExecutor, queue_executor.py         queues, update jobs, pulls

The folders `synchronous` and `asynchronous` contain these files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from ps_protocol.errors import GradpostError
from ps_protocol.fence import Fence
from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.requests import Pull
from ps_protocol.vocabulary import Incarnation, Rank, Round

from ..shard.history import History
from ..shard.reply import Reply
from ..shard.tensors import StagedBlock
from .staging import Admission, Payload, Push, Staged, StagedContribution

T = TypeVar("T")

Read: TypeAlias = Callable[[Mapping[str, str]], T]  # reads the shard; its argument is the metadata of the version


class Schedule(Protocol[Payload]):
    """The members of a run, their staged contributions and their progress on one pserver.

    It never waits, knows no time and touches no tensor.
    """

    members: dict[Rank, Incarnation]
    applied: Round  # the newest applied round, or the number of applied contributions

    @property
    def reported_round(self) -> Round:
        """The round in logs and errors: the one to push for, or in asynchronous modes the number of contributions."""

    @property
    def is_paused(self) -> bool:
        """True if an administrator has paused the run, so that no trainer is late."""

    def admit(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Admission:
        """Return whether a push's round is open or already applied. Changes nothing.

        Called at a request's headers and again after its last byte, because the state changes meanwhile. Raises
        Conflict (`stale_trainer`), StaleRound or FutureRound.
        """

    def stage(self, rank: Rank, round_: Round, push: Push[Payload]) -> Staged:
        """Stage one admitted push: see `StagedContribution.stage`."""

    def staged(self) -> Iterator[tuple[Round, Rank, StagedContribution[Payload]]]:
        """Yield all staged contributions, in order."""

    def check_state(self, rank: Rank, incarnation: Incarnation, round_: Round, version: Round) -> None:
        """Raise Conflict, StaleRound or TryAgain unless optimizer state of `version` may answer a member's request."""

    def freeze(self) -> FrozenRounds:
        """Return the progress of all trainers. Until members are installed no barrier counts. No apply may run."""

    def copy_history(self) -> History:
        """Return the history for a checkpoint of the current state."""

    def describe(self) -> dict[str, Any]:
        """Return the progress of each trainer, as members of `PserverHeartbeat`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The reason why a request waits. Without `since` the wait has no time-out for now."""

    what: str  # the object of the wait, such as a round
    cause: str  # the reason why it is not there yet
    missing: Sequence[Rank] = ()  # the trainers among the causes
    owed: str = ""  # the action that the missing trainers, or the coordinator, have not done yet
    since: float | None = None  # when the round time-out began, by the loop's clock
    facts: Mapping[str, Any] = field(default_factory=dict)  # the facts of the errors that end the wait


def name_trainers(ranks: Sequence[Rank]) -> str:
    """Return `trainer 1` or `trainers 1, 3`."""
    return f"trainer{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


class Executor(Protocol):
    """The part of a run that applies updates, as its schedule decides. Lives on the event loop."""

    @property
    def longest_wait(self) -> tuple[Sequence[Rank], float | None]:
        """The ranks that trainers have waited for longest, and the beginning of the wait, once version 0 is readable.

        The beginning is a time of the loop's clock, or None without a wait.
        """

    @property
    def num_queued(self) -> int:
        """The number of gradients in the queues of blocks."""

    @property
    def is_idle(self) -> bool:
        """True if the shard contains everything that was acknowledged."""

    async def open_reads(self) -> None:
        """Serve the shard's version, which is complete."""

    def stage(self, fence: Fence, push: Push[StagedBlock]) -> Staged:
        """Stage an admitted push."""

    async def commit(self, fence: Fence) -> None:
        """Commit a complete contribution, if that needs no barrier. After TryAgain the whole of it stays staged."""

    async def get(self, fence: Fence, pull: Pull) -> Reply:
        """Return the parameters of a request's round, waiting up to `pull.wait_seconds` for them."""

    async def hold_updates(self) -> None:
        """Wait for the running update. None begins before the caller awaits something, or members are installed."""

    def install_members(self, membership: Membership) -> None:
        """Install a set of members and carry out what follows."""

    async def wait_for_newest(self, round_: Round, *, is_over: bool) -> Round:
        """Return the newest round that is applied or being applied; if it is this one, wait until it is applied.

        In asynchronous modes it is the number of committed contributions; for a run that `is_over`, at least `round_`.
        """

    async def begin_snapshot(self, round_: Round) -> None:
        """Begin a snapshot of the shard, which is at this round. Raises TryAgain."""

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the whole shard right after a round, waiting up to `wait_seconds` for it; None is any whole round.

        In asynchronous modes the shard is read between contributions: all blocks contain the same ones. Raises
        StaleRound if the round is over, RoundPending.
        """

    async def wait_for_apply(self) -> None:
        """Wait for the running apply."""

    async def end_when_applied(self, reason: GradpostError) -> None:
        """End the run with `reason` once the shard contains everything that was acknowledged."""

    async def end(self, reason: GradpostError, *, is_failure: bool = False) -> None:
        """End every wait with `reason` now, and refuse later requests with it. A later reason has no effect.

        A failure is logged and reported to the coordinator.
        """
