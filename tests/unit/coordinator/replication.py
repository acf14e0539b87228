"""Abstract pservers, standbys, trainers and disks for the model of replication: see test_replication_model.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from services.coordinator.state.replicas import Replica, Replicas
from services.pserver.run.staging import MembershipChanges

Update: TypeAlias = tuple[int, int]  # a round, and the attempt of its contributions
Log: TypeAlias = tuple[Update, ...]


def common_prefix(one: Log, other: Log) -> Log:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


@dataclass(frozen=True)
class Rules:
    continues: bool  # replica_loss
    num_shards: int
    num_standbys: int
    num_trainers: int


@dataclass(frozen=True)
class Durable:
    """The disk of the coordinator."""

    replicas: tuple[Replicas, ...]
    number: int = 0
    attempt: int = 0
    bases: tuple[int, ...] = (0,)  # the round that each attempt began with

    def find_base(self, attempt: int) -> int:
        """Return the newest round that a process of an earlier attempt may still hold as the run has it."""
        return min(self.bases[attempt + 1 :])


@dataclass
class Disk:
    log: Log = ()
    attempt: int = 0
    follows: int = 0  # the newest incarnation


@dataclass
class Reply:
    rank: int
    shard: int
    incarnation: int
    attempt: int
    log: Log  # which the reply acknowledges


@dataclass
class Trainer:
    rank: int
    attempt: int = 0
    step: int = 1  # under way; the contributions to earlier steps are gone
    received: set[int] = field(default_factory=set)  # shards that have acknowledged this step
    refused: dict[int, int] = field(default_factory=dict)  # by shard: no reply of this incarnation counts any more
    newest: dict[int, int] = field(default_factory=dict)  # by shard: the incarnation of the last reply

    def follow(self, durable: Durable) -> None:
        if self.attempt < durable.attempt:
            self.attempt = durable.attempt
            self.step, self.received = durable.bases[-1] + 1, set()

    def may_address(self, process: Process) -> bool:
        """Return whether the trainer knows no later incarnation than that of a leader."""
        newest = max(self.newest.get(process.shard, 0), self.refused.get(process.shard, 0) + 1)
        return process.incarnation >= newest

    def find_received(self, shard: int) -> int:
        """Return the newest round that the trainer has received from a shard."""
        return self.step if shard in self.received else self.step - 1

    def refuse(self, shard: int, incarnation: int) -> None:
        self.refused[shard] = max(self.refused.get(shard, 0), incarnation)

    def receive(self, reply: Reply, num_shards: int) -> bool:
        is_refused = reply.incarnation <= self.refused.get(reply.shard, 0)
        if is_refused or (reply.attempt, len(reply.log)) != (self.attempt, self.step):
            return False
        self.received.add(reply.shard)
        self.newest[reply.shard] = reply.incarnation
        if len(self.received) == num_shards:
            self.step, self.received = self.step + 1, set()
        return True


@dataclass
class Process:
    """A pserver: it follows, or leads with an incarnation."""

    shard: int
    slot: int
    instance: Replica
    log: Log = ()  # on its disk as well, in the kernel's memory
    attempt: int = 0
    is_stopped: bool = False
    # follower
    follows: int = 0  # the newest incarnation whose stream it has accepted
    refused: int = 0  # the newest incarnation whose stream it does not accept any more
    confirmed: int = 0  # the length of the log that its leader may count on
    # leader
    incarnation: int = 0
    number: int = 0
    waits_for: frozenset[Replica] = frozenset()
    held: dict[Replica, int] = field(default_factory=dict)  # the length of each standby's log
    acknowledged: int = 0  # the length of the log that may be acknowledged
    is_frozen: bool = True
    changes: MembershipChanges = field(default_factory=MembershipChanges)
    staged: set[int] = field(default_factory=set)
    requests: set[tuple[int, int]] = field(default_factory=set)  # (rank, step) that wait for a reply

    @property
    def is_leading(self) -> bool:
        return self.incarnation > 0

    @property
    def newest(self) -> int:
        return max(self.follows, self.incarnation)

    @property
    def has_all_confirmed(self) -> bool:
        """Return whether the process may lead."""
        return len(self.log) >= self.confirmed

    def drop_held(self) -> None:
        """Lose the newest update, which a follower has confirmed and cannot write to its disk before it is fenced."""
        if not self.is_leading and self.confirmed and self.refused < self.follows:
            self.log = self.log[:-1]

    def push(self, rank: int, step: int, rules: Rules) -> None:
        """Accept a contribution, apply what is complete, and note that the trainer waits."""
        if not self.is_frozen and step == len(self.log) + 1:
            self.staged.add(rank)
            if len(self.staged) == rules.num_trainers:
                self.log, self.staged = (*self.log, (step, self.attempt)), set()
        self.requests.add((rank, step))

    def may_acknowledge(self, length: int) -> bool:
        """Return whether the leader may acknowledge this part of its log."""
        if self.is_stopped or self.refused >= self.incarnation:
            return False
        return all(self.held.get(standby, 0) >= length for standby in self.waits_for)

    def stream_to(self, follower: Process) -> None:
        """Let a follower agree on the last common update, and append one."""
        if self.incarnation <= max(follower.refused, follower.follows - 1, follower.incarnation):
            return
        follower.incarnation, follower.follows, follower.attempt = 0, self.incarnation, self.attempt
        follower.is_frozen = True
        common = common_prefix(self.log, follower.log)
        is_copy = len(common) < len(follower.log)
        follower.log = self.log[: len(common) + 1]
        follower.confirmed = len(follower.log) if is_copy else max(follower.confirmed, len(follower.log))
        self.held[follower.instance] = len(follower.log)

    def freeze(self, number: int, durable: Durable, *, refused: int | None) -> bool:
        """Stop updates. A candidate also refuses the incarnation in force, as its leader does itself."""
        if not self.changes.is_current(number):
            return False
        self.changes.begin_change(number)
        self.is_frozen = True
        if refused is not None:
            self.refused = max(self.refused, refused)
        if self.attempt < durable.attempt:  # it has missed a rollback
            self.confirmed = 0
            self.log, self.attempt = self.log[: durable.find_base(self.attempt)], durable.attempt
        return self.has_all_confirmed

    def install(self, number: int, durable: Durable) -> bool:
        replicas = durable.replicas[self.shard]
        is_ours = replicas.leader == self.instance and replicas.incarnation >= self.incarnation
        if not is_ours or not self.changes.is_current(number) or durable.attempt < self.attempt:
            return False
        if durable.attempt > self.attempt:
            self.log, self.attempt, self.held = self.log[: durable.find_base(self.attempt)], durable.attempt, {}
            self.staged, self.requests, self.acknowledged = set(), set(), len(self.log)
        if replicas.incarnation > self.incarnation:
            self.incarnation, self.number, self.waits_for = replicas.incarnation, 0, frozenset()
            self.held, self.staged, self.requests = {}, set(), set()
            self.acknowledged = len(self.log)
        self.set_replicas(replicas)
        self.changes.end_change(number)
        self.is_frozen = False
        return True

    def set_replicas(self, replicas: Replicas) -> None:
        if replicas.incarnation == self.incarnation and replicas.number >= self.number:
            self.number, self.waits_for = replicas.number, replicas.waits_for

    def confirm(self, standby: Replica) -> tuple[int, int] | None:
        """Return incarnation and number if the leader waits for a standby that has caught up."""
        has_caught_up = standby in self.waits_for and self.held.get(standby, -1) >= self.acknowledged
        return (self.incarnation, self.number) if has_caught_up and self.is_leading else None
