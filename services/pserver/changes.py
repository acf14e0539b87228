"""Which change of members is the newest, on one pserver: messages of earlier ones may arrive at any time. Pure.

freeze n ──► begun = n ──► what is decided of what was answered ──► install n ──► ended = n
"""

from __future__ import annotations

from ps_protocol.errors import Conflict


class Changes:
    """Those of one run. Their numbers go up, also from attempt to attempt."""

    def __init__(self, run: str = "") -> None:
        self.run = run
        self.begun = 0
        self.ended = 0

    def begin(self, number: int) -> None:
        """A freeze has come, whatever it is answered. Raises Conflict if that change is over, or a later one has begun.

        From now on the end of an earlier change, which was given up for this one, does nothing.
        """
        self.check(number)
        self.begun = number

    def check(self, number: int) -> None:
        """Raise Conflict unless this change may end here."""
        if not self.is_news(number):
            raise Conflict("this change of members is over", current=max(self.begun, self.ended), actual=number)

    def is_news(self, number: int) -> bool:
        """Whether the end of this change is to be carried out.

        That of one that was given up may arrive when all others have answered the freeze of a later one, and would set
        this pserver going alone.
        """
        return number >= self.begun and number > self.ended

    def end(self, number: int) -> None:
        """This change is installed."""
        self.begun = self.ended = number
