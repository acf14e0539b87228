"""Which HTTP server carries the services: the whole suite runs on one, and in `make test-all` on the other too."""

from __future__ import annotations

import pytest

TRANSPORTS = {"granian": "HTTP/2", "uvicorn": "HTTP/1.1"}


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
