from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ps_config.control_client import BearerAuth
from ps_config.environment import SettingsError
from ps_config.tokens import TokenPair

from ..protocol.test_tokens import NEW, OLD, put


def client(file: Path, valid: str, seen: list[str]) -> httpx.Client:
    """Of a service that goes by one token."""

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200 if seen[-1] == f"Bearer {valid}" else 401)

    return httpx.Client(transport=httpx.MockTransport(answer), auth=BearerAuth(TokenPair(file)))


def test_the_newest_token_is_sent(tmp_path: Path) -> None:
    seen: list[str] = []
    put(tmp_path / "train", NEW)
    put(tmp_path / "train.previous", OLD)
    with client(tmp_path / "train", NEW, seen) as http:
        assert http.get("http://service/").status_code == 200
    assert seen == [f"Bearer {NEW}"]


def test_and_the_one_before_if_that_is_not_known_yet(tmp_path: Path) -> None:
    seen: list[str] = []
    put(tmp_path / "train", NEW)
    with client(tmp_path / "train", OLD, seen) as http:
        assert http.get("http://service/").status_code == 401
        put(tmp_path / "train.previous", OLD)
        assert http.get("http://service/").status_code == 200
    assert seen == [f"Bearer {NEW}", f"Bearer {NEW}", f"Bearer {OLD}"]


def test_without_a_token_nothing_is_sent(tmp_path: Path) -> None:
    seen: list[str] = []
    with client(tmp_path / "train", OLD, seen) as http, pytest.raises(SettingsError, match="there is no token file"):
        http.get("http://service/")
    assert seen == []
