"""The changes of a run's members, as the messages of the coordinator reach one pserver. Pure."""

from __future__ import annotations

from ps_protocol.errors import Conflict


class MembershipChanges:
    """The newest change of a run's members on this pserver. Messages of earlier changes may arrive at any time.

    freeze n ──► begun = n ──► the coordinator decides on all answers ──► install n ──► ended = n

    The numbers increase, also from attempt to attempt.
    """

    def __init__(self, run: str = "") -> None:
        self.run = run
        self.begun = 0
        self.ended = 0

    def begin_change(self, number: int) -> None:
        """Note a freeze. Raises Conflict if that change is over, or a later one has begun.

        From now on the installation of an earlier change, which was given up for this one, has no effect.
        """
        self.check_change(number)
        self.begun = number

    def check_change(self, number: int) -> None:
        """Raise Conflict unless this change may be installed."""
        if not self.is_current(number):
            raise Conflict("the change of members is over", current=max(self.begun, self.ended), actual=number)

    def is_current(self, number: int) -> bool:
        """Return whether this change may be installed.

        A late installation of an abandoned change must not unfreeze this pserver after a later freeze: the other
        pservers would stay frozen.
        """
        return number >= self.begun and number > self.ended

    def end_change(self, number: int) -> None:
        """Note that this change is installed."""
        self.begun = self.ended = number
