"""The description of the script that this process runs, for the dashboard."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ps_protocol.process_reports import ScriptInfo

from .output import encodable


def describe_script(run_name: str | None) -> ScriptInfo:
    """Return the command line of this process. A path below the working directory is shown from there."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        program = str(path.relative_to(Path.cwd()))
    return ScriptInfo(command=encodable(shlex.join([program, *arguments])), run_name=run_name)
