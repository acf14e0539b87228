"""`docs/protocol.md`: its tables of headers, limits, plan members, optimizers, routes and scopes match the code."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from ps_config.tokens import SCOPES
from ps_http2.asgi import DISCARD_SECONDS
from ps_http2.reader import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from ps_http2.server import MAX_STREAMS
from ps_protocol import membership, messages, norms, routes
from ps_protocol.errors import ERRORS
from ps_protocol.fence import MAX_DIGITS, MAX_TEXT, Fence
from ps_protocol.fields import MAX_NAME, MAX_RESULT_NAME, MAX_RESULTS
from ps_protocol.frames import FrameLimits
from ps_protocol.optimizers import RULES
from ps_protocol.plan import SlicePlan
from services.coordinator.app import MAX_WAIT_SECONDS as MAX_PLAN_WAIT_SECONDS
from services.pserver.endpoints import MAX_GET_BODY_BYTES, MAX_WAIT_SECONDS
from services.runtime.http1 import MAX_HEAD_BYTES
from services.runtime.routing import MAX_MESSAGE_BYTES, MAX_MESSAGE_ITEMS, MAX_PLAN_BYTES
from services.runtime.scopes import DOCS, OPENAPI, ROUTE_SCOPES, needed_scope

from .apps import call, run_coordinator, run_pserver
from .markdown import code_blocks, codes, read, section, table, tables

TEXT = read("protocol.md")
FENCE = Fence(1, "r", 0, "p", 0, 1, 0, 1, 1)


def test_headers() -> None:
    rows, _, others = tables(section(TEXT, "The fence"))
    assert [codes(row["header"]) for row in rows] == [[header] for header in FENCE.to_headers()]
    assert [codes(row["header"])[0] for row in others] == [
        routes.BARRIER_HEADER, routes.VERDICT_HEADER, routes.HAVE_HEADER, routes.NORM_HEADER, routes.WAIT_HEADER,
    ]  # fmt: skip
    keys = table(section(TEXT, "A synchronous round"), "key")
    assert [codes(row["key"])[0] for row in keys] == [routes.NUM_BLOCKS_KEY, routes.HYPER_PARAMETERS_KEY]


def test_limits() -> None:
    rows = table(section(TEXT, "Limits"), "limit")
    limits = FrameLimits()
    assert {codes(row["setting"])[0]: int(row["value"]) for row in rows if row["setting"]} == {
        "max_body_bytes": limits.max_body_bytes,
        "max_header_bytes": limits.max_header_bytes,
        "max_tensors": limits.max_tensors,
    }
    assert MAX_GET_BODY_BYTES == MAX_MESSAGE_BYTES
    assert MAX_WAIT_SECONDS == MAX_PLAN_WAIT_SECONDS
    assert MAX_HEADER_BYTES == MAX_HEAD_BYTES
    assert MAX_TEXT == norms.MAX_TEXT
    assert [float(row["value"]) for row in rows if not row["setting"]] == [
        MAX_MESSAGE_BYTES, MAX_PLAN_BYTES, MAX_MESSAGE_ITEMS, MAX_DIGITS, MAX_TEXT, MAX_WAIT_SECONDS, MAX_NAME,
        MAX_RESULTS, MAX_RESULT_NAME, MAX_STREAMS, MAX_HEADER_BYTES, MAX_FRAME_BYTES, DISCARD_SECONDS,
    ]  # fmt: skip


def test_members_and_digest_of_a_plan() -> None:
    rows = table(section(TEXT, "The slice plan"), "member")
    blocks = code_blocks(section(TEXT, "One round in bytes"), "json")
    [plan] = [json.loads(block.text) for block in blocks if "blocks" in block.text]
    assert [codes(row["member"])[0] for row in rows] == list(plan) == list(SlicePlan.from_json(plan).to_json())
    [expression] = [code for code in codes(section(TEXT, "The slice plan")) if code.startswith("hashlib")]
    plan["parameters"][0][0] = plan["blocks"][0][0] = "gewöhnlich"  # a digest has to define its encoding
    digest = eval(expression, {"hashlib": hashlib, "json": json, "plan": plan})
    assert digest == SlicePlan.from_json(plan).digest


def test_optimizers() -> None:
    rows = tables(section(TEXT, "Optimizers"))[0]
    assert {codes(row["optimizer"])[0]: (codes(row["flags"]), codes(row["hyperparameters"])) for row in rows} == {
        name: (list(rule.flags), list(rule.numbers)) for name, rule in RULES.items()
    }


# ---------------------------------------------------------------------- routes and scopes


def documented_routes(heading: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of all tables in a section that list requests, by method and path."""
    rows = [row for rows in tables(section(TEXT, heading)) for row in rows if "request" in row]
    return {tuple(request.split()): row for row in rows for request in codes(row["request"])}  # type: ignore[misc]


def described_routes(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }


def served_routes(app: FastAPI) -> set[tuple[str, str]]:
    found: list[Any] = [route for route in app.routes if isinstance(route, Route) or hasattr(route, "methods")]
    assert len(found) == len(app.routes)
    return {(method, route.path) for route in found for method in route.methods - {"HEAD"}}


PAGES = {("GET", "/"), ("GET", "/dashboard/{name}")}
UNDESCRIBED = {("GET", OPENAPI), ("GET", DOCS), ("OPTIONS", "/")}  # not in the OpenAPI document


@pytest.mark.asyncio
async def test_routes() -> None:
    of_both, of_pserver = documented_routes("Of both").keys(), documented_routes("Of a pserver")
    async with run_pserver() as (_, pserver), run_coordinator() as coordinator:
        described = described_routes(pserver.openapi())
        assert of_pserver.keys() | of_both == described.keys() | UNDESCRIBED
        expected = described_routes(coordinator.openapi()).keys() | UNDESCRIBED | PAGES
        assert documented_routes("Of the coordinator").keys() | of_both == expected
        served = served_routes(pserver) | served_routes(coordinator)
        async with call(pserver) as http:
            assert {(await http.get(path)).status_code for path in (OPENAPI, DOCS)} == {200}
    assert served == ROUTE_SCOPES.keys()  # a route without a scope could be called by any client
    fenced, _ = tables(section(TEXT, "Of a pserver"))
    for route, row in of_pserver.items():
        headers = {p["name"] for p in described[route].get("parameters", ()) if p["in"] == "header"}
        assert (row in fenced) == (headers >= FENCE.to_headers().keys()), route


def test_scopes() -> None:
    documented = {route: codes(row["scope"]) for route, row in documented_routes("Endpoints").items() if "scope" in row}
    expected = {(method, path.replace(":path", "")): scope for (method, path), scope in ROUTE_SCOPES.items()}
    assert documented == {route: [scope] if scope else [] for route, scope in expected.items()}
    assert all(f"`{scope}`" in section(TEXT, "Who may call what") for scope in SCOPES)


def test_errors_and_messages_of_requests_exist() -> None:
    rows = [row for rows in tables(section(TEXT, "Endpoints")) for row in rows]
    listed = {code for row in rows for code in codes(row.get("errors", "") + row.get("error", ""))}
    assert len(listed) > 30
    assert listed - {"get"} <= ERRORS.keys()
    names = set(re.findall(r"`([A-Z]\w+)`", section(TEXT, "Endpoints")))
    assert (
        names
        == {n for module in (messages, membership) for n, _ in inspect.getmembers(module, inspect.isclass)} & names
    )
    assert len(names) > 15


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
def test_scopes_are_matched_as_the_router_matches_paths(request_: str, scope: str) -> None:
    method, path = request_.split()
    assert needed_scope(method, path) == scope
