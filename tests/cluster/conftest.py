"""What carries the services: all tests run on uvicorn over HTTP/2, those of `make test` on the others later, too.

The others are granian and HTTP/1.1, in one more pass of `make test-all`; what only that runs is not repeated there,
unless it is marked `both_servers`: it would take too long.

All of them go over TCP, as between machines; tests that name no carrier have what users have on one host by default,
Unix sockets.
"""

from __future__ import annotations

from typing import TypedDict

import pytest


class Carrier(TypedDict):
    """Settings of the services."""

    server: str
    http2: bool
    local_transport: bool


CARRIERS: dict[str, Carrier] = {
    "uvicorn": {"server": "uvicorn", "http2": True, "local_transport": False},
    "granian": {"server": "granian", "http2": False, "local_transport": False},
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out on granian what is extended by itself; the parameter's own mark is the other one."""

    def is_repeated(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        is_other = callspec is not None and callspec.params.get("carrier") == "granian"
        return (
            is_other and len([*item.iter_markers("extended")]) > 1 and item.get_closest_marker("both_servers") is None
        )

    left_out = [item for item in items if is_repeated(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", params=["uvicorn", pytest.param("granian", marks=pytest.mark.extended)])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    return CARRIERS[request.param]


@pytest.fixture
def carrier_in_environment(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that start services by a command."""
    for name, value in carrier.items():
        monkeypatch.setenv(f"GRADPOST_{name.upper()}", str(value))


@pytest.fixture
def transport(carrier: Carrier) -> str:
    """What the summary of a run calls it."""
    return "HTTP/2" if carrier["http2"] else "HTTP/1.1"
