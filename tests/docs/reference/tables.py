"""Writing tables of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..markdown import section

_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def put_table(text: str, heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The text with this table in place of the one that stands under the heading."""
    under = section(text, heading)
    [old] = _TABLE.findall(under)
    lines = [_line(columns), "|" + "---|" * len(columns) + "\n", *map(_line, rows)]
    return text.replace(under, under.replace(old, "".join(lines)))


def _line(cells: Sequence[str]) -> str:
    """A row; an empty cell is one space wide."""
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"


def code(words: Iterable[object]) -> str:
    """The words in backticks, one after another."""
    return " ".join(f"`{word}`" for word in words)
