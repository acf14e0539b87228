"""Files that people ask for: whole or not there, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .output import EXIT_FAILED, CommandError


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to, which becomes `target` at the end of the block unless that raises.

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
