"""The registered pservers: indices, incarnations and leases. Pure: the caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_protocol.errors import Conflict, StalePserver
from ps_protocol.membership import PserverRegistered, RegisterPserver
from ps_protocol.messages import (
    PserverHeartbeat,
    PserverInfo,
    ShardFile,
    Software,
)
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

from .record import PserverRecord


@dataclass(slots=True)
class PserverMember:
    """A pserver: its durable record, and the content of its last heartbeat."""

    record: PserverRecord
    seen_at: float  # by the monotonic clock
    here_since: float
    run: str | None = None
    round: Round = 0
    missing: tuple[Rank, ...] = ()
    waiting_seconds: float = 0.0
    attempt: int = 0
    checkpoints: dict[Round, ShardFile] = field(default_factory=dict)
    coming_checkpoints: frozenset[Round] = frozenset()  # requested and not written yet
    is_stopping: bool = False  # it announced that it will return
    software: Software | None = None
    is_restored: bool = False  # restored from the coordinator's record, and not registered since

    @property
    def info(self) -> PserverInfo:
        """The pserver as trainers need it."""
        return self.record.info


class PserverRegistry:
    """At most `num_pservers` living pservers, one for each index, and the lost ones, which may return."""

    def __init__(self, num_pservers: int, lease_seconds: float) -> None:
        self.num_pservers = num_pservers
        self.lease_seconds = lease_seconds
        self.members: dict[PserverIndex, PserverMember] = {}
        self.lost: dict[PserverIndex, PserverMember] = {}
        self.incarnations: dict[PserverIndex, Incarnation] = {}

    @property
    def is_complete(self) -> bool:
        """True if every index has a living pserver."""
        return len(self.members) == self.num_pservers

    def restore(self, record: PserverRecord, now: float) -> None:
        """Restore a recorded pserver, whose lease begins now."""
        if record.info.index < self.num_pservers:
            self.members[record.info.index] = PserverMember(record, now, here_since=now, is_restored=True)

    def register(self, request: RegisterPserver, now: float, restored: Round | None = None) -> PserverRegistered:
        """Return the index and incarnation of a process. A repeated request gets the same answer.

        `restored` is the round of the current attempt that the process has restored, if any.

        A process that has locked the folder of the current incarnation replaces it before the lease ends.
        """
        index = self._choose_index(request)
        member = self.members.get(index)
        if member is None or member.record.instance != request.instance:
            self.incarnations[index] = max(self.incarnations.get(index, 0), request.previous) + 1
            self.lost.pop(index, None)
        info = PserverInfo(
            index=index,
            address=request.address.rstrip("/"),
            incarnation=self.incarnations[index],
            http2=request.http2,
            local=request.local,
        )
        record = PserverRecord(info=info, instance=request.instance, restored=restored)
        self.members[index] = PserverMember(record, now, here_since=now)
        return PserverRegistered(index=index, incarnation=info.incarnation, lease_seconds=self.lease_seconds)

    def _choose_index(self, request: RegisterPserver) -> PserverIndex:
        for index, member in self.members.items():
            if member.record.instance == request.instance:
                return index
        taken = {index for index, member in self.members.items() if not self._succeeds(request, member)}
        free = [index for index in range(self.num_pservers) if index not in taken]
        if request.index is None:
            if not free:
                raise Conflict(
                    f"all {self.num_pservers} pservers are registered. Another pserver can join when one is lost, or "
                    "when the coordinator is started with a larger num_pservers",
                    code="index_taken",
                    current=self.num_pservers,
                )
            return free[0]
        if request.index >= self.num_pservers:
            raise Conflict(
                f"pserver index {request.index} must be less than the number of pservers, {self.num_pservers}",
                code="world_mismatch", expected=f"0 to {self.num_pservers - 1}", actual=request.index,
            )  # fmt: skip
        if request.index not in free:
            holder = self.members[request.index].info.address
            raise Conflict(
                f"a living pserver at {holder} has index {request.index}; stop that pserver, or set another index",
                code="index_taken",
                current=holder,
            )
        return request.index

    def _succeeds(self, request: RegisterPserver, member: PserverMember) -> bool:
        return request.index == member.info.index and request.previous == member.info.incarnation

    def heartbeat(self, index: PserverIndex, message: PserverHeartbeat, now: float) -> None:
        """Renew a lease and store the progress. Raises StalePserver if the sender must register again."""
        member = self.members.get(index) or self.lost.get(index)
        if member is None or member.info.incarnation != message.incarnation:
            raise StalePserver(
                f"pserver {index} incarnation {message.incarnation} is not a member; register again",
                current=member.info.incarnation if member else None,
            )
        if self.lost.pop(index, None):
            member.here_since = now
        self.members[index] = member  # its lease had expired, but its index was not taken
        member.seen_at = now
        member.run, member.round = message.run, message.round
        member.missing, member.waiting_seconds = message.missing, message.waiting_seconds
        member.checkpoints = {file.round: file for file in message.checkpoints}
        member.coming_checkpoints = frozenset(message.coming_checkpoints)
        member.attempt, member.is_stopping = message.attempt, message.is_stopping
        member.software = message.software

    def was_reachable(self, index: PserverIndex, incarnation: Incarnation, since: float, now: float) -> bool:
        """Return whether this incarnation was reachable for a lease, so that a trainer without a connection is cut off.

        A pserver that is about to stop, or that sent no heartbeat since, was not reachable, even if its lease has not
        ended.
        """
        member = self.members.get(index)
        if member is None or member.info.incarnation != incarnation or member.is_stopping:
            return False
        since = max(since, member.here_since)
        is_heard = member.seen_at - since > (now - since) / 2
        return is_heard and now - since > self.lease_seconds

    def expire(self, now: float) -> list[PserverMember]:
        """Move pservers with an expired lease to the lost ones, and return them."""
        lost = [member for member in self.members.values() if now - member.seen_at > self.lease_seconds]
        for member in lost:
            self.lost[member.info.index] = self.members.pop(member.info.index)
        return lost
