"""The standbys, which follow pservers, and their leases. Pure: the caller passes the time.

A standby is no member of the run. It is kept in memory only, since it reports again; replicas.py has the in-sync sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ps_protocol.errors import Forbidden, TryAgain
from ps_protocol.standbys import ReportStandby, StandbyStatus
from ps_protocol.vocabulary import PserverIndex

from .replicas import Replica, Replicas

MAX_STANDBYS = 1000


@dataclass(frozen=True, slots=True)
class Standby:
    """A standby: its last report, and the time of it by the monotonic clock.

    `may_lead`: its token allows what a pserver does. The coordinator sends its own token to the address of a leader.
    """

    report: ReportStandby
    seen_at: float
    may_lead: bool = True
    is_asked_to_stop: bool = False
    has_stopped: bool = False  # knows of the end, and may go on living


@dataclass(frozen=True, slots=True)
class StandbyRegistry:
    """The living standbys by their instances."""

    members: Mapping[str, Standby] = field(default_factory=dict)

    @property
    def may_exit(self) -> bool:
        """True if all living standbys know that the coordinator is about to exit."""
        return all(standby.has_stopped for standby in self.members.values())

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
            return StandbyRegistry(others)
        if len(others) >= MAX_STANDBYS:
            raise TryAgain(f"the limit of {MAX_STANDBYS} standbys is reached", code="overloaded")
        has_stopped = known is not None and (known.has_stopped or (stop and known.is_asked_to_stop))
        return StandbyRegistry({**others, report.instance: Standby(report, now, may_lead, stop, has_stopped)})

    def expire(self, now: float, lease_seconds: float) -> StandbyRegistry:
        """Remove standbys with an expired lease."""
        return StandbyRegistry({key: one for key, one in self.members.items() if now - one.seen_at <= lease_seconds})

    def renew_leases(self, now: float) -> StandbyRegistry:
        """Renew all leases, after a time in which no report could be received."""
        return StandbyRegistry({key: replace(standby, seen_at=now) for key, standby in self.members.items()})

    def drop(self, address: str) -> StandbyRegistry:
        """Remove the standby at an address, whose process has ended or become a pserver."""
        return StandbyRegistry({key: one for key, one in self.members.items() if one.report.address != address})

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
