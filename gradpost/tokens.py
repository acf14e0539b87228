"""`gradpost token`: create and show token files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from ps_config.environment import SettingsError, find_path
from ps_config.tokens import PREVIOUS, SCOPES, Scope, TokenPair

from .output import EXIT_FAILED, CommandError, print_line

RANDOM_BYTES = 32


def create_tokens(folder: Path | None, scopes: Sequence[Scope], *, rotate: bool) -> None:
    """Write a token for each scope that has none, or with `rotate` for all; print the files, but no token.

    `admin` is written last: a process that waits for it finds all of them. Raises CommandError for an OSError.
    """
    folder = _find_folder(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for scope in sorted(scopes, key=SCOPES.index):
            file = folder / scope
            if not file.exists():
                _write(file, _make_token(scope))
                print_line(f"{file}: created")
            elif rotate:
                # The older one first, so that a valid token exists at any time.
                _write(file.with_name(scope + PREVIOUS), file.read_text(encoding="ascii").strip())
                _write(file, _make_token(scope))
                print_line(f"{file}: replaced; the previous token stays valid until the next rotation")
            else:
                print_line(f"{file}: kept")
    except OSError as error:
        raise CommandError(f"{error.filename or folder}: {error.strerror}", exit_code=EXIT_FAILED) from None


def show(folder: Path | None, scope: Scope) -> None:
    """Print the newest token of a scope."""
    try:
        newest, *_ = TokenPair(_find_folder(folder) / scope).read()
    except SettingsError as error:
        raise CommandError(str(error), exit_code=EXIT_FAILED) from None
    print(newest)


def _find_folder(folder: Path | None) -> Path:
    folder = folder or find_path("tokens_dir")
    if folder is None:
        raise CommandError("no folder of tokens is given. Give --dir, or set GRADPOST_TOKENS_DIR")
    return folder


def _make_token(scope: Scope) -> str:
    """Return a token with a prefix by which people and scanners recognize it in a log or repository."""
    return f"gradpost_{scope}_{secrets.token_urlsafe(RANDOM_BYTES)}"


def _write(file: Path, token: str) -> None:
    """Write the file atomically, readable by its owner only from its creation on."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w", encoding="ascii") as stream:
            stream.write(f"{token}\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
