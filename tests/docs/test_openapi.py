"""Both services describe every route that they serve, the binary ones included, in valid OpenAPI 3.1."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, TypeAlias

import pytest
from fastapi import FastAPI
from openapi_spec_validator import OpenAPIV31SpecValidator

from ps_config.tokens import SCOPES
from ps_protocol import routes
from ps_protocol.errors import PROBLEM_CONTENT_TYPE
from ps_protocol.fence import Fence
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.messages import BarrierAnswer, NormAnswer, PushAnswer
from ps_protocol.norms import AgreedNorm, ShardNorm
from services.runtime.scopes import ROUTE_SCOPES
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from ..unit.protocol.test_fields import find_unbounded
from .apps import call, run_coordinator, run_pserver
from .reading import read_json

Document: TypeAlias = dict[str, Any]

OF_EVERY_SERVICE = {routes.HEALTH, routes.READY, routes.METRICS}
TENSORS = {routes.SEND, routes.INITIAL, routes.GET, routes.NORM, routes.BARRIER}
FENCED = [("post", path) for path in sorted({*TENSORS, routes.SLOTS})] + [("get", routes.BUFFERS)]
CONTROL = {routes.RUN, routes.FREEZE, routes.MEMBERS, routes.RESTORABLE, routes.WANT_CHECKPOINT}
LOOKING = {
    routes.STATE,
    routes.BLOCKS,
    routes.SHARD,
    routes.SLOTS,
    routes.BLOCK_STATISTICS,
    routes.BUFFERS,
}
OF_A_PSERVER = TENSORS | CONTROL | LOOKING
HEADERS = Fence(1, "run", 0, "plan", 0, 1, 0, 1, 1).to_headers()


async def read_documents() -> dict[str, Document]:
    async with run_pserver() as (_, pserver), run_coordinator() as coordinator:
        return {"pserver": await read_document(pserver), "coordinator": await read_document(coordinator)}


async def read_document(app: FastAPI) -> Document:
    async with call(app) as http:
        document: Document = (await http.get("/openapi.json")).json()
    return document


async def check_allowed_methods(app: FastAPI) -> None:
    document = await read_document(app)
    async with call(app) as http:
        for path, methods in document["paths"].items():
            answer = await http.request("BREW", re.sub(r"{\w+}", "0", path))
            allowed = {method.upper() for method in methods} | ({"HEAD"} if "get" in methods else set())
            assert (answer.status_code, path, answer.headers["allow"]) == (405, path, ", ".join(sorted(allowed)))


def test_a_method_that_a_path_has_not_is_answered_with_all_that_it_has() -> None:
    async def check() -> None:
        async with run_pserver() as (_, pserver), run_coordinator() as coordinator:
            for app in (pserver, coordinator):
                await check_allowed_methods(app)

    asyncio.run(check())


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
    """Every path of ps_protocol.routes, as OpenAPI writes it."""
    values = {value for name, value in vars(routes).items() if name.isupper() and value.startswith("/")}
    return {value.replace(":path}", "}") for value in values}


def test_every_path_of_the_protocol_is_described(documents: dict[str, Document]) -> None:
    assert documents["pserver"]["paths"].keys() == OF_A_PSERVER | OF_EVERY_SERVICE
    assert documents["coordinator"]["paths"].keys() | OF_A_PSERVER <= known_paths()


def test_every_path_is_served_by_somebody(documents: dict[str, Document]) -> None:
    assert known_paths() == documents["coordinator"]["paths"].keys() | documents["pserver"]["paths"].keys()


def test_the_document_is_valid(document: Document) -> None:
    assert document["openapi"].startswith("3.1")
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_every_operation_says_what_it_is_and_may_fail_with_a_problem(document: Document) -> None:
    operations = {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert all(operation["summary"] and operation["tags"] for operation in operations.values())
    failures = {route: list(operation["responses"]["default"]["content"]) for route, operation in operations.items()}
    assert failures == {route: [PROBLEM_CONTENT_TYPE] for route in operations}
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z]\w+", name) for name in ids)


def test_every_json_answer_has_a_schema(document: Document) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for content in (answer.get("content", {}) for answer in operation["responses"].values()):
                schema = content.get("application/json", {}).get("schema", {})
                assert schema.get("items", schema).get("additionalProperties") is not True, (method, path)


def test_every_operation_names_the_scope_of_its_token(document: Document) -> None:
    [scheme] = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert all(f"`{scope}`" in scheme["description"] for scope in SCOPES)
    scopes = {(method, path.replace(":path}", "}")): scope for (method, path), scope in ROUTE_SCOPES.items()}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            scope = scopes[method.upper(), path]
            assert operation["security"] == ([{"token": [scope]}] if scope else [])
            assert ({"401", "403"} <= operation["responses"].keys()) == bool(scope)


def test_whatever_comes_with_a_request_has_a_bound(document: Document) -> None:
    schemas = {**document, "$defs": document["components"]["schemas"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            bodies = operation.get("requestBody", {}).get("content", {})
            taken = [body["schema"] for body in bodies.values() if body["schema"].get("format") != "binary"]
            taken += [parameter["schema"] for parameter in operation.get("parameters", ())]
            assert [place for schema in taken for place in find_unbounded(schema, schemas, where)] == []


def test_the_fence_is_required(pserver: Document) -> None:
    for method, path in FENCED:
        headers = {p["name"]: p["required"] for p in pserver["paths"][path][method]["parameters"]}
        assert headers.items() >= dict.fromkeys(HEADERS, True).items()
        of_a_barrier = {routes.BARRIER_HEADER: True, routes.VERDICT_HEADER: False}
        more = {routes.BARRIER: of_a_barrier} | {
            route: dict.fromkeys(optional, False)
            for route, optional in ((routes.GET, {*OPTIONAL, routes.HAVE_HEADER}), (routes.NORM, OPTIONAL))
        }
        assert headers == dict.fromkeys(HEADERS, True) | more.get(path, {})


def test_the_headers_are_of_the_form_that_is_described(pserver: Document) -> None:
    by_name = {p["name"]: p["schema"] for p in pserver["paths"][routes.GET]["post"]["parameters"]}
    norm = AgreedNorm(ShardNorm("5f0c", 1e-7), math.inf).to_header()
    for name, value in {**HEADERS, routes.NORM_HEADER: norm}.items():
        assert re.fullmatch(by_name[name]["pattern"], value)
        assert not re.search(by_name[name]["pattern"], "é")
    with raises_code("bad_header"):
        Fence.from_headers({**HEADERS, "gradpost-round": "9" * 19})
    assert not re.search(by_name["gradpost-round"]["pattern"], "9" * 19)


OPTIONAL = (routes.BARRIER_HEADER, routes.VERDICT_HEADER, routes.NORM_HEADER, routes.WAIT_HEADER)


@pytest.mark.parametrize("path", [routes.SEND, routes.INITIAL])
def test_pushes_take_a_frame(pserver: Document, path: str) -> None:
    operation = pserver["paths"][path]["post"]
    assert operation["requestBody"]["required"]
    assert list(operation["requestBody"]["content"]) == [CONTENT_TYPE]
    assert json_members(operation) == PushAnswer.model_fields.keys()


def test_a_barrier_takes_nothing(pserver: Document) -> None:
    operation = pserver["paths"][routes.BARRIER]["post"]
    assert "requestBody" not in operation
    assert json_members(operation) == BarrierAnswer.model_fields.keys()


def test_a_norm_is_a_message(pserver: Document) -> None:
    operation = pserver["paths"][routes.NORM]["post"]
    assert "requestBody" not in operation
    assert json_members(operation) == NormAnswer.model_fields.keys()


def test_a_get_may_name_blocks(pserver: Document) -> None:
    body = pserver["paths"][routes.GET]["post"]["requestBody"]
    assert not body.get("required", False)
    assert body["content"]["application/json"]["schema"]["type"] == "array"


@pytest.mark.parametrize(
    ("method", "path"), [("post", routes.GET), ("get", routes.BLOCKS), ("get", routes.BUFFERS)], ids=str
)
def test_tensors_are_answered_as_a_frame(pserver: Document, method: str, path: str) -> None:
    assert list(pserver["paths"][path][method]["responses"]["200"]["content"]) == [CONTENT_TYPE]


def json_members(operation: Document) -> set[str]:
    return set(operation["responses"]["200"]["content"]["application/json"]["schema"]["properties"])


@pytest.mark.cluster
def test_running_services_serve_it(cluster: LocalCluster, documents: dict[str, Document]) -> None:
    assert read_json(f"{cluster.address}/openapi.json") == documents["coordinator"]
    for pserver in cluster.status().pservers:
        assert read_json(f"{pserver.address}/openapi.json") == documents["pserver"]
