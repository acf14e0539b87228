"""The dashboard's page and files, the history of runs, and a service with both of them without a cluster.

The files are the project's own, and a chart library from an installed package. They contain no data and need no token.
The page gets its data from the API.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from fastapi import FastAPI, Request, Response

from ps_protocol import routes
from ps_protocol.errors import NotFound
from ps_protocol.fields import Identifier
from services.runtime.app import make_app
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import DASHBOARD, DASHBOARD_FILE
from services.runtime.server import run_service, serve
from services.runtime.settings import ServiceSettings

from .history import HistoryEntry, HistoryRecord, RunHistory

# Scripts and styles are files of this service. The page runs no inline code and uses no other site.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # revalidated every time, sent once: see the ETag
    "vary": "accept-encoding",
}


def add_dashboard_routes(app: FastAPI, kept_runs: str = "") -> None:
    """Add the routes to the application. `kept_runs` is the folder of the history if there is no cluster."""

    @app.get(DASHBOARD, include_in_schema=False)
    async def dashboard(request: Request) -> Response:
        """Return the page."""
        wants_token = app.state.guard.tokens is not None
        return _send(await asyncio.to_thread(read_page, wants_token=wants_token, kept_runs=kept_runs), request)

    @app.get(DASHBOARD_FILE, include_in_schema=False)
    async def dashboard_file(name: str, request: Request) -> Response:
        """Return a file of the page."""
        if name not in _NAMES:
            raise NotFound(f"the dashboard has no file {name!r}")
        return _send(await asyncio.to_thread(read_file, name), request)


def _send(file: File, request: Request) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.zipped, headers={**headers, "content-encoding": "gzip"}, media_type=file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)


CHARTS = "plotly.min.js"

_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FOLDER = Path(__file__).parent / "dashboard" / "static"
_PAGE = "index.html"
_NAMES = frozenset(path.name for path in _FOLDER.iterdir()) - {_PAGE} | {CHARTS}
_MARK = b"<!-- styles of the chart library -->"
# The library adds inline styles, which the page forbids, unless it finds an element with this id.
_STYLE_ID = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')


@dataclass(frozen=True, slots=True)
class File:
    """A file and its compressed form; `etag` identifies the content, so that a browser fetches it once."""

    media_type: str
    body: bytes
    zipped: bytes
    etag: str


@cache
def read_page(*, wants_token: bool, kept_runs: str = "") -> File:
    """Return the page. With `wants_token` it sends no request before it has a token; `kept_runs` is for its text."""
    ids = _STYLE_ID.findall(_read_charts())
    body = (_FOLDER / _PAGE).read_bytes()
    body = body.replace(_MARK, b"".join(b'<template id="%s"></template>' % style for style in ids))
    attributes = " data-wants-token" if wants_token else ""
    if kept_runs:
        attributes += f' data-kept-runs="{escape(kept_runs)}"'
    return _pack(body.replace(b"<body>", f"<body{attributes}>".encode()), "text/html; charset=utf-8")


@cache
def read_file(name: str) -> File:
    """Return a file of the page. The first call takes tenths of a second."""
    # By the suffix: the system's own table differs for .js, and browsers are strict about it.
    body = _read_charts() if name == CHARTS else (_FOLDER / name).read_bytes()
    return _pack(body, _MEDIA_TYPES[Path(name).suffix])


def _pack(body: bytes, media_type: str) -> File:
    return File(media_type, body, gzip.compress(body, mtime=0), f'W/"{hashlib.sha256(body).hexdigest()[:32]}"')


def _read_charts() -> bytes:
    """Return the chart library; empty without the package, and the page then has no charts."""
    package = find_spec("plotly")  # not imported: only its file is used
    folders = package.submodule_search_locations if package else None
    path = Path(next(iter(folders or ()), "")) / "package_data" / CHARTS
    return path.read_bytes() if path.is_file() else b""


# ---------------------------------------------------------------- the history


def add_history_routes(app: FastAPI, history: RunHistory) -> None:
    """Add the routes to the application."""

    @app.get(routes.HISTORY, tags=["inspection"])
    async def list_history() -> list[HistoryEntry]:
        """Return the runs that have trained and ended, newest first."""
        return await asyncio.to_thread(history.entries)

    @app.get(routes.HISTORY_RUN, tags=["inspection"])
    async def read_history(run: Identifier) -> HistoryRecord:
        """Return a run of the history: its status at the end, its summary and its curves."""
        return await asyncio.to_thread(history.read, run)


def serve_history(history: RunHistory, host: str, port: int, on_started: Callable[[str], None]) -> NoReturn:
    """Run a process that serves the page and the history without tokens, until it is stopped.

    `host` must be a loopback address. `on_started` is called with the address.
    """
    settings = ServiceSettings.model_construct(host=host, port=port)  # not those of a cluster in the environment

    async def main(stop: asyncio.Event) -> int:
        metrics = ServiceMetrics("dashboard")
        app = make_app(title="Gradpost history", role="dashboard", metrics=metrics, is_ready=lambda: None)
        add_history_routes(app, history)
        add_dashboard_routes(app, kept_runs=str(history.folder))
        await serve(app, settings, stop=stop, on_started=on_started)
        return 0

    run_service(main)
