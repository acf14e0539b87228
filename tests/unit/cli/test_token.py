from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ps_config.tokens import SCOPES, TokenFolder

from .conftest import RunCommand


def read(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text().strip() for file in folder.iterdir()}


def test_tokens_are_created_and_shown(run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "tokens"
    outcome = run_command("token", "create", "--dir", folder)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines() == [f"{folder}/{scope}: created" for scope in SCOPES]  # and no token
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o400}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tokens = read(folder)
    assert tokens.keys() == set(SCOPES)
    assert len(set(tokens.values())) == 4
    accepted = TokenFolder(folder)
    monkeypatch.setenv("GRADPOST_TOKENS_DIR", str(folder))
    for scope in SCOPES:
        outcome = run_command("token", "show", "--scope", scope)
        assert (outcome.exit_code, outcome.stdout) == (0, f"{tokens[scope]}\n")
        assert accepted.scope_of(tokens[scope]) == scope


def test_existing_tokens_are_kept(run_command: RunCommand, tmp_path: Path) -> None:
    """The container that writes them may run again."""
    assert run_command("token", "create", "--dir", tmp_path, "--scope", "train").exit_code == 0
    before = read(tmp_path)
    assert before.keys() == {"train"}
    outcome = run_command("token", "create", "--dir", tmp_path)
    assert outcome.stdout.splitlines() == [
        f"{tmp_path}/read: created",
        f"{tmp_path}/train: kept",
        f"{tmp_path}/replicate: created",
        f"{tmp_path}/admin: created",
    ]
    assert read(tmp_path)["train"] == before["train"]


def test_a_rotation_keeps_the_previous_token_valid(run_command: RunCommand, tmp_path: Path) -> None:
    create = ("token", "create", "--dir", tmp_path)
    run_command(*create)
    first = read(tmp_path)
    outcome = run_command(*create, "--scope", "read", "--rotate")
    assert outcome.stdout == f"{tmp_path}/read: replaced; the previous token stays valid until the next rotation\n"
    second = read(tmp_path)
    assert second["read.previous"] == first["read"] != second["read"]
    assert {name: second[name] for name in ("train", "admin")} == {name: first[name] for name in ("train", "admin")}
    accepted = TokenFolder(tmp_path)
    assert [accepted.scope_of(token) for token in (first["read"], second["read"])] == ["read", "read"]
    run_command(*create, "--scope", "read", "--rotate")
    accepted = TokenFolder(tmp_path)
    assert [accepted.scope_of(token) for token in (first["read"], second["read"])] == [None, "read"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o400}


def test_missing_tokens_and_folders_are_errors(run_command: RunCommand, tmp_path: Path) -> None:
    outcome = run_command("token", "show")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr == "gradpost: error: no folder of tokens is given. Give --dir, or set GRADPOST_TOKENS_DIR\n"
    outcome = run_command("token", "show", "--dir", tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith(f"gradpost: error: there is no token file {tmp_path}/read; ")
    (tmp_path / "file").touch()
    outcome = run_command("token", "create", "--dir", tmp_path / "file")
    assert (outcome.exit_code, outcome.stderr) == (1, f"gradpost: error: {tmp_path}/file: {os.strerror(17)}\n")
