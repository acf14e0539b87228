"""Who may call what: the table of docs/protocol.md is that of the code, and SECURITY.md's commands do what it says."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from ps_config.tokens import SCOPES
from services.runtime.scopes import DOCS, OPENAPI, ROUTE_SCOPES, needed_scope
from trainer_client.testing import LocalCluster

from ..unit.protocol.test_certificates import Authority
from .apps import run_coordinator, run_pserver
from .markdown import ROOT, codes, read, section, tables
from .stage import Stage, run_shell

TEXT = read("protocol.md")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    routes: list[Any] = [route for route in app.routes if isinstance(route, Route) or hasattr(route, "methods")]
    assert len(routes) == len(app.routes)
    return {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}


@pytest.mark.asyncio
async def test_every_route_has_its_scope() -> None:
    """Whoever adds a route says in `scopes.py` who may call it."""
    async with run_pserver() as (_, pserver), run_coordinator() as coordinator:
        served = routes_of(pserver) | routes_of(coordinator)
    assert {("GET", OPENAPI), ("GET", DOCS)} <= served
    assert served == ROUTE_SCOPES.keys()


def test_the_table() -> None:
    rows = [row for rows in tables(section(TEXT, "Endpoints")) for row in rows if "scope" in row]
    documented = {
        tuple(request.split()): codes(row["scope"]) or None for row in rows for request in codes(row["request"])
    }
    assert documented == {
        (method, path.replace(":path", "")): [scope] if scope else None
        for (method, path), scope in ROUTE_SCOPES.items()
    }
    assert all(f"`{scope}`" in section(TEXT, "Who may call what") for scope in SCOPES)


@pytest.mark.parametrize(
    ("request_", "scope"),
    [
        ("GET /v1/parameters/a/b.c", "read"),
        ("GET /v1/parameters/", "read"),
        ("PUT /v1/parameters/a", "admin"),
        ("POST /v1/trainers/3/leave", "train"),
        ("POST /v1/trainers/3/leave/", "admin"),
        ("POST /v1/trainers/3/4/leave", "admin"),
        ("POST //v1/send", "admin"),
        ("POST /v1/send/", "admin"),
        ("POST /V1/SEND", "admin"),
        ("DELETE /healthz", "admin"),
        ("GET /dashboard", "admin"),
    ],
)
def test_paths_are_matched_as_the_router_does_it(request_: str, scope: str) -> None:
    method, path = request_.split()
    assert needed_scope(method, path) == scope


# ---------------------------------------------------------------------- the commands of SECURITY.md


def test_tokens_are_created_and_replaced_as_it_says(tmp_path: Path) -> None:
    create, rotate = (code for code in codes(section(SECURITY, "Tokens")) if code.startswith("gradpost token create"))
    folder = tmp_path / "DIR"
    run_shell(tmp_path, create)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert first.keys() == set(SCOPES)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o400}
    run_shell(tmp_path, create)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first  # what is there stays
    run_shell(tmp_path, rotate, GRADPOST_TOKENS_DIR=str(folder))
    assert (folder / "train.previous").read_text() == first["train"] != (folder / "train").read_text()


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.skipif(shutil.which("curl") is None, reason="wants curl (apt-get install curl)")
def test_curl_sends_a_token_as_it_says(tmp_path: Path) -> None:
    [row] = [row for row in tables(section(SECURITY, "Tokens"))[0] if row["who"] == "curl"]
    [header] = codes(row["setting"])
    stage = Stage(tmp_path)
    with stage.cluster:
        assert '"state"' in stage.shell(f"curl -s {header} $URL/v1/status")


@pytest.mark.cluster
@pytest.mark.extended
def test_the_probe_under_mutual_tls(tmp_path: Path) -> None:
    [probe] = [code for code in codes(section(SECURITY, "Certificates")) if ".probe " in code]
    files = Authority(tmp_path / "authority").issue("all")
    own = {"tls_ca": files.ca, "tls_client_cert": files.cert, "tls_client_key": files.key}
    shown = {f"GRADPOST_{name.upper()}": str(path) for name, path in own.items()}
    with LocalCluster(
        pservers=1, trainers=1, tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.ca, **own
    ) as cluster:
        while not cluster.status().pservers:
            time.sleep(0.1)
        command = probe.replace("https://localhost:7071", cluster.status().pservers[0].address)
        run_shell(tmp_path, command, **shown)
        with pytest.raises(AssertionError, match="certificate"):
            run_shell(tmp_path, command, GRADPOST_TLS_CA=shown["GRADPOST_TLS_CA"])
