"""Completion in the shells themselves, with the scripts that the command hands out."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ps_protocol.routes import PARAMETERS

from .canned import serving
from .conftest import ROOT

# Each defines `complete_line`, which prints what is offered at the end of a line.
SHELLS = {
    "bash": """
eval "$(gradpost --show-completion bash)"
complete_line() {
    eval "COMP_WORDS=($1 ${2:-\\"\\"})"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    $(complete -p gradpost | sed 's/.*-F \\([^ ]*\\).*/\\1/') gradpost
    printf '%s\\n' "${COMPREPLY[@]}"
}
""",
    "zsh": """
compdef() { }  # without a terminal nothing completes, but what would be offered can be looked at
_arguments() { print -r -- "$1" | grep -o '"[^"]*":"' | tr -d '":' }
eval "$(gradpost --show-completion zsh)"
complete_line() { words=(${=1} "$2"); CURRENT=$#words; _gradpost_completion }
""",
    "fish": """
gradpost --show-completion fish | source
function complete_line; complete -C "$argv[1] $argv[2]"; end
""",
}
NAMED = {"bash": "bash", "zsh": "apt-get install zsh", "fish": "apt-get install fish"}


def complete(shell: str, folder: Path, line: str, last: str = "", **environment: str) -> list[str]:
    """Return the completions of the last word of a line, without their help."""
    program = folder / "gradpost"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m gradpost "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [shell, "-c", SHELLS[shell] + f"complete_line {shlex.quote(line)} {shlex.quote(last)}\n"],
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


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not here ({NAMED[request.param]})")
    return str(request.param)


def test_commands_and_options(shell: str, tmp_path: Path) -> None:
    assert complete(shell, tmp_path, "gradpost", "st") == ["status"]
    assert sorted(complete(shell, tmp_path, "gradpost checkpoint")) == ["create", "export", "list", "restore"]


def test_settings_of_a_role(tmp_path: Path) -> None:
    assert complete("bash", tmp_path, "gradpost serve coordinator", "--dur") == ["--durability"]
    assert complete("bash", tmp_path, "gradpost serve pserver", "--pserver-i") == ["--pserver-index"]


def test_parameters_of_the_run(tmp_path: Path) -> None:
    listed = {"parameters": [{"name": name} for name in ("0.weight", "1.weight", "1.bias")]}
    with serving({PARAMETERS: json.dumps(listed)}) as url:
        found = complete("bash", tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR=url)
        assert found == ["1.weight", "1.bias"]
    assert complete("bash", tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR="http://127.0.0.1:1") == []
