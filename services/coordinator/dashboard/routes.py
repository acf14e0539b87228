"""The dashboard's page and files: no token is needed for them, and no other site has a part in them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI, Request, Response

from ps_protocol.errors import NotFound
from services.runtime.pages import PAGE_HEADERS
from services.runtime.scopes import DASHBOARD, DASHBOARD_FILE

# Scripts and styles are files of this service; nothing in the page itself is run, and nobody else is asked.
_HEADERS = PAGE_HEADERS | {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",  # asked about every time, sent once: see the ETag
    "vary": "accept-encoding",
}


def add_dashboard_routes(app: FastAPI) -> None:
    """Add them to the application."""

    @app.get(DASHBOARD, include_in_schema=False)
    async def dashboard(request: Request) -> Response:
        """The page."""
        wants_token = getattr(app.state, "wants_token", False)
        return _send(await asyncio.to_thread(read_page, wants_token=wants_token), request)

    @app.get(DASHBOARD_FILE, include_in_schema=False)
    async def dashboard_file(name: str, request: Request) -> Response:
        """What it consists of."""
        file = await asyncio.to_thread(read_file, name)
        if file is None:
            raise NotFound(f"the dashboard has no file {name!r}")
        return _send(file, request)


def _send(file: File, request: Request) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.zipped, headers={**headers, "content-encoding": "gzip"}, media_type=file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)


CHARTS = "plotly.min.js"

_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FOLDER = Path(__file__).parent / "static"
_PAGE = "index.html"
_NAMES = frozenset(path.name for path in _FOLDER.iterdir()) - {_PAGE} | {CHARTS}
_MARK = b"<!-- styles of the chart library -->"
# The library would put styles into the page, which the page forbids, unless it finds an element that has this id.
_STYLE_ID = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')


@dataclass(frozen=True, slots=True)
class File:
    """What is sent; `etag` names the content, so that a browser asks for it once."""

    media_type: str
    body: bytes
    zipped: bytes
    etag: str


def read_file(name: str) -> File | None:
    """A file that the page asks for; None if there is no such file. The first time takes some tenths of a second."""
    return _read_file(name) if name in _NAMES else None


@cache
def read_page(*, wants_token: bool) -> File:
    """The page itself. It is told whether a token is wanted, so that it need not try without one."""
    ids = _STYLE_ID.findall(_read_charts())
    body = (_FOLDER / _PAGE).read_bytes()
    body = body.replace(_MARK, b"".join(b'<template id="%s"></template>' % one for one in ids))
    return _pack(
        body.replace(b"<body>", b"<body data-wants-token>") if wants_token else body, "text/html; charset=utf-8"
    )


@cache
def _read_file(name: str) -> File:
    # By the ending alone: what the system's own table says of .js differs, and a browser is strict about it.
    body = _read_charts() if name == CHARTS else (_FOLDER / name).read_bytes()
    return _pack(body, _MEDIA_TYPES[Path(name).suffix])


def _pack(body: bytes, media_type: str) -> File:
    return File(media_type, body, gzip.compress(body, mtime=0), f'W/"{hashlib.sha256(body).hexdigest()[:32]}"')


def _read_charts() -> bytes:
    """Nothing if the package is not there, or looks otherwise: the page then does without charts."""
    package = find_spec("plotly")  # not imported: only its file is of use
    folders = package.submodule_search_locations if package else None
    path = Path(next(iter(folders or ()), "")) / "package_data" / CHARTS
    return path.read_bytes() if path.is_file() else b""
