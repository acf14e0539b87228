"""Both services describe every route that they serve, the binary ones included, in valid OpenAPI 3.1."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeAlias

import pytest
from fastapi import FastAPI
from openapi_spec_validator import OpenAPIV31SpecValidator

from ps_protocol import routes
from ps_protocol.errors import PROBLEM_CONTENT_TYPE

from ..unit.protocol.test_messages import find_unbounded
from .apps import call, run_coordinator, run_pserver

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
