"""What this process runs on, for those who look whether all run on the same."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

from .messages import Software

UNKNOWN = "unknown"  # a checkout that is on the path and not installed


@functools.cache
def this_software() -> Software:
    """Versions as they are installed; imports none of the packages."""
    return Software(gradpost=_version("gradpost"), python=platform.python_version(), torch=_version("torch"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN
