"""The standbys, which follow pservers, and their leases. Pure: the caller passes the time.

A standby is no member of the run. It is kept in memory only, since it reports again; replicas.py has the in-sync sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ps_protocol.errors import Conflict, Forbidden, TryAgain
from ps_protocol.standbys import ReportStandby, StandbyAnswer, StandbyStatus
from ps_protocol.vocabulary import PserverIndex

from .cluster import Cluster
from .joining import check_protocol
from .replicas import Replica, Replicas

MAX_STANDBYS = 1000


@dataclass(frozen=True, slots=True)
class Standby:
    """A standby: its last report, and the time of it by the monotonic clock.

    `may_lead`: its token allows what a pserver does. The coordinator sends its own token to the address of a leader.
    """

    report: ReportStandby
    seen_at: float
    is_asked_to_stop: bool = False
    may_lead: bool = True


@dataclass(frozen=True, slots=True)
class StandbyRegistry:
    """The living standbys by their instances."""

    members: Mapping[str, Standby] = field(default_factory=dict)
    stopped: frozenset[str] = frozenset()  # instances that know of the end, and may go on living

    @property
    def may_exit(self) -> bool:
        """True if all living standbys know that the coordinator is about to exit."""
        return not self.members.keys() - self.stopped

    def report(self, report: ReportStandby, now: float, *, stop: bool, may_lead: bool = True) -> StandbyRegistry:
        """Add a standby, or renew its lease. `stop` is part of the answer.

        A standby knows of the end once it reports again or stops, because an answer may be lost. Raises TryAgain beyond
        `MAX_STANDBYS`, and Forbidden for a standby that another token has reported.
        """
        known = self.members.get(report.instance)
        if known is not None and known.may_lead and not may_lead:
            raise Forbidden("another token, of scope `admin`, has reported this standby")
        others = {instance: standby for instance, standby in self.members.items() if instance != report.instance}
        if report.is_stopping:
            return StandbyRegistry(others, self.stopped - {report.instance})
        if len(others) >= MAX_STANDBYS:
            raise TryAgain(f"the limit of {MAX_STANDBYS} standbys is reached", code="overloaded")
        stopped = self.stopped | {report.instance} if stop and known and known.is_asked_to_stop else self.stopped
        return StandbyRegistry({**others, report.instance: Standby(report, now, stop, may_lead)}, stopped)

    def expire(self, now: float, lease_seconds: float) -> StandbyRegistry:
        """Remove standbys with an expired lease."""
        living = {key: standby for key, standby in self.members.items() if now - standby.seen_at <= lease_seconds}
        return self if len(living) == len(self.members) else StandbyRegistry(living, self.stopped & living.keys())

    def renew_leases(self, now: float) -> StandbyRegistry:
        """Renew all leases, after a time in which no report could be received."""
        return replace(self, members={key: replace(standby, seen_at=now) for key, standby in self.members.items()})

    def drop(self, address: str) -> StandbyRegistry:
        """Remove the standby at an address, whose process has ended or become a pserver."""
        members = {key: standby for key, standby in self.members.items() if standby.report.address != address}
        return StandbyRegistry(members, self.stopped & members.keys())

    def find_successors(self, index: PserverIndex) -> dict[Replica, Standby]:
        """Return the standbys of a pserver that may replace it."""
        return {key: one for key, one in self.members.items() if one.report.follows == index and one.may_lead}

    def describe(self, now: float, replicas: Mapping[PserverIndex, Replicas]) -> tuple[StandbyStatus, ...]:
        """Return the standbys for readers, in order of the pservers that they follow."""
        ordered = sorted(self.members.values(), key=lambda standby: (standby.report.follows, standby.report.address))
        return tuple(
            StandbyStatus(
                **dict(standby.report),
                heartbeat_age_seconds=now - standby.seen_at,
                role=_find_role(standby.report, replicas),
            )
            for standby in ordered
        )


def _find_role(
    report: ReportStandby, replicas: Mapping[PserverIndex, Replicas]
) -> Literal["following", "joining", "in_sync"]:
    known = replicas.get(report.follows)
    if known is None or report.instance not in known.waits_for:
        return "following"
    return "in_sync" if report.instance in known.in_sync else "joining"


def answer_standby(cluster: Cluster, report: ReportStandby, *, may_lead: bool = True) -> StandbyAnswer:
    """Return the answer to a report: the pserver to follow, if it serves the current run.

    Raises Conflict for an index without a pserver.
    """
    check_protocol(report.protocol)
    cluster.require_pservers()
    registry, run = cluster.registry, cluster.run
    if report.follows >= registry.num_pservers:
        raise Conflict(
            f"there is no pserver {report.follows} to follow",
            code="world_mismatch", expected=f"0 to {registry.num_pservers - 1}", actual=report.follows,
        )  # fmt: skip
    stop = cluster.exit_when_done and run.record.is_deserted and run.is_result_saved
    answer = StandbyAnswer(lease_seconds=cluster.lease_seconds, stop=stop, exit_code=cluster.exit_code)
    leader, lost = registry.members.get(report.follows), registry.lost.get(report.follows)
    if lost is not None and lost.record.promoted_at:
        return answer.model_copy(update={"incarnation": lost.info.incarnation})
    if leader is None or leader.attempt_id != run.record.attempt_id:
        return answer
    may_join = may_lead and run.settings.is_replicated and run.record.state == "training"
    return answer.model_copy(
        update={
            "leader": leader.info.address,
            "incarnation": leader.info.incarnation,
            "run": run.record.name,
            "attempt": run.record.attempt,
            "round": leader.round,
            "is_joining": may_join and report.instance not in registry.replicas[report.follows].in_sync,
        }
    )
