"""The replicas of one shard: the durable in-sync set, and the choice of the next leader. Pure.

event                                          in_sync                        joining         leader
--------------------------------------------   ----------------------------   -------------   ---------------
a standby begins to follow                     unchanged                      + the standby   unchanged
the leader confirms that it waits for it       + the standby, - its           - the standby   unchanged
                                               predecessor
the leader is suspected                        unchanged                      unchanged       suspected
a standby is lost (not with `wait` the last)   - the standby                  - the standby   unchanged
fail-over, or the leader has restarted         - the new leader               empty           next incarnation

Each event is written to the disk before the leader receives it. The leader waits for every replica in `waits_for`, so
that at each time it waits for all of `in_sync`: a standby is added at the leader first, and removed on the disk first.
A replica is one process. A restarted one has lost its memory, and is another replica.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ps_protocol.membership import RequiredStandbys
from ps_protocol.vocabulary import Incarnation, Round

Replica: TypeAlias = str  # the instance of one process


@dataclass(frozen=True, slots=True)
class Replicas:
    """The leader of a shard and its standbys. `number` increases with each event, as does the leader's copy."""

    leader: Replica
    incarnation: Incarnation = 1
    number: int = 0
    in_sync: frozenset[Replica] = frozenset()  # each holds every acknowledged update
    joining: frozenset[Replica] = frozenset()
    is_suspected: bool = False  # a standby may refuse the stream of this incarnation, which therefore ends

    @property
    def waits_for(self) -> frozenset[Replica]:
        """The standbys that must hold an update before the leader acknowledges it."""
        return self.in_sync | self.joining

    @property
    def required(self) -> RequiredStandbys:
        """The message to the leader."""
        return RequiredStandbys(number=self.number, instances=tuple(sorted(self.waits_for)))

    def begin_joining(self, standby: Replica) -> Replicas:
        """Add a standby that the leader must wait for, and that is not promoted yet."""
        return replace(self, number=self.number + 1, joining=self.joining | {standby})

    def admit(
        self, standby: Replica, incarnation: Incarnation, number: int, lost: Collection[Replica] = ()
    ) -> Replicas:
        """Add a standby to the in-sync set in place of `lost` ones, unless the confirmation is out of date.

        The leader, in this incarnation and with this number, waits for the standby, which holds all that the leader
        has acknowledged.

        >>> replicas = Replicas("a").begin_joining("b")
        >>> sorted(replicas.admit("b", incarnation=1, number=0).in_sync)
        []
        >>> sorted(replicas.admit("b", incarnation=1, number=1).in_sync)
        ['b']
        """
        if standby not in self.joining or (incarnation, number) != (self.incarnation, self.number):
            return self
        in_sync, joining = (self.in_sync - {*lost}) | {standby}, self.joining - {standby, *lost}
        return replace(self, number=number + 1, in_sync=in_sync, joining=joining)

    def note_report(
        self,
        number: int,
        connected: Collection[Replica],
        caught_up: Collection[Replica],
        joining: Collection[Replica],
        *,
        continues: bool,
    ) -> Replicas:
        """Return the replicas after a report of the leader, which has received the set with this number.

        `continues`: with replica_loss `continue` lost members are removed; else only while another member remains.

        >>> replicas = Replicas("a").note_report(0, ["b"], [], ["b"], continues=True)
        >>> replicas.joining, replicas.note_report(1, ["b"], ["b"], [], continues=True).in_sync
        (frozenset({'b'}), frozenset({'b'}))
        """
        replicas, lost = self, self.waits_for.difference(connected)
        if number == self.number:
            # An admission does not change what the leader waits for, so that its report also counts for the next one.
            for standby in sorted(self.joining.intersection(caught_up)):
                predecessors = sorted(replicas.in_sync.intersection(lost))[:1]
                replicas = replicas.admit(standby, self.incarnation, replicas.number, predecessors)
            may_remove = continues or not replicas.in_sync <= lost
            for standby in sorted((replicas.waits_for if may_remove else replicas.joining).intersection(lost)):
                replicas = replicas.remove(standby)
        for standby in sorted(set(joining) - replicas.waits_for):
            replicas = replicas.begin_joining(standby)
        return replicas

    def suspect(self) -> Replicas:
        """Note that a standby may receive the request to refuse the stream of this incarnation."""
        return replace(self, is_suspected=True)

    def clear(self) -> Replicas:
        """Remove all standbys, because another run begins, or because other processes resume this one."""
        return replace(self, number=self.number + 1, in_sync=frozenset(), joining=frozenset())

    def remove(self, standby: Replica) -> Replicas:
        """Let the leader continue without a standby, which is not promoted from now on."""
        in_sync, joining = self.in_sync - {standby}, self.joining - {standby}
        return replace(self, number=self.number + 1, in_sync=in_sync, joining=joining)

    def promote(self, replica: Replica, incarnation: Incarnation) -> Replicas:
        """Make a replica the leader, with a later incarnation. The other members hold every acknowledged update."""
        return Replicas(replica, incarnation, self.number + 1, self.in_sync - {replica})


def choose_leader(replicas: Replicas, num_updates: Mapping[Replica, int]) -> Replica | None:
    """Return a replica that holds every acknowledged update, or None: the fail-over must wait.

    `num_updates` has the replicas that refuse the stream of the incarnation in force; the leader as well if it answers.

    >>> replicas = Replicas("a", in_sync=frozenset({"b"}))
    >>> choose_leader(replicas, {"b": 7, "c": 8})
    'b'
    >>> choose_leader(replicas, {"c": 8}) is None
    True
    """
    if replicas.leader in num_updates:  # it has not ended
        return replicas.leader
    members = num_updates.keys() & replicas.in_sync
    return max(members, key=lambda replica: (num_updates[replica], replica), default=None)


def judge_registration(
    claim: Round | None, known: Round, *, has_member: bool, silent_seconds: float, limits: tuple[float, float]
) -> Literal["leads", "follows", "waits"]:
    """Return the role of a process that registers as a pserver with standbys.

    `claim` is the newest round that it holds; None if it may lack acknowledged updates. `known` is the newest round
    that any process has reported. `has_member`: a standby in sync may replace the process. `silent_seconds` is the
    silence of members that may hold more. A process with all known rounds waits for `limits[0]` seconds, another one
    for `limits[1]`.

    >>> judge_registration(7, 7, has_member=True, silent_seconds=1, limits=(0, 30))
    'leads'
    >>> judge_registration(6, 7, has_member=False, silent_seconds=1, limits=(0, 30))
    'waits'
    """
    has_all = claim is not None and claim >= known
    if has_member and not has_all:
        return "follows"
    return "waits" if silent_seconds < limits[0 if has_all else 1] else "leads"
