"""Fixtures for the tests of several packages."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from ps_http2.local_sockets import bind_locally

from .http2.shells import PolledOnLoop
from .protocol.test_access import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client over HTTP/2."""
    async with httpx.AsyncClient(transport=PolledOnLoop(), trust_env=False) as http:
        yield http


@pytest.fixture
def local() -> Iterator[socket.socket]:
    """Yield a bound Unix socket that does not listen yet."""
    bound = bind_locally()
    assert bound is not None
    with bound:
        yield bound
