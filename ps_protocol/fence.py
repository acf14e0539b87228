"""The fence: headers of every data request, by which a pserver refuses stale requests.

A request is checked at its headers and again after its last byte, because the run may have changed in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import BadInput, Conflict, StalePserver, StaleRun
from .vocabulary import PROTOCOL_VERSION, Incarnation, PserverIndex, Rank, Round

MAX_DIGITS = 18  # of a number, which then fits into 63 bits
MAX_TEXT = 128  # characters of a run's name or of a plan's digest


def is_decimal(text: str, max_digits: int = MAX_DIGITS) -> bool:
    """Return whether a text consists of ASCII digits, of which there are at most `max_digits`.

    >>> is_decimal("7"), is_decimal("-7"), is_decimal("٧"), is_decimal("123", max_digits=2)
    (True, False, False, False)
    """
    return text.isascii() and text.isdigit() and len(text) <= max_digits


@dataclass(frozen=True, slots=True)
class Fence:
    """The identity of one data request; each field is the header `gradpost-<field with dashes>`."""

    protocol: int
    run: str
    attempt: int
    plan: str
    pserver: PserverIndex
    pserver_incarnation: Incarnation
    rank: Rank
    trainer_incarnation: Incarnation
    round: Round

    def at_round(self, round_: Round) -> Fence:
        """Return the same identity in another round."""
        return replace(self, round=round_)

    def to_headers(self) -> dict[str, str]:
        """Return the HTTP headers, in lower case as HTTP/2 requires."""
        return {header: str(getattr(self, name)) for name, header, _ in _HEADERS}

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Fence:
        """Parse lower-case headers. Raises BadInput, which names the header."""
        values: dict[str, Any] = {}
        for name, header, is_number in _HEADERS:
            text = headers.get(header)
            if text is None:
                raise BadInput(f"the header {header} is missing", code="bad_header")
            if is_number:
                what, expected = "a number", "digits"
                is_valid = is_decimal(text)
            else:
                what, expected = "an identifier", "ASCII"
                is_valid = text.isascii() and text.isprintable() and 0 < len(text) <= MAX_TEXT
            if not is_valid:
                raise BadInput(
                    f"the header {header} must be {what}", code="bad_header", expected=expected, actual=text[:40]
                )
            values[name] = int(text) if is_number else text
            if name == "protocol" and values[name] != PROTOCOL_VERSION:
                raise BadInput(
                    "this service speaks another version of the protocol",
                    code="unsupported_protocol", expected=PROTOCOL_VERSION, actual=text,
                )  # fmt: skip
        return cls(**values)

    def check_addressee(
        self, *, run: str, attempt: int, plan: str, pserver: PserverIndex, pserver_incarnation: Incarnation
    ) -> None:
        """Raise a Conflict if the request was meant for another run, plan or pserver."""
        if (self.run, self.attempt) != (run, attempt):
            raise StaleRun(
                "this request belongs to another run",
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


_HEADERS = tuple(
    (field.name, "gradpost-" + field.name.replace("_", "-"), field.name not in ("run", "plan"))
    for field in fields(Fence)
)
# A regular expression for the value of each header.
HEADER_PATTERNS: Mapping[str, str] = {
    header: f"^[0-9]{{1,{MAX_DIGITS}}}$" if is_number else f"^[ -~]{{1,{MAX_TEXT}}}$"
    for _, header, is_number in _HEADERS
}
