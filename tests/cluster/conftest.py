"""Tests with a `carrier` go over TCP, as between machines; others over Unix sockets, as on one host by default."""

from __future__ import annotations

from typing import TypedDict

import pytest


class Carrier(TypedDict):
    """Settings of the services."""

    local_transport: bool


@pytest.fixture(scope="session")
def carrier() -> Carrier:
    return {"local_transport": False}
