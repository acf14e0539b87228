from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.pserver.settings import PserverSettings


@pytest.mark.parametrize(
    ("changes", "is_local"),
    [
        ({}, True),
        ({"host": "10.0.0.7", "insecure": True}, True),
        ({"local_transport": False}, False),
        ({"http2": False}, False),
        ({"advertise_address": "http://proxy:7071"}, False),
        ({"tls_cert": "file", "tls_key": "file"}, False),
        ({"tls_cert": "file", "tls_key": "file", "tls_client_ca": "file"}, False),
    ],
)
def test_when_there_is_a_unix_socket(changes: dict[str, Any], is_local: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = {name: tmp_path / "file" for name, value in changes.items() if value == "file"}
    assert PserverSettings(**{**changes, **files}).listens_locally is is_local
