"""docs/protocol.md says what the code does: headers, limits, messages, routes, optimizers, errors."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from typing import Any

import pytest

from ps_http2.asgi import DISCARD_SECONDS
from ps_http2.reader import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from ps_http2.server import MAX_STREAMS
from ps_protocol import errors, messages, norms, routes
from ps_protocol.errors import ERRORS
from ps_protocol.fence import MAX_DIGITS, MAX_TEXT, Fence
from ps_protocol.fields import MAX_NAME, MAX_RESULT_NAME, MAX_RESULTS
from ps_protocol.frames import ALIGNMENT, CONTENT_TYPE, FrameLimits
from ps_protocol.optimizers import RULES
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PARAMETER_DTYPES, PROTOCOL_VERSION, WINDOW
from services.coordinator.app import MAX_WAIT_SECONDS as MAX_PLAN_WAIT_SECONDS
from services.pserver.endpoints import MAX_GET_BODY_BYTES, MAX_WAIT_SECONDS
from services.runtime.http1 import MAX_HEAD_BYTES
from services.runtime.routing import MAX_MESSAGE_BYTES, MAX_MESSAGE_ITEMS, MAX_PLAN_BYTES

from .apps import call, run_coordinator, run_pserver
from .markdown import code_blocks, codes, read, section, table, tables

TEXT = read("protocol.md")
FENCE = Fence(
    protocol=1, run="r", attempt=0, plan="p", pserver=0, pserver_incarnation=1, rank=0, trainer_incarnation=1, round=1
)  # fmt: skip


def test_the_headers_are_those_of_the_fence_in_order() -> None:
    rows, _, others = tables(section(TEXT, "The fence"))
    assert [codes(row["header"]) for row in rows] == [[header] for header in FENCE.to_headers()]
    assert [codes(row["header"]) for row in others] == [
        [routes.BARRIER_HEADER],
        [routes.VERDICT_HEADER],
        [routes.HAVE_HEADER],
        [routes.NORM_HEADER],
        [routes.WAIT_HEADER],
    ]


def test_numbers_in_the_text() -> None:
    assert f"version {PROTOCOL_VERSION}," in TEXT.split("\n\n")[1]
    assert f"multiple of {ALIGNMENT} bytes" in section(TEXT, "Frames")
    assert f"content type `{CONTENT_TYPE}`" in section(TEXT, "Frames")
    assert f"Windows of {WINDOW} elements" in TEXT
    assert f"`{'`, `'.join(PARAMETER_DTYPES[:2])}` or `{PARAMETER_DTYPES[2]}`" in TEXT


def test_the_limits() -> None:
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
        MAX_MESSAGE_BYTES,
        MAX_PLAN_BYTES,
        MAX_MESSAGE_ITEMS,
        MAX_DIGITS,
        MAX_TEXT,
        MAX_WAIT_SECONDS,
        MAX_NAME,
        MAX_RESULTS,
        MAX_RESULT_NAME,
        MAX_STREAMS,
        MAX_HEADER_BYTES,
        MAX_FRAME_BYTES,
        DISCARD_SECONDS,
    ]


def test_the_metadata_keys() -> None:
    rows = table(section(TEXT, "A synchronous round"), "key")
    assert [codes(row["key"]) for row in rows] == [[routes.NUM_BLOCKS_KEY], [routes.HYPER_PARAMETERS_KEY]]


def test_the_members_and_the_digest_of_a_plan() -> None:
    rows = table(section(TEXT, "The slice plan"), "member")
    [plan] = [
        json.loads(b.text) for b in code_blocks(section(TEXT, "One round in bytes"), "json") if "blocks" in b.text
    ]
    assert [codes(row["member"])[0] for row in rows] == list(plan) == list(SlicePlan.from_json(plan).to_json())
    [expression] = [code for code in codes(section(TEXT, "The slice plan")) if code.startswith("hashlib")]
    plan["parameters"][0][0] = plan["blocks"][0][0] = "gewöhnlich"  # no header needs it, but a digest does
    digest = eval(expression, {"hashlib": hashlib, "json": json, "plan": plan})
    assert digest == SlicePlan.from_json(plan).digest


def test_the_optimizers() -> None:
    rows = tables(section(TEXT, "Optimizers"))[0]
    assert {codes(row["optimizer"])[0]: (codes(row["flags"]), codes(row["hyperparameters"])) for row in rows} == {
        name: (list(rule.flags), list(rule.numbers)) for name, rule in RULES.items()
    }


def test_the_errors() -> None:
    assert f"`{errors.PROBLEM_CONTENT_TYPE}`" in TEXT
    assert f"`{errors.PROBLEM_TYPE_PREFIX}` and the code" in TEXT


def test_every_code_in_the_text_is_one() -> None:
    prose = TEXT[: TEXT.index("\n## Errors")]
    statuses = {
        (code, int(status)) for status, code in re.findall(r"\b([345]\d\d)(?: with)? `(\w+)`", prose) if code in ERRORS
    }
    assert statuses
    assert statuses == {(code, ERRORS[code].status) for code, _ in statuses}
    assert set(re.findall(r"`(stale_\w+|bad_\w+|\w+_mismatch|\w+_taken|\w+_lost)`", prose)) <= ERRORS.keys()


# ---------------------------------------------------------------------- routes


def documented_routes(heading: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of all tables in a section that list requests, by method and path."""
    rows = [row for rows in tables(section(TEXT, heading)) for row in rows if "request" in row]
    return {tuple(request.split()): row for row in rows for request in codes(row["request"])}  # type: ignore[misc]


def served_routes(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }


@pytest.mark.asyncio
async def test_the_routes_of_a_pserver() -> None:
    documented = documented_routes("Of a pserver")
    async with run_pserver() as (_, app):
        served = served_routes(app.openapi())
    assert documented.keys() | documented_routes("Of both").keys() == served.keys() | UNDESCRIBED
    fenced, _ = tables(section(TEXT, "Of a pserver"))
    for route, row in documented.items():
        headers = {p["name"] for p in served[route].get("parameters", ()) if p["in"] == "header"}
        assert (row in fenced) == (headers >= FENCE.to_headers().keys()), route


@pytest.mark.asyncio
async def test_the_routes_of_the_coordinator() -> None:
    async with run_coordinator() as app:
        served = served_routes(app.openapi())
    expected = served.keys() | UNDESCRIBED | PAGE_ROUTES
    assert documented_routes("Of the coordinator").keys() | documented_routes("Of both").keys() == expected


PAGE_ROUTES = {("GET", "/"), ("GET", "/dashboard/{name}")}
FASTAPI_ROUTES = {("GET", "/openapi.json"), ("GET", "/docs")}
UNDESCRIBED = FASTAPI_ROUTES | {("OPTIONS", "/")}  # not in the OpenAPI document


@pytest.mark.asyncio
async def test_the_routes_that_describe_themselves_are_served() -> None:
    async with run_pserver() as (_, app), call(app) as http:
        for method, path in FASTAPI_ROUTES:
            assert (await http.request(method, path)).status_code == 200


def test_the_errors_of_requests_are_codes() -> None:
    rows = [row for rows in tables(section(TEXT, "Endpoints")) for row in rows]
    listed = {code for row in rows for code in codes(row.get("errors", "") + row.get("error", ""))}
    assert len(listed) > 30
    assert listed - {"get"} <= ERRORS.keys()


def test_the_bodies_are_messages() -> None:
    names = set(re.findall(r"`([A-Z]\w+)`", section(TEXT, "Endpoints")))
    assert names == {n for n, c in inspect.getmembers(messages, inspect.isclass) if n in names}
    assert len(names) > 15
