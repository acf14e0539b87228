"""Both services describe every route that they serve, the binary ones included, in valid OpenAPI 3.1."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeAlias

import pytest
from fastapi import FastAPI
from openapi_spec_validator import OpenAPIV31SpecValidator

from ps_config.tokens import SCOPES
from ps_protocol import routes
from ps_protocol.errors import PROBLEM_CONTENT_TYPE
from ps_protocol.fence import FENCE_HEADER, Fence
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import BARRIER_HEADER, HAVE_HEADER, NORM_HEADER, VERDICT_HEADER, WAIT_HEADER
from services.runtime.security import ROUTE_SCOPES

from ..unit.protocol.test_errors import find_unbounded
from .apps import call, run_coordinator, run_pserver
from .markdown import codes, example_plan, read, section, table, tables, without_code

Document: TypeAlias = dict[str, Any]

TENSORS = {routes.SEND, routes.INITIAL, routes.GET, routes.NORM, routes.BARRIER, routes.SLOTS}
FENCED = [("post", path) for path in sorted(TENSORS)] + [("get", routes.BUFFERS)]


async def read_documents() -> dict[str, Document]:
    async with run_pserver() as (_, pserver), run_coordinator() as coordinator:
        apps = {"pserver": pserver, "coordinator": coordinator}
        return {name: await read_document(app) for name, app in apps.items()}


async def read_document(app: FastAPI) -> Document:
    async with call(app) as http:
        document: Document = (await http.get("/openapi.json")).json()
    return document


@pytest.fixture(scope="module")
def documents() -> dict[str, Document]:
    return asyncio.run(read_documents())


@pytest.fixture(params=["pserver", "coordinator"])
def document(request: pytest.FixtureRequest, documents: dict[str, Document]) -> Document:
    return documents[request.param]


@pytest.fixture
def pserver(documents: dict[str, Document]) -> Document:
    return documents["pserver"]


def known_paths() -> set[str]:
    """Return every path of ps_protocol.routes, as OpenAPI writes it."""
    values = {value for name, value in vars(routes).items() if name.isupper() and value.startswith("/")}
    return {value.replace(":path}", "}") for value in values}


def test_every_path_of_the_protocol_is_served_and_described(documents: dict[str, Document]) -> None:
    assert documents["pserver"]["paths"].keys() >= {*TENSORS, routes.BUFFERS, routes.UPDATES, routes.FENCE_STANDBY}
    assert known_paths() == {path for document in documents.values() for path in document["paths"]}


def test_the_document_is_valid(document: Document) -> None:
    assert document["openapi"].startswith("3.1")
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def operations_of(document: Document) -> dict[tuple[str, str], Document]:
    return {(method, path): each for path, methods in document["paths"].items() for method, each in methods.items()}


def test_every_operation_is_described_and_may_fail_with_a_problem(document: Document) -> None:
    operations = operations_of(document)
    assert all(operation["summary"] and operation["tags"] for operation in operations.values())
    failures = {route: list(operation["responses"]["default"]["content"]) for route, operation in operations.items()}
    assert failures == {route: [PROBLEM_CONTENT_TYPE] for route in operations}
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z]\w+", name) for name in ids)
    for route, operation in operations.items():
        for content in (answer.get("content", {}) for answer in operation["responses"].values()):
            schema = content.get("application/json", {}).get("schema", {})
            assert schema.get("items", schema).get("additionalProperties") is not True, route


def test_bodies_and_parameters_are_bounded(document: Document) -> None:
    schemas = {**document, "$defs": document["components"]["schemas"]}
    for route, operation in operations_of(document).items():
        bodies = operation.get("requestBody", {}).get("content", {})
        taken = [body["schema"] for body in bodies.values() if body["schema"].get("format") != "binary"]
        taken += [parameter["schema"] for parameter in operation.get("parameters", ())]
        assert [place for schema in taken for place in find_unbounded(schema, schemas, " ".join(route))] == []


# ---------------------------------------------------------------------- the documented protocol


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
