"""Which HTTP server carries the services: all tests run on granian, those of `make test` later on uvicorn, too.

The latter is in `make test-all`; what only that runs is not repeated on uvicorn, unless it is marked `both_servers`:
it would take too long.
"""

from __future__ import annotations

import signal

import pytest

TRANSPORTS = {"granian": "HTTP/2", "uvicorn": "HTTP/1.1"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out on uvicorn what is extended by itself; the parameter's own mark is the other one."""

    def is_repeated(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        is_other = callspec is not None and callspec.params.get("server") == "uvicorn"
        return (
            is_other and len([*item.iter_markers("extended")]) > 1 and item.get_closest_marker("both_servers") is None
        )

    left_out = [item for item in items if is_repeated(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", params=["granian", pytest.param("uvicorn", marks=pytest.mark.extended)])
def server(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server_in_environment(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that start services by a command."""
    monkeypatch.setenv("GRADPOST_SERVER", server)


@pytest.fixture
def transport(server: str) -> str:
    """What the summary of a run calls it."""
    return TRANSPORTS[server]
