"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from ps_http2.client import Http2Transport

from ..protocol.test_certificates import Authority


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client over HTTP/2."""
    async with httpx.AsyncClient(transport=Http2Transport(), trust_env=False) as http:
        yield http


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")
