"""The description of the script that this process runs, for the dashboard."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

from ps_protocol.fence import MAX_TEXT
from ps_protocol.process_reports import ScriptInfo


def describe_script(run_name: str | None) -> ScriptInfo:
    """Return the command line and the host of this process. A path below the working directory is shown from there."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        program = str(path.relative_to(Path.cwd()))
    return ScriptInfo(
        command=shlex.join([program, *arguments]), host=socket.gethostname()[:MAX_TEXT], run_name=run_name
    )
