"""`gradpost token`: create and show token files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Literal

import typer

from ps_config.environment import SettingsError, find_path
from ps_config.tokens import PREVIOUS, SCOPES, Scope, TokenPair

from .output import EXIT_FAILED, CommandError, print_line

RANDOM_BYTES = 32


app = typer.Typer(help="Create and show the tokens of a cluster.", rich_markup_mode=None, no_args_is_help=True)
Folder = Annotated[
    Path | None, typer.Option("--dir", metavar="DIR", help="The folder of the tokens [default: GRADPOST_TOKENS_DIR].")
]


@app.command("create")
def create_tokens(
    folder: Folder = None,
    scope: Annotated[
        Literal["read", "train", "admin", "all"], typer.Option(help="The scope to create a token for.")
    ] = "all",
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace existing tokens; each stays valid until the next rotation.")
    ] = False,
) -> None:
    """Write random tokens into files that only their owner can read. Existing files are kept without --rotate.

    Services and trainers use new tokens without a restart. To revoke a leaked token immediately, rotate twice.
    """
    folder = _find_folder(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in SCOPES if scope == "all" else (scope,):  # `admin` last, for which a process may wait
            file = folder / each
            if not file.exists():
                _write(file, _make_token(each))
                print_line(f"{file}: created")
            elif rotate:
                # The older one first, so that a valid token exists at any time.
                _write(file.with_name(each + PREVIOUS), file.read_text(encoding="ascii").strip())
                _write(file, _make_token(each))
                print_line(f"{file}: replaced; the previous token stays valid until the next rotation")
            else:
                print_line(f"{file}: kept")
    except OSError as error:
        raise CommandError(f"{error.filename or folder}: {error.strerror}", exit_code=EXIT_FAILED) from None


@app.command("show")
def show_token(
    folder: Folder = None, scope: Annotated[Scope, typer.Option(help="The scope of the token.")] = "read"
) -> None:
    """Print the newest token of a scope, for example for curl."""
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
