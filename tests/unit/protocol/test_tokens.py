from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ps_config import tokens
from ps_config.environment import SettingsError
from ps_config.tokens import PREVIOUS, SCOPES, Scope, TokenFile, TokenFolder, TokenPair, includes

OLD, NEW = "old-" + "x" * 20, "new-" + "x" * 20


def put(file: Path, token: str, mode: int = 0o400) -> None:
    """As `gradpost token` does it: by renaming."""
    temporary = file.with_name(".temporary")
    temporary.write_text(f"{token}\n")
    temporary.chmod(mode)
    temporary.rename(file)


def test_scopes_include_those_before_them() -> None:
    table = {(given, needed): includes(given, needed) for given in SCOPES for needed in SCOPES}
    assert {pair for pair, is_enough in table.items() if not is_enough} == {
        ("read", "train"),
        ("read", "admin"),
        ("train", "admin"),
    }


@pytest.mark.parametrize("text", ["", "8 bytes!", "two\nlines" + "x" * 20, "a b" + "x" * 20, "ä" * 30, "x" * 1001])
def test_what_is_no_token(tmp_path: Path, text: str) -> None:
    (tmp_path / "read").write_text(text)
    (tmp_path / "read").chmod(0o400)
    with pytest.raises(SettingsError, match="read holds no token: one line of 20 to 1000 letters") as caught:
        TokenPair(tmp_path / "read").read()
    assert not text or text not in str(caught.value)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "read")
    assert file.read() is None
    put(file.path, OLD)
    assert file.read() == OLD
    put(file.path, NEW)
    assert file.read() == NEW
    file.path.unlink()
    assert file.read() is None


def test_a_slip_of_the_pen_keeps_what_was_there(tmp_path: Path) -> None:
    said: list[str] = []
    file = TokenFile(tmp_path / "read", said.append)
    put(file.path, OLD)
    assert file.read() == OLD
    put(file.path, "not a token")
    assert [file.read() for _ in range(3)] == [OLD] * 3
    assert len(said) == 1
    assert "holds no token" in said[0]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX modes")
@pytest.mark.parametrize(("mode", "is_said"), [(0o400, False), (0o600, False), (0o440, True), (0o644, True)])
def test_others_who_may_read_it_are_warned_of(tmp_path: Path, mode: int, is_said: bool) -> None:
    said: list[str] = []
    put(tmp_path / "read", OLD, mode)
    for _ in range(2):
        TokenFile(tmp_path / "read", said.append).read()
    assert len(said) == 2 * is_said
    assert all(f"(mode {mode:04o}): chmod 400 it" in line and OLD not in line for line in said)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX modes")
@pytest.mark.parametrize(("mode", "is_said"), [(0o440, False), (0o460, True), (0o444, True)])
def test_a_secret_of_kubernetes_is_read_through_the_group_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_said: bool
) -> None:
    """It makes 0440 of `defaultMode: 0400` for a pod with an fsGroup; the files are root's."""
    said: list[str] = []
    put(tmp_path / "read", OLD, mode)
    owner, group = (tmp_path / "read").stat().st_uid, (tmp_path / "read").stat().st_gid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [group])
    assert TokenFile(tmp_path / "read", said.append).read() == OLD
    assert bool(said) == is_said
    monkeypatch.setattr(os, "getgroups", list)
    TokenFile(tmp_path / "read", said.append).read()
    assert said


def test_a_pair_is_the_newest_and_the_one_before(tmp_path: Path) -> None:
    pair = TokenPair(tmp_path / "train")
    with pytest.raises(SettingsError, match=r"there is no token file .*train; `gradpost token create` writes one"):
        pair.read()
    put(tmp_path / "train", OLD)
    assert pair.read() == [OLD]
    put(tmp_path / f"train{PREVIOUS}", OLD)
    put(tmp_path / "train", NEW)
    assert pair.read() == [NEW, OLD]
    (tmp_path / "train").unlink()
    assert pair.read() == [NEW, OLD]  # a caller goes on with what it had


def test_the_scope_of_a_token(tmp_path: Path) -> None:
    folder = TokenFolder(tmp_path)
    assert folder.scope_of(OLD) is None
    for scope in SCOPES:
        put(tmp_path / scope, f"{scope}-{OLD}")
    assert [folder.scope_of(f"{scope}-{OLD}") for scope in SCOPES] == list(SCOPES)
    assert folder.scope_of("") is None
    assert folder.scope_of("ä") is None
    assert folder.scope_of(f"read-{OLD}"[:-1]) is None


def test_two_tokens_are_valid_while_one_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 0.0)
    folder = TokenFolder(tmp_path)
    put(tmp_path / "read", OLD)
    assert folder.scope_of(OLD) == "read"
    put(tmp_path / f"read{PREVIOUS}", OLD)
    put(tmp_path / "read", NEW)
    assert (folder.scope_of(NEW), folder.scope_of(OLD)) == ("read", "read")
    put(tmp_path / f"read{PREVIOUS}", NEW)
    assert (folder.scope_of(NEW), folder.scope_of(OLD)) == ("read", None)
    (tmp_path / "read").unlink()
    (tmp_path / f"read{PREVIOUS}").unlink()
    assert folder.scope_of(NEW) is None


def test_a_new_token_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 1e9)
    folder = TokenFolder(tmp_path)
    put(tmp_path / "read", OLD)
    assert folder.scope_of(OLD) == "read"
    put(tmp_path / "read", NEW)
    assert folder.scope_of(NEW) == "read"


def test_the_widest_scope_counts(tmp_path: Path) -> None:
    scopes: list[Scope] = ["read", "admin"]
    for scope in scopes:
        put(tmp_path / scope, OLD)
    assert TokenFolder(tmp_path).scope_of(OLD) == "admin"


@pytest.mark.asyncio
async def test_waiting_for_whoever_writes_it(tmp_path: Path) -> None:
    said: list[str] = []
    waiting = asyncio.create_task(TokenPair(tmp_path / "admin").wait(30, said.append))
    await asyncio.sleep(0)
    [line] = said
    assert line.startswith("waiting for a token, 30 s at most: there is no token file")
    put(tmp_path / "admin", OLD)
    assert await waiting
    assert said == [line]


@pytest.mark.asyncio
async def test_not_waiting_for_ever(tmp_path: Path) -> None:
    pair = TokenPair(tmp_path / "admin")
    with pytest.raises(SettingsError, match="there is no token file"):
        await pair.wait(0, lambda _: None)
    assert not await pair.wait(30, lambda _: None, give_up=lambda: True)
