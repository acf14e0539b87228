"""What the processes of a local cluster inherit."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])  # the folder that holds our packages


def use_this_python(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy in which `python` is the one that runs this process."""
    folder = os.path.dirname(sys.executable)
    return {**environ, "PATH": folder + os.pathsep + environ.get("PATH", os.defpath)}


def find_our_packages(environ: Mapping[str, str], *, first: bool) -> dict[str, str]:
    """A copy in which Python finds our packages, also from a checkout that is not installed.

    A service looks there `first`: nothing on the user's PYTHONPATH may shadow `services`. A script looks there last.
    """
    given = environ.get("PYTHONPATH")
    if not given and _ROOT in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return {**environ}
    parts = [part for part in ([_ROOT, given] if first else [given, _ROOT]) if part]
    return {**environ, "PYTHONPATH": os.pathsep.join(parts)}
