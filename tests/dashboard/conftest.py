"""A browser, and a closed cluster that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from gradpost.tokens import create_tokens
from ps_config.tokens import Scope

from ..cluster.faulty_run import FaultyRun
from .browsing import start_browser

SCRIPT = Path(__file__).with_name("trainer.py")


@dataclass
class Closed:
    """A cluster that wants tokens."""

    run: FaultyRun
    tokens: Path

    @property
    def address(self) -> str:
        return self.run.cluster.address

    def token(self, scope: Scope = "read") -> str:
        return (self.tokens / scope).read_text().strip()

    def ask(self, method: str, path: str, scope: Scope = "read") -> httpx.Response:
        headers = {"authorization": f"Bearer {self.token(scope)}"}
        reply = httpx.request(method, self.address + path, headers=headers, timeout=30)
        reply.raise_for_status()
        return reply


@pytest.fixture(scope="module")  # no longer: while Playwright is there, no test can run an event loop of its own
def browser() -> Iterator[Browser]:
    with start_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def closed(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    tokens = tmp_path_factory.mktemp("closed") / "tokens"
    create_tokens(tokens, rotate=False)
    # A lease that lets a trainer stand still for a while without being lost.
    with FaultyRun(1_000_000, script=SCRIPT, tokens_dir=tokens, lease_seconds=60) as run:
        run.wait_for_round(5)
        yield Closed(run, tokens)
