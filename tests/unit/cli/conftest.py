"""The command line as its user meets it: exit code, stdout, stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import gradpost
from gradpost.main import main

ROOT = Path(gradpost.__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    exit_code: int | str | None
    stdout: str
    stderr: str


RunCommand = Callable[..., Outcome]


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run `gradpost` in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gradpost", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Outcome(caught.value.code, *capsys.readouterr())

    return run


def run_process(*arguments: str, **environment: str) -> Outcome:
    """Run a Python process that finds Gradpost, and no folder that happens to be called like a part of it."""
    process = subprocess.run(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return Outcome(process.returncode, process.stdout, process.stderr)
