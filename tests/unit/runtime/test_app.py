"""The common routes, problem documents and metrics of a service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ps_protocol.errors import NotReady, RoundPending, StaleRound, TryAgain, error_from_problem
from services.runtime.errors import problem_response
from services.runtime.logs import configure_logs

from .support import Sample, ask_raw, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

MEMBERS = {"type", "title", "status", "detail", "code", "may_be_retried", "instance"}


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


# ---------------------------------------------------------------------- common routes


async def test_health_and_readiness(client: httpx.AsyncClient, sample: Sample) -> None:
    for path in ("/healthz", "/readyz"):
        response = await client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    sample.missing = "1 of 2 pservers"
    response = await client.get("/readyz")
    sample.missing = None
    error = error_from_problem(response.json())
    assert (response.status_code, type(error)) == (503, NotReady)
    assert error.facts["waiting_for"] == "1 of 2 pservers"


# ---------------------------------------------------------------------- problem documents


def check_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Assert the shape of a problem document and return its further members."""
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert (response.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert problem["type"] == f"urn:gradpost:error:{code}"
    assert problem["instance"] == response.url.raw_path.decode()
    assert problem["detail"]
    return {key: value for key, value in problem.items() if key not in MEMBERS}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere%20at%20all", 404, "not_found"),
        ("DELETE", "/healthz", 405, "method_not_allowed"),
        ("GET", "/raw/fine", 405, "method_not_allowed"),
        ("GET", "/stale", 409, "stale_round"),
        ("POST", "/raw/stale", 409, "stale_round"),
        ("GET", "/bug", 500, "internal_error"),
        ("POST", "/raw/bug", 500, "internal_error"),
    ],
)
async def test_every_failure_has_one_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    check_problem(await client.request(method, path), status, code)


@pytest.mark.parametrize(
    ("body", "places"),
    [(b'{"times": "x"}', ["body.name", "body.times"]), (b"{", ["body.1"]), (b"", ["body"])],
)
async def test_invalid_message_names_the_places(client: httpx.AsyncClient, body: bytes, places: list[str]) -> None:
    response = await client.post("/greet/a", content=body, headers={"content-type": "application/json"})
    facts = check_problem(response, 422, "invalid_message")
    assert [error["place"] for error in facts["errors"]] == places
    assert places[0] in response.json()["detail"]


async def test_a_bug_is_logged_once_and_not_revealed(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("sample", "json")
    for method, path in (("GET", "/bug"), ("POST", "/raw/bug")):
        response = await client.request(method, path)
        assert "secret" not in response.text
        (line,) = capsys.readouterr().err.splitlines()
        logged = json.loads(line)
        assert "ZeroDivisionError: secret" in logged["exception"]
        assert (logged["method"], logged["path"]) == (method, path)


@pytest.mark.parametrize(("path", "events"), [("/raw/cut", ["unexpected error"]), ("/raw/late", [])])
async def test_a_failure_in_the_middle_of_a_response_aborts_it(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str], path: str, events: list[str]
) -> None:
    """A bug is logged, and a GradpostError is not."""
    configure_logs("sample", "json")
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(path)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in logged if "exception" in line] == events
    assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/raw-refusal", "/raw-bug"])
async def test_the_answer_arrives_although_the_body_was_not_read(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, content=b"x" * 16_000_000)
    assert response.headers["content-type"] == "application/problem+json"
    older = b"POST %b HTTP/1.0\r\nHost: localhost\r\nContent-Length: 16000000\r\n\r\n" % path.encode()
    answer = await ask_raw(str(client.base_url).rstrip("/"), older + bytes(16_000_000))
    assert answer.startswith(b"HTTP/1.1 %d " % response.status_code)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RoundPending("wait"), "0"),
        (TryAgain("wait", code="queue_full"), "0"),
        (TryAgain("wait", code="overloaded"), "1"),
        (TryAgain("wait"), "1"),
        (StaleRound("over"), None),
    ],
)
async def test_retry_after_is_zero_only_if_the_server_has_waited(error: Any, seconds: str | None) -> None:
    assert problem_response(error).headers.get("retry-after") == seconds
