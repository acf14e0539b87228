"""`gradpost token`, and completion in bash with the script that the command prints."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ps_config.tokens import SCOPES, TokenFolder
from ps_protocol.routes import PARAMETERS

from .conftest import ROOT, RunCommand, serving


def read(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text().strip() for file in folder.iterdir()}


def test_missing_tokens_are_created_and_shown(
    run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container that writes them may run again, and keeps the existing ones."""
    folder = tmp_path / "new" / "tokens"
    run_command("token", "create", "--dir", folder, "--scope", "train")
    before = read(folder)
    outcome = run_command("token", "create", "--dir", folder)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines() == [  # and no token
        f"{folder}/{scope}: {'kept' if scope == 'train' else 'created'}" for scope in SCOPES
    ]
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o400}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert before.items() <= read(folder).items()
    monkeypatch.setenv("GRADPOST_TOKENS_DIR", str(folder))
    shown = [run_command("token", "show", "--scope", scope).stdout.strip() for scope in SCOPES]
    assert [TokenFolder(folder).scope_of(token) for token in shown] == list(SCOPES)


def test_a_rotation_keeps_the_previous_token_valid(run_command: RunCommand, tmp_path: Path) -> None:
    run_command("token", "create", "--dir", tmp_path)
    first = read(tmp_path)
    rotate = ("token", "create", "--dir", tmp_path, "--scope", "read", "--rotate")
    outcome = run_command(*rotate)
    assert outcome.stdout == f"{tmp_path}/read: replaced; the previous token stays valid until the next rotation\n"
    second = read(tmp_path)
    assert second["read"] != first["read"]
    assert second == {**first, "read": second["read"], "read.previous": first["read"]}
    assert TokenFolder(tmp_path).scope_of(first["read"]) == "read"
    run_command(*rotate)
    accepted = TokenFolder(tmp_path)
    assert [accepted.scope_of(token) for token in (first["read"], second["read"])] == [None, "read"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o400}


# ---------------------------------------------------------------------- completion


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


def test_commands_settings_and_parameters_are_completed(tmp_path: Path) -> None:
    assert complete(tmp_path, "gradpost", "st") == ["status", "stop"]
    assert complete(tmp_path, "gradpost serve coordinator", "--dur") == ["--durability"]
    listed = {"parameters": [{"name": name} for name in ("0.weight", "1.weight", "1.bias")]}
    with serving({PARAMETERS: json.dumps(listed)}) as url:
        found = complete(tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR=url)
    assert found == ["1.weight", "1.bias"]
    assert complete(tmp_path, "gradpost params", "1.", GRADPOST_COORDINATOR=url) == []
