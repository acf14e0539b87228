"""Fixtures for the tests of several packages."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ps_http2.local_sockets import bind_locally


@pytest.fixture
def local() -> Iterator[socket.socket]:
    """Yield a bound Unix socket that does not listen yet."""
    bound = bind_locally()
    assert bound is not None
    with bound:
        yield bound
