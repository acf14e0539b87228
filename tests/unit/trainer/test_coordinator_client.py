"""A trainer's client of a coordinator that is silent, slow, stopping, or hidden behind a gateway."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
import pytest

from ps_config.control_client import GatewayPage, raise_for_problem
from ps_config.environment import PREFIX
from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, GradpostError, NotReady, StaleRun, TrainerLost, TryAgain, Unreachable
from ps_protocol.fields import Mean
from ps_protocol.messages import Leave, TrainerHeartbeat, TrainerHeartbeatReply, TrainerJoined
from trainer_client.client import coordinator_client
from trainer_client.client.coordinator_client import CoordinatorClient
from trainer_client.client.settings import read_settings

from ...raising import raises_code

JOINED = TrainerJoined(
    run="run1",
    rank=1,
    world_size=2,
    incarnation=1,
    consistency=Consistency(),
    lease_seconds=0.06,
    round_timeout_seconds=5,
)
TRAINING = TrainerHeartbeatReply(state="training")


class FakeCoordinator:
    """A coordinator with a list of answers for each route. The last one is repeated; exceptions are raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers: dict[str, list[Any]] = {"trainers": [JOINED], "heartbeat": [TRAINING], "leave": [None], **answers}
        self.requests: list[tuple[str, bytes]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.rsplit("/", 1)[-1]
        self.requests.append((route, request.content))
        answers = self.answers[route]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, GradpostError):
            return httpx.Response(answer.status, json=answer.to_problem())
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, content=b"" if answer is None else answer.model_dump_json())

    def num_requests(self, route: str) -> int:
        return len(self.bodies(route))

    def bodies(self, route: str) -> list[bytes]:
        return [body for name, body in self.requests if name == route]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_client, "RETRY_SECONDS", 0.005)
    for name in [*os.environ]:
        if name.startswith(PREFIX) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@contextmanager
def member(coordinator: FakeCoordinator, *, joins: bool = True, **settings: Any) -> Iterator[CoordinatorClient]:
    before = threading.active_count()
    with httpx.Client(transport=httpx.MockTransport(coordinator)) as http:
        client = CoordinatorClient(read_settings(**{"retry_seconds": 0.2} | settings), http)
        if joins:
            client.join(None)
        yield client
        client.leave("done")
    assert threading.active_count() == before


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 3
    while not condition():  # there is no event to wait for
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---------------------------------------------------------------- joining


def test_joining_is_repeated_until_the_coordinator_has_a_place():
    refusals = [httpx.ConnectError("refused"), NotReady("run 0 is under way"), TryAgain("the service stops")]
    coordinator = FakeCoordinator(trainers=[*refusals, JOINED])
    with member(coordinator) as client:
        assert client.joined == JOINED
    assert len(set(coordinator.bodies("trainers"))) == 1  # the same instance, so that it gets one place


# Pages of gateways without a backend: load balancers, ingresses with a default backend, login pages.
PAGES = [
    httpx.Response(404, text="\n404 page not found\nTraefik"),
    httpx.Response(500, json=["a", "list"]),
    httpx.Response(404, json={"code": 404, "message": "no such route"}),
    httpx.Response(429, text="slow down"),
    httpx.Response(502, text="<html>bad gateway</html>"),
    httpx.Response(503, json=["no", "problem", "document"]),
    httpx.Response(520),
    httpx.Response(302, headers={"location": "/login"}),
    httpx.Response(200, html="<h1>It works!</h1>"),
]


def describe_page(page: httpx.Response) -> str:
    first_line = page.text.strip().partition("\n")[0] or "an empty page"
    return rf"answered {page.status_code}, but not as Gradpost: {re.escape(first_line)}. Check the address"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.status_code))
def test_the_page_of_a_gateway_is_a_transport_error_that_shows_its_first_line(page: httpx.Response):
    page.request = httpx.Request("GET", "http://service/v1/status")
    with pytest.raises(GatewayPage, match=rf"^http://service/v1/status {describe_page(page)}"):
        raise_for_problem(page)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            httpx.ConnectError("refused"),
            r"did not answer for 0\.2 s .*in GRADPOST_COORDINATOR.*train\.py, .* torchrun --standalone …$",
        ),
        (httpx.ReadTimeout(""), "if it serves TLS, its address begins with https:"),
        (PAGES[0], f"/v1/trainers {describe_page(PAGES[0])}"),
    ],
)
def test_a_coordinator_that_cannot_be_reached_is_given_up_with_a_hint(answer: Any, message: str):
    coordinator = FakeCoordinator(trainers=[answer])
    with member(coordinator, joins=False) as client:
        begun = time.monotonic()
        with pytest.raises(Unreachable, match=rf"http://127\.0\.0\.1:7070.*{message}"):
            client.join(None)
        assert 0.2 <= time.monotonic() - begun < 2
    assert coordinator.num_requests("trainers") > 2


REFUSED, UNKNOWN = httpx.ConnectError("refused"), httpx.ConnectError("unknown host")
UNKNOWN.__cause__ = socket.gaierror(socket.EAI_NONAME, "unknown host")


@pytest.mark.parametrize(
    ("error", "address", "seconds", "is_given_up"),
    [
        (REFUSED, "http://127.0.0.1:7070", None, True),
        (REFUSED, "http://127.0.0.1:7070", 60, False),
        (REFUSED, "http://10.0.0.5:7070", None, False),
        (UNKNOWN, "http://coordinatr:7070", None, True),
        (UNKNOWN, "http://coordinator:7070", 60, False),
        (httpx.ReadTimeout(""), "http://127.0.0.1:7070", None, False),
    ],
)
def test_a_script_without_a_cluster_ends_early(
    monkeypatch, error, address: str, seconds: int | None, is_given_up: bool
):
    monkeypatch.setattr(coordinator_client, "JOIN_SECONDS", 0.1)
    monkeypatch.setenv("GRADPOST_COORDINATOR", address)
    coordinator = FakeCoordinator(trainers=[*[error] * 100, JOINED])
    outcome = raises_code("unreachable") if is_given_up else nullcontext()
    with member(coordinator, joins=False, retry_seconds=seconds) as client, outcome:
        client.join(None)


@pytest.mark.parametrize(("code", "is_repeated"), [("rank_taken", True), ("world_mismatch", False)])
def test_only_a_conflict_that_may_pass_is_tried_again(code: str, is_repeated: bool):
    coordinator = FakeCoordinator(trainers=[Conflict("no place", code=code)])
    with member(coordinator, joins=False, retry_seconds=2) as client, raises_code(code):
        client.join(None)
    assert (coordinator.num_requests("trainers") > 1) == is_repeated


def test_waiting_for_an_earlier_run_has_no_end():
    coordinator = FakeCoordinator(trainers=[*[NotReady("run 0 is under way")] * 100, JOINED])
    with member(coordinator, retry_seconds=0.1) as client:
        assert client.joined == JOINED


# ---------------------------------------------------------------- heartbeats


@pytest.mark.parametrize("has_answer", [True, False])
def test_the_failure_of_the_run_wakes_the_requests_and_each_has_an_error_of_its_own(has_answer: bool):
    failure = TrainerLost("trainer 0 was lost", ranks=[0])
    failed = TrainerHeartbeatReply(state="failed", failure=failure.to_problem()) if has_answer else failure
    with member(FakeCoordinator(heartbeat=[TRAINING, TRAINING, failed]), joins=False) as client:
        woken = threading.Event()
        client.news.wake = lambda: woken.set() if client.news.failure is not None else None
        client.join(None)
        assert woken.wait(3)
        errors = []
        for _ in range(3):
            with pytest.raises(TrainerLost, match="trainer 0 was lost") as raised:
                client.news.check_failure()
            errors.append(raised.value)
        assert len(set(map(id, errors))) == 3


def test_a_coordinator_of_another_run_ends_the_run():
    with member(FakeCoordinator(heartbeat=[StaleRun("the message is for another run")])) as client:
        eventually(lambda: isinstance(client.news.failure, StaleRun))


def test_training_goes_on_without_the_coordinator():
    errors = [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        TryAgain("the service stops"),
        TryAgain("the body came too slowly", code="slow_body"),
        GradpostError("an unexpected error"),
        *PAGES,
    ]
    coordinator = FakeCoordinator(heartbeat=[*errors, TRAINING])
    with member(coordinator) as client:
        eventually(lambda: coordinator.num_requests("heartbeat") > len(errors) + 1)
        assert client.news.failure is None


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize(("outcome", "expected"), [("done", "done"), ("failed", "failed"), ("whatever", "failed")])
def test_leaving_sends_the_last_progress_and_results_first_and_counts_once(outcome: str, expected: str):
    coordinator = FakeCoordinator()
    with member(coordinator) as client:
        client.round = 4
        client.results["accuracy"] = 0.98
        client.leave(outcome, "x" * 5000)
        (first, beat), (second, leave) = coordinator.requests[-2:]
        assert (first, second) == ("heartbeat", "leave")
        newest = TrainerHeartbeat.model_validate_json(beat)
        assert (newest.round, newest.results, newest.incarnation) == (4, {"accuracy": 0.98}, 1)
        message = Leave.model_validate_json(leave)
        assert (message.outcome, len(message.reason)) == (expected, 2000)
        client.leave("done")
        assert coordinator.num_requests("leave") == 1


def test_heartbeats_carry_each_reported_value_until_one_is_answered():
    coordinator = FakeCoordinator(heartbeat=[httpx.ConnectError("refused"), TryAgain("busy"), TRAINING])
    with member(coordinator) as client:
        client.report_results({"loss": 4.0})
        client.report_results({"loss": 1.0})
        eventually(lambda: coordinator.num_requests("heartbeat") == 1)
        client.report_results({"loss": 1.0, "accuracy": 0.5})
        eventually(lambda: coordinator.num_requests("heartbeat") > 4)
    sent = [TrainerHeartbeat.model_validate_json(beat).means for beat in coordinator.bodies("heartbeat")]
    loss, all_ = Mean(count=2, value=2.5), {"loss": Mean(count=3, value=2.0), "accuracy": Mean(count=1, value=0.5)}
    assert sent[:4] == [{"loss": loss}, all_, all_, {}]


def test_a_report_during_a_heartbeat_reaches_the_coordinator_before_the_end():
    has_begun, may_answer = threading.Event(), threading.Event()

    class Slow(FakeCoordinator):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            answer = super().__call__(request)
            if request.url.path.endswith("heartbeat"):
                has_begun.set()
                assert may_answer.wait(3)
            return answer

    coordinator = Slow()
    with member(coordinator) as client:
        assert has_begun.wait(3)
        client.report_results({"accuracy": 0.5})
        threading.Timer(0.05, may_answer.set).start()
        client.leave("done")
    last = TrainerHeartbeat.model_validate_json(coordinator.bodies("heartbeat")[-1])
    assert last.results == {"accuracy": 0.5}


@pytest.mark.parametrize(("outcome", "num_requests"), [("done", 3), ("failed", 1)])
def test_only_a_trainer_that_is_done_repeats_its_leave_until_it_is_answered(outcome: str, num_requests: int):
    """The others would wait for it, and its loss may end their run."""
    coordinator = FakeCoordinator(leave=[httpx.ConnectError("refused"), TryAgain("the disk is full"), None])
    with member(coordinator) as client:
        client.leave(outcome)
    assert coordinator.num_requests("leave") == num_requests
