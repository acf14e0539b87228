"""A real Prometheus with the configuration that we ship."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from trainer_client.testing.guardian import Guardian
from trainer_client.testing.processes import Child

from .configuration import CONFIGURATION, RULES

SCRAPE_SECONDS = 1.0
READY = "Server is ready to receive web requests"
TOKENS = "/var/lib/gradpost/tokens"  # as in a container
COORDINATOR = "coordinator:7070"

Series = tuple[dict[str, str], float]  # labels, value


class Prometheus:
    """Scrapes a cluster; `folder` is for its data. Only addresses, paths and intervals differ from what we ship."""

    def __init__(self, coordinator: str, tokens: Path, folder: Path) -> None:
        _configure(coordinator, tokens, folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._guardian = Guardian()
        self._ready = threading.Event()
        self.output: list[str] = []
        files = (f"--config.file={folder / CONFIGURATION.name}", f"--storage.tsdb.path={folder / 'data'}")
        self._child = Child(
            "prometheus",
            [shutil.which("prometheus") or "prometheus", *files, f"--web.listen-address={address}"],
            env=os.environ,
            on_line=self._line,
            guardian=self._guardian,
        )
        self._http = httpx.Client(base_url=f"http://{address}/api/v1/")

    def __enter__(self) -> Prometheus:
        assert self._ready.wait(30), "\n".join(self.output)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()
        self._child.stop()
        self._guardian.close()

    def _line(self, _: str, line: str) -> None:
        self.output.append(line)
        if READY in line:
            self._ready.set()

    def get(self, path: str, **params: str) -> Any:
        """Return the data of an answer of the API, which has to succeed."""
        answer = self._http.get(path, params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, query: str) -> list[Series]:
        """Return the current result of a query."""
        data = self.get("query", query=query)
        assert data["resultType"] == "vector", query
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def targets(self) -> list[dict[str, Any]]:
        """Return the active targets."""
        return self.get("targets", state="active")["activeTargets"]  # type: ignore[no-any-return]


def _configure(coordinator: str, tokens: Path, folder: Path) -> None:
    configuration = yaml.safe_load(CONFIGURATION.read_text())
    configuration = _replace(configuration, COORDINATOR, urlsplit(coordinator).netloc)
    configuration = _replace(configuration, TOKENS, str(tokens))
    interval = f"{SCRAPE_SECONDS:g}s"
    configuration["global"]["scrape_interval"] = interval
    for job in configuration["scrape_configs"]:
        for discovery in job.get("http_sd_configs", []):
            discovery["refresh_interval"] = interval
    (folder / CONFIGURATION.name).write_text(yaml.safe_dump(configuration))
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["interval"] = interval
    (folder / RULES.name).write_text(yaml.safe_dump(rules))


def _replace(value: Any, old: str, new: str) -> Any:
    """Return the value with the text replaced in all nested strings: an IPv6 address is no plain YAML."""
    if isinstance(value, dict):
        return {key: _replace(one, old, new) for key, one in value.items()}
    if isinstance(value, list):
        return [_replace(one, old, new) for one in value]
    return value.replace(old, new) if isinstance(value, str) else value
