"""`docs/protocol.md` and `docs/replication.md`: headers, plan members and requests match the code."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import FastAPI

from ps_config.tokens import SCOPES
from ps_protocol.fence import FENCE_HEADER, Fence
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import BARRIER_HEADER, HAVE_HEADER, NORM_HEADER, VERDICT_HEADER, WAIT_HEADER
from services.runtime.security import ROUTE_SCOPES

from .apps import run_coordinator, run_pserver
from .markdown import codes, example_plan, read, section, table, tables, without_code

TEXT = read("protocol.md")


def test_headers() -> None:
    rows, _, others = tables(section(TEXT, "The fence"))
    assert [codes(row["word"]) for row in rows] == [[field] for field in Fence._fields]
    assert FENCE_HEADER in section(TEXT, "The fence")
    assert [codes(row["header"])[0] for row in others] == [
        BARRIER_HEADER, VERDICT_HEADER, HAVE_HEADER, NORM_HEADER, WAIT_HEADER,
    ]  # fmt: skip


def test_members_of_a_plan() -> None:
    plan = example_plan(TEXT)
    assert [codes(row["member"])[0] for row in table(section(TEXT, "The slice plan"), "member")] == list(plan)
    assert SlicePlan.from_json(plan).as_json == plan


# ---------------------------------------------------------------------- routes and scopes


def served_routes(app: FastAPI) -> set[tuple[str, str]]:
    found: list[Any] = [*app.routes]
    return {(method, route.path) for route in found for method in route.methods - {"HEAD"}}


@pytest.mark.asyncio
async def test_every_route_has_a_scope_and_every_documented_request_a_route() -> None:
    async with run_pserver() as (_, pserver), run_coordinator() as coordinator:
        served = served_routes(pserver) | served_routes(coordinator)
    assert served == ROUTE_SCOPES.keys()  # a route without a scope could be called by any client
    text = without_code(TEXT + read("replication.md"))
    documented = {tuple(code.split()) for code in codes(text) if re.match(r"[A-Z]+ /v1/", code)}
    assert len(documented) > 15
    assert documented <= served
    assert all(f"`{scope}`" in section(TEXT, "Who may call what") for scope in SCOPES)
