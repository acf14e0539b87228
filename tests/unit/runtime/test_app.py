from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from ps_protocol.errors import NotReady, error_from_problem
from services.runtime import routing

from .support import Sample, http2_client, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(sample: Sample) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running(sample.make_app()) as server,
        httpx.AsyncClient(base_url=server.address) as client,
    ):
        yield client


async def test_health(client: httpx.AsyncClient) -> None:
    response = await client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_readiness_names_what_is_missing(client: httpx.AsyncClient, sample: Sample) -> None:
    assert (await client.get("/readyz")).status_code == 200
    sample.missing = "1 of 2 pservers"
    response = await client.get("/readyz")
    sample.missing = None
    error = error_from_problem(response.json())
    assert (response.status_code, type(error)) == (503, NotReady)
    assert error.facts["waiting_for"] == "1 of 2 pservers"


async def test_requests_are_measured_by_template() -> None:
    sample = Sample()
    async with running(sample.make_app()) as server, httpx.AsyncClient(base_url=server.address) as client:
        await client.post("/greet/a/b", json={"name": "c", "times": 1})
        await client.post("/greet/d", json={"name": "c", "times": "x"})
        await client.post("/raw/fine", content=b"12345")
        await client.get("/wp-login.php")
        await client.delete("/healthz")
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    value = sample.metrics.registry.get_sample_value
    for route, method, code in (
        ("/greet/{name:path}", "POST", "2xx"),
        ("/greet/{name:path}", "POST", "4xx"),
        ("/raw/{how}", "POST", "2xx"),
        ("unmatched", "GET", "4xx"),
        ("/healthz", "DELETE", "4xx"),
    ):
        labels = {"route": route, "method": method, "code": code}
        assert value("gradpost_http_requests_total", labels) == 1, labels
    raw = {"route": "/raw/{how}", "method": "POST", "code": "2xx"}
    assert value("gradpost_http_request_bytes_total", raw) == 5
    assert value("gradpost_http_response_bytes_total", raw) == len("5 HTTP/1.1\n")
    assert "wp-login" not in response.text


async def test_loop_lag_is_measured_while_serving(client: httpx.AsyncClient, sample: Sample) -> None:
    count = "gradpost_event_loop_lag_seconds_count"
    async with asyncio.timeout(5):
        while not sample.metrics.registry.get_sample_value(count):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def chunks(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes // 10):
        yield b"x" * 10


async def test_too_large_a_message_is_refused(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_MESSAGE_BYTES", 100)
    for body in (b"x" * 200, chunks(200)):  # with and without a Content-Length
        response = await client.post("/greet/a", content=body)
        assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert (await client.post("/raw/fine", content=b"x" * 200)).status_code == 200


async def test_a_message_of_too_many_items_is_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "MAX_MESSAGE_ITEMS", 100)
    response = await client.post("/greet/a", content=b"[" + b"[]," * 100 + b"[]]")
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert (await client.post("/greet/a", json={"name": "b", "times": 1})).status_code == 200


async def test_all_messages_together_are_bounded(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_MESSAGES_BYTES", 100)
    for _ in range(3):  # and what was counted is given back
        response = await client.post("/greet/a", content=b" " * 101)
        assert (response.status_code, response.json()["code"]) == (503, "overloaded")
        assert (await client.post("/greet/a", json={"name": "b", "times": 1})).status_code == 200


async def test_openapi_describes_raw_routes_and_problems(client: httpx.AsyncClient) -> None:
    for _ in range(2):  # it is built once and then kept
        document = (await client.get("/openapi.json")).json()
        raw = document["paths"]["/raw/{how}"]["post"]
        assert (raw["summary"], raw["operationId"]) == ("Echo how much came", "raw_post")
        assert "application/octet-stream" in raw["requestBody"]["content"]
        greet = document["paths"]["/greet/{name}"]["post"]
        for operation in (raw, greet):
            reference = operation["responses"]["default"]["content"]["application/problem+json"]["schema"]["$ref"]
            assert reference == "#/components/schemas/Problem"
        assert "422" not in greet["responses"]  # FastAPI's own shape of errors, which is never sent
        assert "code" in document["components"]["schemas"]["Problem"]["required"]


async def test_a_method_that_a_raw_route_does_not_have(client: httpx.AsyncClient) -> None:
    response = await client.head("/raw/fine")
    assert response.status_code == 405


async def test_raw_route_over_http2() -> None:
    async with running(Sample().make_app()) as server, http2_client() as client:
        response = await client.post(f"{server.address}/raw/fine", content=b"x" * 3_000_000)
        assert response.text == "3000000 HTTP/2\n"
