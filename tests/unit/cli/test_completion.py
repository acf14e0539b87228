"""Completion in bash, with the script that the command prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from ps_protocol.routes import PARAMETERS

from .conftest import ROOT, serving

# Defines `complete_line`, which prints the completions at the end of a line.
SCRIPT = """
eval "$(gradpost --show-completion bash)"
complete_line() {
    eval "COMP_WORDS=($1 ${2:-\\"\\"})"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    $(complete -p gradpost | sed 's/.*-F \\([^ ]*\\).*/\\1/') gradpost
    printf '%s\\n' "${COMPREPLY[@]}"
}
"""


def complete(folder: Path, line: str, last: str = "", **environment: str) -> list[str]:
    """Return the completions of the last word of a line, without their help."""
    program = folder / "gradpost"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m gradpost "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", SCRIPT + f"complete_line {shlex.quote(line)} {shlex.quote(last)}\n"],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
            **environment,
        },
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [line.split("\t")[0] for line in done.stdout.splitlines() if line]


def test_commands_and_options(tmp_path: Path) -> None:
    assert complete(tmp_path, "gradpost", "st") == ["status", "stop"]
    assert sorted(complete(tmp_path, "gradpost checkpoint")) == ["create", "export", "list", "restore"]


def test_settings_of_a_role(tmp_path: Path) -> None:
    assert complete(tmp_path, "gradpost serve coordinator", "--dur") == ["--durability"]


def test_parameters_of_the_run(tmp_path: Path) -> None:
    listed = {"parameters": [{"name": name} for name in ("0.weight", "1.weight", "1.bias")]}
    with serving({PARAMETERS: json.dumps(listed)}) as url:
        found = complete(tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR=url)
        assert found == ["1.weight", "1.bias"]
    assert complete(tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR="http://127.0.0.1:1") == []
