"""The dashboard's page and files: no token is needed for them, and no other site has a part in them."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from ps_protocol.errors import NotFound
from services.runtime.pages import PAGE_HEADERS
from services.runtime.scopes import DASHBOARD, DASHBOARD_FILE

from .files import File, read_file, read_page

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
