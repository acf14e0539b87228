"""The table of exit codes and the reference of all commands in docs/cli.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from gradpost.output import EXIT_CODES

from ..markdown import ROOT, section
from .tables import put_table


def renew(text: str) -> str:
    text = put_table(text, "Exit codes", ("code", "meaning"), [(str(n), meaning) for n, meaning in EXIT_CODES.items()])
    return text.replace(section(text, "Reference"), f"\n\n{_make_commands()}\n")


def _make_commands() -> str:
    """What typer writes of all commands, as sections of the document."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "typer", "gradpost.main", "utils", "docs", "--name", "gradpost"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    text = re.sub(r"^#", "###", done.stdout, flags=re.MULTILINE).strip()
    # The settings are in docs/settings.md.
    settings = re.compile(r"(##### `gradpost serve .*?\*\*Options\*\*:\n\n).*?(?=\* `--help`)", re.DOTALL)
    return settings.sub(r"\1* an option for each [setting](settings.md) of the role\n", text)
