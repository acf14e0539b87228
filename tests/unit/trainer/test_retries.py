"""Requests to a pserver that has restarted, is busy, or is hidden behind a gateway: retries, news, and pauses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from ps_protocol.errors import (
    ContributionMissing,
    FutureRound,
    GradpostError,
    NotReady,
    RoundPending,
    StalePserver,
    StaleRun,
    TryAgain,
    Unauthenticated,
)
from ps_protocol.fence import Fence
from ps_protocol.messages import PserverInfo, TrainerHeartbeatReply
from ps_protocol.requests import Pull
from ps_protocol.retry import (
    MAX_PAUSE_SECONDS,
    choose_backoff,
    choose_pause,
    read_retry_after,
)
from ps_protocol.routes import SEND
from ps_protocol.vocabulary import PROTOCOL_VERSION
from trainer_client.client.news import News
from trainer_client.client.pserver_client import PserverClient
from trainer_client.client.pserver_connection import PserverConnection
from trainer_client.client.telemetry import TrainerMetrics
from trainer_client.transport.work import Work, pause

from .driving import drive

INFO = PserverInfo(index=0, address="http://pserver", incarnation=1, http2=False)
RESTARTED = INFO.model_copy(update={"incarnation": 2})
FENCE = Fence(PROTOCOL_VERSION, "run", 0, "plan", 0, 1, 0, 1, 1)
PULL = Pull(1)
DONE = httpx.Response(200, json={"contributions": "a", "sum_of_squares": 9.0})
STAGED = httpx.Response(200, json={"status": "staged", "staged": 1, "duplicates": 0, "complete": True})

Answer = Callable[[str], httpx.Response]


def refuse(error: GradpostError) -> httpx.Response:
    return httpx.Response(error.status, json=error.to_problem(), headers={"retry-after": "0"})


class Answering:
    """An `Exchange` with a pserver that answers so each URL; None: not at all."""

    def __init__(self, answer: Answer, seconds: float = 0.0) -> None:
        self.answer = answer
        self.seconds = seconds  # until the answer

    def send(self, method: str, url: str, headers: Mapping[str, str], **_: Any) -> Work[httpx.Response]:
        yield from pause(self.seconds)
        response = self.answer(url)
        while response is None:
            yield math.inf
        response.request = httpx.Request(method, url)
        return response


def client_of(answer: Answer, news: News, *, seconds: float = 0.0, **patience: float) -> PserverClient:
    """Return a client of a pserver that answers so; `patience` replaces 60 s."""
    given: dict[str, Any] = {"retry_seconds": 60, "deadline_seconds": 60, **patience}
    io: Any = Answering(answer, seconds)
    connection = PserverConnection(INFO, FENCE, io, TrainerMetrics(), news, **given)
    return PserverClient(connection, max_delay=0)


@pytest.mark.parametrize("coordinator_answers", [True, False])
@pytest.mark.parametrize(
    "refusal",
    [
        NotReady("it has no run yet"),
        TryAgain("it writes a checkpoint first", code="stopping"),
        StalePserver("it has another incarnation"),
        StalePserver("it is a standby now", code="not_leader"),
        StaleRun("it is behind"),
    ],
    ids=lambda refusal: refusal.code,
)
def test_a_restarted_pserver_has_as_long_as_the_coordinator_answers(
    refusal: GradpostError, coordinator_answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away for longer than a request may take, and resumes once the coordinator has all pservers."""
    monkeypatch.setattr("trainer_client.client.pserver_connection.NEWS_SECONDS", 0.01)
    answers = [*[refuse(refusal)] * 3, DONE]
    news = News(heard_at=float("inf")) if coordinator_answers else News()
    client = client_of(lambda _: answers.pop(0), news, deadline_seconds=0.001, seconds=0.0005)
    if coordinator_answers:
        drive(client.norm(PULL))
        assert answers == []
    else:
        with pytest.raises(type(refusal)):
            drive(client.norm(PULL))


def test_the_time_of_a_pending_round_does_not_count_against_the_deadline() -> None:
    """A pserver may stop after a minute of waiting for a lost trainer."""
    stops = refuse(TryAgain("this pserver stops"))
    answers = [stops, *[refuse(RoundPending("trainer 1 is missing"))] * 4, stops, DONE]

    drive(client_of(lambda _: answers.pop(0), News(), deadline_seconds=0.3, seconds=0.1).norm(PULL))
    assert answers == []


def test_the_page_of_a_gateway_is_handled_as_no_answer() -> None:
    news = News(heard_at=float("inf"))
    answers = [*[httpx.Response(status, text="\n404 page not found") for status in (404, 429, 502)], DONE]
    pages: list[dict[int, str]] = []

    def answer(_: str) -> httpx.Response:
        pages.append(dict(news.pages))
        return answers.pop(0)

    drive(client_of(answer, news).norm(PULL))
    assert (answers, news.pages, news.failing) == ([], {}, {})
    assert "answered 502, but not as Gradpost: 404 page not found. Check the address" in pages[-1][0]


@pytest.mark.parametrize("restarts", [True, False])
def test_each_incarnation_gets_the_contribution_and_one_that_loses_it_is_given_up(restarts: bool) -> None:
    news, num_pushes, num_asked = News(), 0, 0

    def answer(url: str) -> httpx.Response:
        nonlocal num_pushes, num_asked
        if url.endswith(SEND):
            num_pushes += 1
            return STAGED
        num_asked += 1
        if num_asked > 20:
            return DONE
        if restarts:
            news.pservers[0] = INFO.model_copy(update={"incarnation": 1 + num_asked})
        return refuse(ContributionMissing("push it again"))

    client = client_of(answer, news)
    drive(client.push(1, (memoryview(b"frame"),)))
    if restarts:
        drive(client.norm(PULL))
        assert num_pushes == 21
    else:
        with pytest.raises(ContributionMissing):
            drive(client.norm(PULL))


@pytest.mark.parametrize("answer", [FutureRound("round 1 is ahead"), ContributionMissing("pulled, and lost since")])
def test_a_pserver_that_stays_behind_is_given_up_after_the_time_of_a_round(
    monkeypatch: pytest.MonkeyPatch, answer: GradpostError
) -> None:
    monkeypatch.setattr("trainer_client.client.pserver_connection.NEWS_SECONDS", 0.01)
    news = News(heard_at=float("inf"))
    news.pservers[0] = RESTARTED
    ahead = refuse(answer)
    with pytest.raises(type(answer)):
        drive(client_of(lambda _: ahead, news, deadline_seconds=0.2).norm(PULL))
    assert news.ahead_of == {0: 2}


def test_the_token_may_reach_a_promoted_standby_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.client.pserver_connection.NEWS_SECONDS", 0.01)
    news, refused = News(heard_at=float("inf")), refuse(Unauthenticated("the bearer token is not valid"))
    answers = [refused]
    client = client_of(lambda _: answers.pop(0), news)
    with pytest.raises(Unauthenticated):
        drive(client.norm(PULL))
    news.pservers[0] = RESTARTED
    answers += [refused, refused, DONE]
    drive(client.norm(PULL))


# ---------------------------------------------------------------- news of restarted pservers


def report(news: News, *incarnations: int) -> None:
    """Let a heartbeat bring these incarnations of the pservers."""
    infos = tuple(
        PserverInfo(index=index, address=f"http://{index}-{incarnation}:1", incarnation=incarnation, http2=True)
        for index, incarnation in enumerate(incarnations)
    )
    news.update(TrainerHeartbeatReply(state="training", failure=None, attempt=0, pservers=infos))


def test_a_request_to_a_replaced_pserver_is_given_up_at_once():
    news, urls = News(), list[str]()

    def answer(url: str) -> httpx.Response | None:
        urls.append(url.partition("/v1")[0])
        return DONE if url.startswith("http://0-2") else None

    report(news, 1, 1)
    request = client_of(answer, news).norm(PULL)  # type: ignore[arg-type]
    report(news, 1, 2)
    for _ in range(3):
        assert next(request) > time.monotonic() + 50  # its deadline
    report(news, 2, 2)
    drive(request)
    assert urls == ["http://0-1:1", "http://0-2:1"]
    report(news, 1, 1)
    assert news.pservers[0].incarnation == 2, "an older incarnation never comes back"


# ---------------------------------------------------------------- pauses


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0), ("2", 2), ("86400", MAX_PAUSE_SECONDS), ("9" * 5000, MAX_PAUSE_SECONDS),
        (None, None), ("", None), ("-1", None), ("1.5", None), ("²", None), ("Fri, 31 Dec 2027 23:59:59 GMT", None),
    ],
)  # fmt: skip
def test_retry_after_is_read(text: str | None, seconds: float | None) -> None:
    assert read_retry_after(text) == seconds


@pytest.mark.parametrize(
    ("answer", "retry_after_seconds", "shortest", "range_"),
    [
        (TryAgain("full", code="overloaded"), 2.0, 0.02, (2.0, 4.0)),  # Retry-After, and up to twice as long
        (TryAgain("full", code="overloaded"), None, 0.25, (0.25, 0.25)),
        (TryAgain("full", code="overloaded"), 0.0, 0.25, (0.25, 0.25)),
        (NotReady("wait"), 1.0, 0.02, (0.02, 0.02)),  # a wait for other trainers
        (RoundPending("wait"), 1.0, 0.02, (0.02, 0.02)),
        *((attempt, None, 0.0, (0.0, seconds)) for attempt, seconds in (
            (1, 0.05), (3, 0.2), (6, 1.6), (7, 2.0), (10_000, 2.0))),  # without an answer
    ],
)  # fmt: skip
def test_a_pause_is_random_within_its_range(
    answer: TryAgain | int, retry_after_seconds: float | None, shortest: float, range_: tuple[float, float]
) -> None:
    if isinstance(answer, int):
        pauses = [choose_backoff(answer) for _ in range(1000)]
    else:
        if retry_after_seconds is not None:
            answer.retry_after_seconds = retry_after_seconds
        pauses = [choose_pause(answer, shortest) for _ in range(1000)]
    low, high = range_
    assert low <= min(pauses) <= low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) <= max(pauses) <= high
