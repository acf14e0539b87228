"""The names of all settings, of services and trainers alike, so that every process refuses a misspelt one.

A setting `round_timeout_seconds` is the variable `GRADPOST_ROUND_TIMEOUT_SECONDS` in the environment and the key
`round_timeout_seconds` in the TOML file that `GRADPOST_SETTINGS_FILE` names. Both may hold settings of every role,
so that one environment or file serves a whole cluster. Each role reads its own.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

PREFIX = "GRADPOST_"
SETTINGS_FILE_VARIABLE = "GRADPOST_SETTINGS_FILE"

# `make reference` collects them from the settings of all roles, which no process imports.
_SETTINGS = frozenset(Path(__file__).with_name("names.txt").read_text(encoding="utf-8").split())
KNOWN_VARIABLES = frozenset(PREFIX + name.upper() for name in _SETTINGS) | {SETTINGS_FILE_VARIABLE}


class SettingsError(ValueError):
    """Settings that cannot be used as given; the message says which and what to write instead."""


class CallError(TypeError):
    """A wrong or unsupported call. It is a TypeError, whose message is enough for the script that made it."""

    __module__, __qualname__ = "builtins", "TypeError"


def check_base_url(url: str) -> str:
    """Return the base URL of a service without a slash at its end; `host:port` is one over HTTP.

    Raises ValueError for any other text.

    >>> check_base_url("https://10.0.0.5:7070/"), check_base_url("localhost:7070")
    ('https://10.0.0.5:7070', 'http://localhost:7070')
    """
    if re.fullmatch(r"[\w.-]+:\d{1,5}", url):
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"expected a base URL such as http://10.0.0.5:7070, got {url!r}")
    return url.rstrip("/")


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise SettingsError if a variable has the prefix and is no setting of any role, suggesting the nearest one."""
    unknown = sorted(
        name for name in environ if name.upper().startswith(PREFIX) and name.upper() not in KNOWN_VARIABLES
    )
    if not unknown:
        return
    message = "; ".join(f"unknown environment variable {name}{suggest(name, KNOWN_VARIABLES)}" for name in unknown)
    if "KUBERNETES_SERVICE_HOST" in environ:
        message += " (Kubernetes adds variables named after Services: set enableServiceLinks: false in the pod)"
    raise SettingsError(message)


def read_settings_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the TOML file that the environment names; empty without one. Blocks on the disk.

    Raises SettingsError if it cannot be read or holds a key that is no setting of any role.
    """
    name = environ.get(SETTINGS_FILE_VARIABLE)
    if not name:
        return {}
    try:
        values = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # tomllib's and the decoder's errors are ValueErrors
        raise SettingsError(f"{SETTINGS_FILE_VARIABLE}={name} cannot be read: {error}") from error
    if unknown := sorted(set(values) - _SETTINGS):
        raise SettingsError("; ".join(f"unknown key in {name} {key}{suggest(key, _SETTINGS)}" for key in unknown))
    return values


def find_setting(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return one setting as text, from the environment or else from the file; None if neither has it."""
    value = environ.get(PREFIX + name.upper()) or read_settings_file(environ).get(name)
    return str(value) if value else None


def find_path(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return one setting that is a file or folder, as `find_setting` does."""
    value = find_setting(name, environ)
    return Path(value) if value else None


def stamp_file(path: Path) -> tuple[int, ...]:
    """Return what is different once a file was written or replaced; empty if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


def suggest(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, if there is one.

    >>> suggest("GRADPOST_COORDINATR", KNOWN_VARIABLES)
    '; did you mean GRADPOST_COORDINATOR?'
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
