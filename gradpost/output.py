"""The output of every command: tables for people, JSON for programs, files, and one line on stderr for an error.

stdout contains the answer and nothing else. A command raises an error, and `main` exits with one of `EXIT_CODES`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

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


def print_json(value: Any) -> None:
    """Print one JSON document in ASCII, with members in the order of the schema."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_line(text: str = "", *, flush: bool = False) -> None:
    """Print one line of text, with control characters escaped."""
    print(printable(text), flush=flush)


def print_rows(rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table and an empty line, or nothing without rows. Numbers are aligned to the right.

    >>> print_rows([{"pserver": 0, "bytes": 1000}, {"pserver": 10, "bytes": 8}])
    pserver  bytes
          0  1,000
         10      8
    <BLANKLINE>
    """
    if not rows:
        return
    lines = [""] * (len(rows) + 1)
    for title in rows[0]:
        values = [row[title] for row in rows]
        cells = [title, *map(_format, values)]
        side = ">" if all(isinstance(value, int | float) for value in values) else "<"
        width = max(map(len, cells))
        lines = [f"{line}  {cell:{side}{width}}" for line, cell in zip(lines, cells, strict=True)]
    for line in [*lines, ""]:
        print(line[2:].rstrip())


def _format(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


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
