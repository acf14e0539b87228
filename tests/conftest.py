"""A run of the tests always ends."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from trainer_client.testing import processes

from . import soaking  # noqa: F401  registers a profile, which pytest loads before it collects
from .warm.processes import WarmServers

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


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Handle SIGINT, which background processes of a shell and their children ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def warm_processes(interrupts: None) -> Iterator[None]:
    """Clusters of tests start at once."""
    if sys.platform != "linux":
        yield
        return
    servers = WarmServers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_process", servers.start)
        yield
    servers.close()
