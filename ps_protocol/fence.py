"""The fence: a header of every data request, by which a pserver refuses stale requests.

A request is checked at its headers and again after its last byte, because the run may have changed in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .errors import BadInput, Conflict, StalePserver, StaleRun
from .vocabulary import PROTOCOL_VERSION, Incarnation, PserverIndex, Rank, Round

MAX_DIGITS = 18  # of a number, which then fits into 63 bits
MAX_TEXT = 128  # characters of a run's name or of a plan's digest
FENCE_HEADER = "gradpost-fence"


def is_decimal(text: str, max_digits: int = MAX_DIGITS) -> bool:
    """Return whether a text consists of ASCII digits, of which there are at most `max_digits`.

    >>> is_decimal("7"), is_decimal("-7"), is_decimal("٧"), is_decimal("123", max_digits=2)
    (True, False, False, False)
    """
    return text.isascii() and text.isdigit() and len(text) <= max_digits


class Fence(NamedTuple):
    """The identity of one data request: the words of the header `gradpost-fence`, in this order."""

    protocol: int
    run: str
    attempt: int
    plan: str
    pserver: PserverIndex
    pserver_incarnation: Incarnation
    rank: Rank
    trainer_incarnation: Incarnation
    round: Round

    def to_headers(self) -> dict[str, str]:
        """Return the HTTP header, in lower case as HTTP/2 requires.

        >>> Fence(2, "5f0c", 0, "9a1e", 0, 1, 0, 1, 7).to_headers()
        {'gradpost-fence': '2 5f0c 0 9a1e 0 1 0 1 7'}
        """
        words = (
            f"{self.protocol} {self.run} {self.attempt} {self.plan} {self.pserver} {self.pserver_incarnation} "
            f"{self.rank} {self.trainer_incarnation} {self.round}"
        )
        return {FENCE_HEADER: words}

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Fence:
        """Parse lower-case headers. Raises BadInput."""
        text = headers.get(FENCE_HEADER)
        if text is None:
            raise BadInput(f"the header {FENCE_HEADER} is missing", code="bad_header")
        protocol = text.partition(" ")[0]
        if is_decimal(protocol) and int(protocol) != PROTOCOL_VERSION:
            raise BadInput(
                "this service speaks another version of the protocol",
                code="unsupported_protocol", expected=PROTOCOL_VERSION, actual=protocol,
            )  # fmt: skip
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise BadInput(
                f"the header {FENCE_HEADER} must be nine words with one space between them",
                code="bad_header", expected=" ".join(cls._fields), actual=text[:200],
            )  # fmt: skip
        protocol, run, attempt, plan, *rest = found.groups()
        return cls(int(protocol), run, int(attempt), plan, *map(int, rest))

    def check_addressee(
        self, *, run: str, attempt: int, plan: str, pserver: PserverIndex, pserver_incarnation: Incarnation
    ) -> None:
        """Raise a Conflict if the request was meant for another run, plan or pserver."""
        if (self.run, self.attempt) != (run, attempt):
            raise StaleRun(
                "this request belongs to another run, or to another attempt of this run",
                expected=f"run {run} attempt {attempt}",
                actual=f"run {self.run} attempt {self.attempt}",
            )
        if self.plan != plan:
            raise Conflict(
                "this request was made for another slice plan", code="plan_mismatch", expected=plan, actual=self.plan
            )
        if (self.pserver, self.pserver_incarnation) != (pserver, pserver_incarnation):
            raise StalePserver(
                "this request was meant for another pserver, or another incarnation of this one",
                expected=f"pserver {pserver} incarnation {pserver_incarnation}",
                actual=f"pserver {self.pserver} incarnation {self.pserver_incarnation}",
            )


_TEXTS = ("run", "plan")
FENCE_PATTERN = " ".join(
    f"([!-~]{{1,{MAX_TEXT}}})" if field in _TEXTS else f"([0-9]{{1,{MAX_DIGITS}}})" for field in Fence._fields
)
_PATTERN = re.compile(FENCE_PATTERN)
