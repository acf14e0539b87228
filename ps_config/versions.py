"""Versions of the software that a process runs on."""

from __future__ import annotations

import functools
import platform
from importlib import metadata


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the installed versions of Gradpost, Python and torch, without importing any of them.

    A package is `unknown` where it is only on the path, as in a checkout that is not installed.
    """
    return {"gradpost": _version("gradpost"), "python": platform.python_version(), "torch": _version("torch")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
