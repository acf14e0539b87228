from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ps_http2 import asgi
from ps_protocol.errors import RoundPending, StaleRound, TryAgain, error_from_problem
from services.runtime.errors import problem_response
from services.runtime.logs import configure_logs

from .support import Sample, running
from .test_security import ask_raw

MEMBERS = {"type", "title", "status", "detail", "code", "may_be_retried", "instance"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running(Sample().make_app()) as server,
        httpx.AsyncClient(base_url=server.address) as client,
    ):
        yield client


def check_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Assert the shape of a problem document and return its further members."""
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert (response.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert problem["type"] == f"urn:gradpost:error:{code}"
    assert problem["instance"] == response.url.raw_path.decode()
    assert problem["detail"]
    return {key: value for key, value in problem.items() if key not in MEMBERS}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere%20at%20all", 404, "not_found"),
        ("DELETE", "/healthz", 405, "method_not_allowed"),
        ("GET", "/raw/fine", 405, "method_not_allowed"),
        ("GET", "/stale", 409, "stale_round"),
        ("POST", "/raw/stale", 409, "stale_round"),
        ("GET", "/pending", 503, "round_pending"),
        ("GET", "/not-ready", 503, "not_ready"),
        ("GET", "/bug", 500, "internal_error"),
        ("POST", "/raw/bug", 500, "internal_error"),
    ],
)
async def test_every_failure_has_one_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    check_problem(await client.request(method, path), status, code)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_client_rebuilds_the_same_error(client: httpx.AsyncClient) -> None:
    for response in (await client.get("/stale"), await client.post("/raw/stale", content=b"body")):
        error = error_from_problem(response.json())
        assert type(error) is StaleRound
        assert str(error) == "round 3 is over (expected round 4; actual round 3)"
        assert error.facts["current"] == 4


@pytest.mark.asyncio(loop_scope="module")
async def test_method_not_allowed_says_which_are(client: httpx.AsyncClient) -> None:
    assert (await client.delete("/healthz")).headers["allow"] == "GET, HEAD"
    assert (await client.delete("/raw/fine")).headers["allow"] == "POST"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "places"),
    [
        (b'{"times": "x"}', ["body.name", "body.times"]),
        (b"{", ["body.1"]),
        (b"", ["body"]),
    ],
)
async def test_invalid_message_names_the_places(client: httpx.AsyncClient, body: bytes, places: list[str]) -> None:
    response = await client.post("/greet/a", content=body, headers={"content-type": "application/json"})
    facts = check_problem(response, 422, "invalid_message")
    assert [error["place"] for error in facts["errors"]] == places
    assert places[0] in response.json()["detail"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bug_is_logged_once_and_not_told(client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("sample", "json")
    for method, path in (("GET", "/bug"), ("POST", "/raw/bug")):
        response = await client.request(method, path)
        assert "secret" not in response.text
        (line,) = capsys.readouterr().err.splitlines()
        logged = json.loads(line)
        assert "ZeroDivisionError: secret" in logged["exception"]
        assert (logged["method"], logged["path"]) == (method, path)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bug_in_the_middle_of_an_answer_cuts_it_off(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("sample", "json")
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post("/raw/cut")
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in logged if "exception" in line] == ["unexpected error"]
    assert (await client.get("/healthz")).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused_in_the_middle_of_an_answer_is_no_bug(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("sample", "json")
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post("/raw/late")
    assert "unexpected error" not in capsys.readouterr().err


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ["/nowhere", "/raw-refusal", "/raw-bug"])
async def test_the_answer_arrives_although_the_body_was_not_read(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, content=b"x" * 16_000_000)
    assert response.headers["content-type"] == "application/problem+json"
    older = b"POST %b HTTP/1.0\r\nHost: localhost\r\nContent-Length: 16000000\r\n\r\n" % path.encode()
    answer = await ask_raw(str(client.base_url).rstrip("/"), older + bytes(16_000_000))
    assert answer.startswith(b"HTTP/1.1 %d " % response.status_code)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_does_not_come_delays_the_answer_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DISCARD_SECONDS", 0.1)
    async with running(Sample().make_app()) as running_server:
        host, port = running_server.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx")
        assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 404 Not Found\r\n"
        writer.close()


def test_retry_after_is_zero_only_where_the_server_has_waited() -> None:
    assert problem_response(RoundPending("wait")).headers["retry-after"] == "0"
    assert problem_response(TryAgain("wait", code="queue_full")).headers["retry-after"] == "0"
    assert problem_response(TryAgain("wait", code="overloaded")).headers["retry-after"] == "1"
    assert problem_response(TryAgain("wait")).headers["retry-after"] == "1"
    assert "retry-after" not in problem_response(StaleRound("over")).headers


def test_a_fact_that_json_does_not_know() -> None:
    assert json.loads(bytes(problem_response(StaleRound("over", current={1})).body))["current"] == "{1}"
