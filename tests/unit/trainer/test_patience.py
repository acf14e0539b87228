"""How long a request is repeated to a pserver that has come back, and does not know the run or its own life yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ps_config.certificates import TlsFiles
from ps_protocol.errors import (
    ContributionMissing,
    FutureRound,
    GradpostError,
    NotReady,
    RoundPending,
    StalePserver,
    StaleRun,
    TryAgain,
    Unreachable,
)
from ps_protocol.fence import Fence
from ps_protocol.messages import PserverInfo
from ps_protocol.routes import SEND
from trainer_client.metrics import TrainerMetrics
from trainer_client.news import News
from trainer_client.pserver_client import PserverClient
from trainer_client.pserver_connection import PserverConnection
from trainer_client.transport.exchange import Exchange

INFO = PserverInfo(index=0, address="http://pserver", incarnation=1, http2=False)
FENCE = Fence(1, "run", 0, "plan", 0, 1, 0, 1, 1)
NUM_REFUSALS = 3


Answer = Callable[[httpx.Request], httpx.Response] | Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


@asynccontextmanager
async def exchange(answer: Answer) -> AsyncIterator[Exchange]:
    """With somebody who answers so."""
    exchange = Exchange(TlsFiles(), None, http2=False)
    exchange._transport = httpx.MockTransport(answer)
    yield exchange
    await exchange.aclose()


def make_client(http: Exchange, news: News, **patience: float) -> PserverClient:
    """Return a client of the pserver INFO; `patience` replaces 60 s, or a `max_delay` of 0."""
    given: dict[str, Any] = {"retry_seconds": 60, "deadline_seconds": 60, "max_delay": 0, **patience}
    max_delay = given.pop("max_delay")
    return PserverClient(
        PserverConnection(INFO, FENCE, lambda _: http, TrainerMetrics(), news, **given), max_delay=max_delay
    )


REFUSALS = [NotReady("it has no run yet"), StalePserver("it has another life"), StaleRun("it is behind")]


async def ask(refusal: GradpostError, news: News) -> int:
    """Send a barrier to a pserver that refuses it for a while; returns how many requests that took."""
    requests = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal requests
        requests += 1
        if requests > NUM_REFUSALS:
            return httpx.Response(200, json={"round": 2})
        return httpx.Response(refusal.status, json=refusal.to_problem(), headers={"retry-after": "0"})

    async with exchange(answer) as http:
        client = make_client(http, news, deadline_seconds=0)
        await client.barrier(1, "batch")
    return requests


@pytest.mark.asyncio
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
async def test_it_is_waited_for_as_long_as_the_coordinator_answers(
    refusal: GradpostError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away for longer than a request may take; the coordinator tells it when all are back."""
    monkeypatch.setattr("trainer_client.pserver_connection.NEWS_SECONDS", 0.01)
    assert await ask(refusal, News(heard_at=float("inf"))) == NUM_REFUSALS + 1


@pytest.mark.asyncio
async def test_a_round_that_has_been_pending_for_long_uses_up_nobodys_patience() -> None:
    """A pserver stops in a minute in which a lost trainer is waited for: it may be back soon."""
    answers = [*[RoundPending("trainer 1 is missing")] * 4, TryAgain("this pserver stops"), None]

    async def answer(request: httpx.Request) -> httpx.Response:
        error = answers.pop(0)
        await asyncio.sleep(0.1)
        if error is None:
            return httpx.Response(200, json={"round": 1})
        return httpx.Response(error.status, json=error.to_problem(), headers={"retry-after": "0"})

    async with exchange(answer) as http:
        client = make_client(http, News(), deadline_seconds=0.3)
        await client.barrier(1, "batch")
    assert answers == []


@pytest.mark.asyncio
async def test_what_an_earlier_life_has_answered_uses_up_nobodys_patience() -> None:
    """It said that it stops, and was away for longer than a request may take; the next life is busy for a moment."""
    news = News()
    answers = [TryAgain("this pserver stops"), None, TryAgain("too many requests", code="overloaded"), None]

    async def answer(request: httpx.Request) -> httpx.Response:
        error = answers.pop(0)
        await asyncio.sleep(0.2)
        if len(answers) == 2:
            news.pservers[0] = INFO.model_copy(update={"incarnation": 2})
            raise httpx.ConnectError("refused")
        if error is None:
            return httpx.Response(200, json={"round": 1})
        return httpx.Response(error.status, json=error.to_problem(), headers={"retry-after": "0"})

    async with exchange(answer) as http:
        client = make_client(http, news, deadline_seconds=0.25)
        await client.barrier(1, "batch")
    assert answers == []


PAGE = "\n404 page not found"


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [404, 413, 429, 500, 502, 520])
async def test_a_gateways_page_is_as_good_as_no_answer(status: int) -> None:
    news = News(heard_at=float("inf"))
    answers = [httpx.Response(status, text=PAGE)] * 3 + [httpx.Response(200, json={"round": 1})]
    pages: list[dict[int, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        pages.append(dict(news.pages))
        return answers.pop(0)

    async with exchange(answer) as http:
        client = make_client(http, news)
        await client.barrier(1, "batch")
    assert (answers, news.pages, news.failing) == ([], {}, {})
    assert f"answered {status} without a problem document: 404 page not found; is it Gradpost?" in pages[-1][0]


@pytest.mark.asyncio
async def test_a_page_that_stays_is_named() -> None:
    async with exchange(lambda _: httpx.Response(413, html="<html>\n<h1>413</h1>")) as http:
        client = make_client(http, News(), retry_seconds=0.1)
        with pytest.raises(Unreachable, match=r"http://pserver/v1/barrier answered 413 .* <html>; is it Gradpost"):
            await client.barrier(1, "batch")


async def push_to_one_that_forgets(*, dies: bool) -> int:
    """A pserver asks for the contribution again and again, 20 times if it has died meanwhile; returns the pushes."""
    news, pushes, barriers = News(), 0, 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal pushes, barriers
        if request.url.path == SEND:
            pushes += 1
            return httpx.Response(200, json={"status": "staged", "staged": 1, "duplicates": 0, "complete": True})
        barriers += 1
        if barriers > 20:
            return httpx.Response(200, json={"round": 1})
        if dies:
            news.pservers[0] = INFO.model_copy(update={"incarnation": 1 + barriers})
        missing = ContributionMissing("push it again")
        return httpx.Response(missing.status, json=missing.to_problem())

    async with exchange(answer) as http:
        client = make_client(http, news)
        await client.push(1, (memoryview(b"frame"),))
        await client.barrier(1, "batch")
    return pushes


@pytest.mark.asyncio
async def test_each_life_of_a_pserver_gets_the_contribution() -> None:
    assert await push_to_one_that_forgets(dies=True) == 21


@pytest.mark.asyncio
async def test_one_that_never_keeps_it_is_given_up() -> None:
    with pytest.raises(ContributionMissing):
        await push_to_one_that_forgets(dies=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
async def test_nobody_waits_for_ever_when_the_coordinator_is_away_too(refusal: GradpostError) -> None:
    with pytest.raises(type(refusal)):
        await ask(refusal, News())


@pytest.mark.asyncio
async def test_everything_that_may_not_have_been_pulled_is_kept() -> None:
    """With `max_delay` so many rounds are pushed and not pulled; a pserver that comes back may ask for all of them."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"status": "staged", "staged": 1, "duplicates": 0, "complete": True})

    async with exchange(answer) as http:
        client = make_client(http, News(), max_delay=12)
        for round_ in range(1, 30):
            await client.push(round_, (memoryview(b"frame"),))
        assert set(client._kept) >= set(range(17, 30))  # 1 + max_delay of them
        assert len(client._kept) < 20


@pytest.mark.asyncio
async def test_a_pserver_that_never_gets_back_what_it_has_lost_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the coordinator makes of it, it has had the time of a round."""
    monkeypatch.setattr("trainer_client.pserver_connection.NEWS_SECONDS", 0.01)
    news = News(heard_at=float("inf"))
    news.pservers[0] = INFO.model_copy(update={"incarnation": 2})
    ahead = FutureRound("round 1 is ahead")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(ahead.status, json=ahead.to_problem())

    async with exchange(answer) as http, asyncio.timeout(5):
        client = make_client(http, news, deadline_seconds=0.2)
        with pytest.raises(FutureRound):
            await client.barrier(1, "batch")
    assert news.ahead_of == {0: 2}
