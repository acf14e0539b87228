"""The table of error codes in docs/protocol.md."""

from __future__ import annotations

from ps_protocol.errors import ERRORS

from .tables import put_table

COLUMNS = ("code", "class", "status", "retry", "meaning")


def renew(text: str) -> str:
    rows = [
        (f"`{code}`", f"`{error.family.__name__}`", str(error.status), "yes" if error.may_be_retried else "no",
         error.meaning)
        for code, error in ERRORS.items()
    ]  # fmt: skip
    return put_table(text, "Errors", COLUMNS, rows)
