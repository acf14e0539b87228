"""The output of every command: tables for people, JSON for programs, files, and one line on stderr for an error.

stdout contains the answer and nothing else. A command raises an error, and `main` exits with one of `EXIT_CODES`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from ps_config.environment import SettingsError
from ps_protocol.errors import BadInput, GradpostError
from ps_protocol.printable import printable

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

# Documented in docs/cli.md. `up` and `serve` also exit with the codes of the scripts and of the service.
EXIT_CODES = {
    0: "done, or ended by Ctrl-C where that is how it ends (`--follow`, `dashboard`, `tensorboard`, `mlflow`, `wandb`)",
    EXIT_FAILED: "the cluster is missing, refuses the request, or has failed; or a file cannot be read or written; "
    "or `doctor` found something broken",
    EXIT_BAD_INPUT: "the request is impossible: a wrong option or setting, or a parameter or round that does not exist",
    130: "interrupted by Ctrl-C",
}


class CommandError(Exception):
    """An error that ends a command, with a message for its user."""

    def __init__(self, message: str, *more: str, exit_code: int = EXIT_BAD_INPUT) -> None:
        super().__init__(message)
        self.messages = (message, *more)  # one for each problem
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; numbers are aligned to the right."""

    title: str
    justify: Literal["left", "right"] = "left"


def print_json(value: Any) -> None:
    """Print one JSON document in ASCII, with members in the order of the schema."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_line(text: str = "", *, flush: bool = False) -> None:
    """Print one line of text, with control characters escaped."""
    print(printable(text), flush=flush)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn to the width of a terminal, or as plain text of any width to a file or pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, cells = Console(), [[printable(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        lines = [[column.title for column in columns], *cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        places = [(width, {"left": "<", "right": ">"}[c.justify]) for width, c in zip(widths, columns, strict=True)]
        for line in lines:
            padded = (f"{cell:{side}{width}}" for cell, (width, side) in zip(line, places, strict=True))
            print("  ".join(padded).rstrip())
        print()
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify=column.justify, overflow="fold", no_wrap=column.justify == "right")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a path beside `target`, and rename it to `target` at the end of the block unless that raises.

    Raises CommandError for an OSError.
    """
    partial = target.with_name(target.name + ".part")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror}", exit_code=EXIT_FAILED) from None
    finally:
        partial.unlink(missing_ok=True)


def warn(message: str) -> None:
    """Print a warning about the answer on stderr."""
    print(f"gradpost: warning: {printable(message)}", file=sys.stderr)


def exit_with(error: CommandError | GradpostError | SettingsError) -> NoReturn:
    """Print one line on stderr for each problem, and exit."""
    if isinstance(error, CommandError):
        exit_code, messages = error.exit_code, error.messages
    else:
        exit_code = EXIT_BAD_INPUT if isinstance(error, BadInput | SettingsError) else EXIT_FAILED
        messages = (str(error),)
    for message in messages:
        print(f"gradpost: error: {printable(message)}", file=sys.stderr)
    sys.exit(exit_code)


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the right form.

    >>> count(1, "block"), count(2000, "block")
    ('1 block', '2,000 blocks')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
