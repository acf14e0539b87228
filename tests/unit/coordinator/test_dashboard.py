"""The files of the dashboard, and how they are sent."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from ps_config.tokens import TokenFolder
from services.coordinator import pages
from services.coordinator.pages import add_dashboard_routes
from services.runtime.app import make_app
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import Guard


@pytest.fixture
def app() -> FastAPI:
    app = make_app(title="t", role="coordinator", metrics=ServiceMetrics("coordinator"), is_ready=lambda: None)
    add_dashboard_routes(app)
    return app


async def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as http:
        return await http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})


async def test_all_files_of_the_page_are_public(app: FastAPI, tmp_path: Path) -> None:
    app.state.guard = Guard(tokens=TokenFolder(tmp_path))
    page = await get(app, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(names) >= 4
    scripts = {name.partition("/")[2] for name in names if name.endswith(".js")}
    while scripts:  # and what they import
        name = scripts.pop()
        reply = await get(app, f"/dashboard/{name}")
        assert reply.headers["content-type"].startswith("text/javascript")
        names.append(f"dashboard/{name}")
        scripts |= {
            found for found in re.findall(r'from "\./([^"]+)"', reply.text) if f"dashboard/{found}" not in names
        }
    assert {f"dashboard/{path.name}" for path in pages._FOLDER.iterdir()} - {"dashboard/index.html"} == set(names)
    for name in names:
        reply = await get(app, "/" + name)
        assert reply.status_code == 200, name


async def test_the_page_has_no_inline_code_and_no_other_origins(app: FastAPI) -> None:
    page = await get(app, "/")
    assert "script-src 'self'; style-src 'self';" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle=|javascript:", page.text)
    for path in pages._FOLDER.iterdir():
        others = set(re.findall(r"https?://[^\"'`\s]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not others, path


async def test_files_are_compressed_and_cached(app: FastAPI) -> None:
    plain = await get(app, "/dashboard/app.js", accept_encoding="identity")
    assert "content-encoding" not in plain.headers
    packed = await get(app, "/dashboard/app.js", accept_encoding="gzip")
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "accept-encoding")
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) == len(gzip.compress(plain.content, mtime=0)) < len(plain.content)
    again = await get(app, "/dashboard/app.js", if_none_match=plain.headers["etag"])
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", plain.headers["etag"])


async def test_other_names_are_not_found_and_not_cached(app: FastAPI) -> None:
    kept = pages.read_file.cache_info().currsize
    for name in ("files.py", "..%2Ffiles.py", "index.html", "x" * 1000, "%00"):
        reply = await get(app, f"/dashboard/{name}")
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found"), name
    assert pages.read_file.cache_info().currsize == kept


def test_the_chart_library_does_not_write_styles() -> None:
    charts = pages.read_file(pages.CHARTS)
    assert charts.body.startswith(b"/**\n* plotly.js v"), "the package plotly is not installed, or another one"
    made = set(re.findall(rb'document\.createElement\("style"\)', charts.body))
    assert made
    assert re.search(rb'<template id="[0-9a-f]{64}"></template>', pages.read_page(wants_token=False).body)
