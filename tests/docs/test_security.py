"""Who may call what: the table of docs/protocol.md is that of the code, and no route of any service is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from ps_protocol.tokens import SCOPES
from services.runtime.scopes import DOCS, OPENAPI, ROUTE_SCOPES, needed_scope
from trainer_client.settings import TrainerSettings

from .apps import run_coordinator, run_pserver
from .markdown import codes, read, section, tables

TEXT = read("protocol.md")


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
    rows = tables(section(TEXT, "Who may call what"))[0]
    documented = {
        tuple(request.split()): codes(row["scope"]) or None for row in rows for request in codes(row["requests"])
    }
    assert documented == {
        (method, path.replace(":path", "")): [scope] if scope else None
        for (method, path), scope in ROUTE_SCOPES.items()
    }
    assert [codes(row["scope"]) for row in rows] == [[], *([scope] for scope in SCOPES)]


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


def test_a_trainers_metrics_beyond_loopback_need_tokens() -> None:
    with pytest.raises(ValueError, match=r"metrics_host 0\.0\.0\.0 can be reached from elsewhere"):
        TrainerSettings(metrics_host="0.0.0.0")
    assert TrainerSettings(metrics_host="0.0.0.0", metrics_port=None).metrics_port is None
    assert TrainerSettings(metrics_host="0.0.0.0", insecure=True).insecure
