"""A run of the tests always ends."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

PATIENCE_SECONDS = 60.0
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # before pytest captures it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the whole run, and say where every thread stands, if a test goes on after its time-out.

    pytest-timeout raises in the main thread, which may then wait for another one for ever: at the end of a `with` of
    threads, for one.
    """
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker is not None else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + PATIENCE_SECONDS, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
