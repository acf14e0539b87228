"""How every command speaks: tables for people, JSON for programs, one line on stderr for what went wrong.

stdout carries the answer and nothing else. A command raises, and `main` turns that into a line and one of `EXIT_CODES`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ps_config.environment import SettingsError
from ps_protocol.errors import BadInput, GradpostError
from ps_protocol.printable import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

# As docs/cli.md has them. `up` has those of the scripts besides, and `serve` those of the service.
EXIT_CODES = {
    0: "done, or ended by Ctrl-C where that is how it ends (`--follow`, `tensorboard`)",
    EXIT_FAILED: "the cluster is not there, refuses, or has failed; or a file cannot be read or written; or `doctor` "
    "found something broken",
    EXIT_BAD_INPUT: "asked for something impossible: a wrong option or setting, a parameter or round that is not there",
    130: "interrupted by Ctrl-C",
}


class CommandError(Exception):
    """What a command cannot do, in words that its user can act on."""

    def __init__(self, message: str, *more: str, exit_code: int = EXIT_BAD_INPUT) -> None:
        super().__init__(message)
        self.messages = (message, *more)  # one for each problem
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; numbers go to the right."""

    title: str
    justify: Literal["left", "right"] = "left"


def print_json(value: Any) -> None:
    """Print the answer for a program: one JSON document, ASCII, with members in the order of the schema."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_line(text: str = "", *, flush: bool = False) -> None:
    """Print one line of the answer for a person."""
    print(printable(text), flush=flush)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns; rich draws it to the width that there is."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    def __rich__(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in self.columns:
            is_text = column.justify == "left"
            table.add_column(column.title, justify=column.justify, overflow="fold", no_wrap=not is_text)
        for row in self.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        return table

    def lines(self) -> list[str]:
        """The same for a file or pipe: plain, whole and always the same."""
        cells = [[column.title for column in self.columns], *([printable(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            "  ".join(
                cell.rjust(width) if column.justify == "right" else cell.ljust(width)
                for cell, width, column in zip(row, widths, self.columns, strict=True)
            ).rstrip()
            for row in cells
        ]


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn to the terminal's width, or, into a file or pipe, plain."""
    from rich.console import Console

    table, console = Table(columns, rows), Console()
    if console.is_terminal:
        console.print(table)
    else:
        print("\n".join([*table.lines(), ""]))


def warn(message: str) -> None:
    """Say on stderr what may be wrong with an answer that is given all the same."""
    print(f"gradpost: warning: {printable(message)}", file=sys.stderr)


def exit_with(error: CommandError | GradpostError | SettingsError) -> NoReturn:
    """Say on stderr why there is no answer, in one line for each problem, and exit."""
    if isinstance(error, CommandError):
        exit_code, messages = error.exit_code, error.messages
    else:
        exit_code = EXIT_BAD_INPUT if isinstance(error, BadInput | SettingsError) else EXIT_FAILED
        messages = (str(error),)
    for message in messages:
        print(f"gradpost: error: {printable(message)}", file=sys.stderr)
    sys.exit(exit_code)


def count(number: int, noun: str) -> str:
    """Say how many there are.

    >>> count(1, "block"), count(2000, "block")
    ('1 block', '2,000 blocks')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
