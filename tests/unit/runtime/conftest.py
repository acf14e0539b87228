from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import structlog

from ps_config.environment import PREFIX
from services.runtime.logs import configure_logs


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def configured_logs() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, before = root.handlers[:], root.level, structlog.get_config()
    configure_logs("test", "json")
    yield
    structlog.configure(**before)
    logging.captureWarnings(False)
    root.handlers, root.level = handlers, level
