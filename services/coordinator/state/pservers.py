"""The registered pservers: indices, incarnations and leases, and the standbys. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ps_protocol.errors import Conflict, StalePserver, TryAgain
from ps_protocol.membership import PserverRegistered, RegisterPserver
from ps_protocol.messages import PserverHeartbeat, PserverInfo
from ps_protocol.standbys import ReportStandby
from ps_protocol.vocabulary import Incarnation, PserverIndex, Round

from .record import PserverRecord
from .replicas import Replica, Replicas

MAX_STANDBYS = 1000


@dataclass(frozen=True, slots=True)
class PserverMember:
    """A pserver: its durable record, and its last heartbeat."""

    record: PserverRecord
    heartbeat: PserverHeartbeat
    seen_at: float  # by the monotonic clock
    present_since: float
    is_lost: bool = False  # its lease has expired; it may return
    is_restored: bool = False  # restored from the coordinator's record, and not registered since

    @classmethod
    def begin(cls, record: PserverRecord, now: float, *, is_restored: bool = False) -> PserverMember:
        """Return a pserver that has not sent a heartbeat; its lease begins now."""
        heartbeat = PserverHeartbeat(incarnation=record.info.incarnation, run=None, round=0)
        return cls(record, heartbeat, now, now, is_restored=is_restored)

    @property
    def info(self) -> PserverInfo:
        """The pserver as trainers need it."""
        return self.record.info

    @property
    def round(self) -> Round:
        """The newest round that the pserver has applied."""
        return self.heartbeat.round

    @property
    def attempt_id(self) -> tuple[str | None, int]:
        """The run and attempt that the pserver serves."""
        return self.heartbeat.run, self.heartbeat.attempt

    @property
    def is_unaware(self) -> bool:
        """True for a standby that was registered as the pserver, and may not know of it yet."""
        return self.record.promoted_at == self.info.incarnation and self.seen_at <= self.present_since

    @property
    def coming_checkpoints(self) -> frozenset[Round]:
        """The rounds of checkpoints that were requested and are not published yet."""
        return frozenset(self.heartbeat.coming_checkpoints)

    @property
    def known_checkpoints(self) -> frozenset[Round]:
        """The rounds of checkpoints that are coming, and of the newest one that is published."""
        published = self.heartbeat.published
        return self.coming_checkpoints if published is None else self.coming_checkpoints | {published.round}


@dataclass(frozen=True, slots=True)
class Standby:
    """A standby, which follows a pserver. It is kept in memory only, since it reports again."""

    report: ReportStandby
    seen_at: float  # by the monotonic clock


@dataclass(frozen=True, slots=True)
class PserverRegistry:
    """At most `num_pservers` pservers, one for each index, and the living standbys."""

    num_pservers: int
    lease_seconds: float
    known: Mapping[PserverIndex, PserverMember] = field(default_factory=dict)  # in order of their indices
    incarnations: Mapping[PserverIndex, Incarnation] = field(default_factory=dict)
    replicas: Mapping[PserverIndex, Replicas] = field(default_factory=dict)
    standbys: Mapping[Replica, Standby] = field(default_factory=dict)
    num_promoted: int = 0  # standbys, in this process
    num_standbys: int = 0  # of each pserver, whose processes have the indices from `num_pservers` on

    @property
    def members(self) -> dict[PserverIndex, PserverMember]:
        """The living pservers in order of their indices."""
        return {index: member for index, member in self.known.items() if not member.is_lost}

    @property
    def is_complete(self) -> bool:
        """True if every index has a living pserver."""
        return len(self.members) == self.num_pservers

    def find(self, index: PserverIndex, incarnation: Incarnation) -> PserverMember | None:
        """Return a pserver, which may be lost; None if it has another incarnation."""
        member = self.known.get(index)
        return None if member is None or member.info.incarnation != incarnation else member

    def find_missing_standbys(self, index: PserverIndex) -> frozenset[Replica]:
        """Return the standbys in sync that a pserver does not reach. With replica_loss `wait` the last ones stay."""
        member = self.members.get(index)
        seen = member.heartbeat.standbys if member else None
        return self.replicas[index].in_sync.difference(seen.connected) if seen else frozenset()

    def is_serving(self, attempt_id: tuple[str, int]) -> bool:
        """Return whether every pserver serves this run and attempt."""
        return self.is_complete and all(member.attempt_id == attempt_id for member in self.members.values())

    def restore(self, record: PserverRecord, now: float, replicas: Replicas) -> PserverRegistry:
        """Restore a recorded pserver, whose lease begins now."""
        index = record.info.index
        if index >= self.num_pservers:
            return self
        return self._with_member(PserverMember.begin(record, now, is_restored=True))._with_replicas(index, replicas)

    def register(
        self, request: RegisterPserver, now: float, restored: Round | None = None, *, is_standby: bool = False
    ) -> tuple[PserverRegistry, PserverRegistered]:
        """Return the registry with a process, and its index and incarnation: the same for a repeated request.

        `restored` is the round of the current attempt that the process has restored, if any. A standby takes the
        place of the pserver that it follows.

        A process that has locked the folder of the current incarnation replaces it before the lease ends. One that was
        fenced gets the next incarnation.
        """
        index = self._choose_index(request)
        known, replicas, incarnation = self.known.get(index), self.replicas.get(index), self.incarnations.get(index, 0)
        promoted_at = known.record.promoted_at if known else 0
        is_repeated = known is not None and not known.is_lost and known.record.instance == request.instance
        if replicas is None or not is_repeated or replicas.is_suspected:
            incarnation = max(incarnation, request.previous) + 1
            replicas = (replicas or Replicas(request.instance)).promote(request.instance, incarnation)
            promoted_at = incarnation if is_standby else promoted_at
        info = PserverInfo(
            index=index,
            address=request.address.rstrip("/"),
            incarnation=incarnation,
            http2=request.http2,
            local=request.local,
        )
        record = PserverRecord(info=info, instance=request.instance, restored=restored, promoted_at=promoted_at)
        registry = replace(
            self,
            incarnations={**self.incarnations, index: incarnation},
            num_promoted=self.num_promoted + is_standby,
        )
        answer = PserverRegistered(index=index, incarnation=incarnation, lease_seconds=self.lease_seconds)
        return registry._with_member(PserverMember.begin(record, now))._with_replicas(index, replicas), answer

    def _with_member(self, member: PserverMember) -> PserverRegistry:
        return replace(self, known=dict(sorted({**self.known, member.info.index: member}.items())))

    def _with_replicas(self, index: PserverIndex, replicas: Replicas) -> PserverRegistry:
        return replace(self, replicas={**self.replicas, index: replicas})

    def change_replicas(self, index: PserverIndex, change: Callable[[Replicas], Replicas]) -> PserverRegistry:
        """Return the registry after a transition of the replicas of a shard."""
        replicas = change(self.replicas[index])
        return self if replicas == self.replicas[index] else self._with_replicas(index, replicas)

    def clear_replicas(self) -> PserverRegistry:
        """Remove all standbys of all shards."""
        return replace(self, replicas={index: replicas.clear() for index, replicas in self.replicas.items()})

    def _choose_index(self, request: RegisterPserver) -> PserverIndex:
        for index, member in self.members.items():
            if member.record.instance == request.instance:
                return index
        own = request.index, request.previous  # what a restarted process succeeds
        taken = {index for index, member in self.members.items() if (index, member.info.incarnation) != own}
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
        if self.num_pservers <= request.index < self.num_pservers * (1 + self.num_standbys):
            follow = request.index % self.num_pservers
            text = f"the process with index {request.index} is a standby of pserver {follow}"
            raise Conflict(text, code="superseded", follow=follow)
        if request.index >= self.num_pservers:
            raise Conflict(
                f"pserver index {request.index} must be less than the number of pservers, {self.num_pservers}",
                code="world_mismatch", expected=f"0 to {self.num_pservers - 1}", actual=request.index,
            )  # fmt: skip
        if request.index not in free:
            member, holder = self.members[request.index], self.members[request.index].info.address
            if member.record.promoted_at > 0 and request.previous < member.info.incarnation:
                text = f"a process at {holder} has replaced pserver {request.index}, and continues without this process"
                if member.heartbeat.run is None:  # it may still turn out to be dead
                    raise TryAgain(text)
                raise Conflict(text, code="superseded", current=member.info.incarnation)
            raise Conflict(
                f"a living pserver at {holder} has index {request.index}; stop that pserver, or set another index",
                code="index_taken",
                current=holder,
            )
        return request.index

    def heartbeat(self, index: PserverIndex, message: PserverHeartbeat, now: float) -> PserverRegistry:
        """Renew a lease and store the progress. Raises StalePserver if the sender must register again."""
        member = self.find(index, message.incarnation)
        if member is None:
            raise StalePserver(
                f"pserver {index} incarnation {message.incarnation} is not a member; register again",
                current=self.known[index].info.incarnation if index in self.known else None,
            )
        if self.replicas[index].is_suspected:
            text = f"a standby may refuse incarnation {message.incarnation} of pserver {index}"
            raise StalePserver(f"{text}; register again, to continue with the next one")
        # The index of a lost pserver was not taken, so that the pserver returns.
        since = now if member.is_lost else member.present_since
        return self._with_member(replace(member, heartbeat=message, seen_at=now, present_since=since, is_lost=False))

    def note_progress(self, info: PserverInfo, round_: Round = 0, coming: tuple[Round, ...] = ()) -> PserverRegistry:
        """Add an applied round and coming checkpoints to the last heartbeat, unless this incarnation is gone."""
        if (member := self.find(info.index, info.incarnation)) is None:
            return self
        last = member.heartbeat
        newer = {"round": max(last.round, round_), "coming_checkpoints": (*last.coming_checkpoints, *coming)}
        return self._with_member(replace(member, heartbeat=last.model_copy(update=newer)))

    def renew_leases(self, now: float) -> PserverRegistry:
        """Renew all leases, although none has sent a heartbeat."""
        renewed = {index: replace(member, seen_at=now, present_since=now) for index, member in self.members.items()}
        standbys = {instance: replace(standby, seen_at=now) for instance, standby in self.standbys.items()}
        return replace(self, known={**self.known, **renewed}, standbys=standbys)

    def expire(self, now: float) -> PserverRegistry:
        """Note that pservers with an expired lease are lost, and remove standbys with an expired lease."""
        lost = {i: replace(m, is_lost=True) for i, m in self.members.items() if now - m.seen_at > self.lease_seconds}
        standbys = {key: one for key, one in self.standbys.items() if now - one.seen_at <= self.lease_seconds}
        return replace(self, known={**self.known, **lost}, standbys=standbys)

    # ------------------------------------------------------------------ standbys

    def report_standby(self, report: ReportStandby, now: float) -> PserverRegistry:
        """Add a standby, or renew its lease.

        Raises TryAgain beyond `MAX_STANDBYS`.
        """
        others = {instance: standby for instance, standby in self.standbys.items() if instance != report.instance}
        if report.is_stopping:
            return replace(self, standbys=others)
        if len(others) >= MAX_STANDBYS:
            raise TryAgain(f"the limit of {MAX_STANDBYS} standbys is reached", code="overloaded")
        return replace(self, standbys={**others, report.instance: Standby(report, now)})

    def drop_standby(self, address: str) -> PserverRegistry:
        """Remove the standby at an address, whose process has ended or become a pserver."""
        return replace(self, standbys={key: one for key, one in self.standbys.items() if one.report.address != address})

    def find_successors(self, index: PserverIndex) -> dict[Replica, Standby]:
        """Return the standbys of a pserver that may replace it."""
        return {key: one for key, one in self.standbys.items() if one.report.follows == index}
