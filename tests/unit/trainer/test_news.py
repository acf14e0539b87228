"""News of restarted pservers: the requests that they end, and the heartbeats that fetch them."""

from __future__ import annotations

import asyncio
import time

import pytest

from ps_protocol.messages import PserverInfo, TrainerHeartbeatReply
from trainer_client.news import MIN_PERIOD_SECONDS, News


def report(news: News, *incarnations: int) -> None:
    """Let a heartbeat bring these incarnations of the pservers."""
    infos = tuple(
        PserverInfo(index=index, address=f"http://{index}-{incarnation}:1", incarnation=incarnation, http2=True)
        for index, incarnation in enumerate(incarnations)
    )
    reply = TrainerHeartbeatReply(state="training", failure=None, attempt=0, pservers=infos)
    news.update(reply, asyncio.get_running_loop().time())


async def wait(news: News, index: int, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds) as limit:
            with news.waits[index].add(limit):
                await asyncio.Event().wait()
    except TimeoutError:
        return "given up"
    raise AssertionError


async def test_a_request_to_a_replaced_pserver_is_given_up_at_once():
    news = News()
    report(news, 1, 1)
    waits = [asyncio.create_task(wait(news, index, 30)) for index in (0, 0, 1)]
    await asyncio.sleep(0)
    report(news, 1, 1)
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waits)
    report(news, 2, 1)
    assert await asyncio.wait_for(asyncio.gather(*waits[:2]), 1) == ["given up"] * 2
    assert not waits[2].done()
    waits[2].cancel()


async def test_an_older_incarnation_and_one_after_the_answer_end_no_request():
    news = News()
    report(news, 2)
    waiting = asyncio.create_task(wait(news, 0, 0.05))
    await asyncio.sleep(0)
    report(news, 1)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert await waiting == "given up"  # by its own time-out
    report(news, 3)
    assert news.pservers[0].incarnation == 3


async def test_a_request_that_is_ending_already_does_not_disturb_the_heartbeats() -> None:
    """Its time-out cannot be moved any more."""
    news, ended = News(), asyncio.Event()

    async def request() -> None:
        async with asyncio.timeout(100) as limit:
            with news.waits[0].add(limit):
                try:
                    await asyncio.Event().wait()
                finally:
                    await ended.wait()  # its connection is closed

    report(news, 1)
    requesting = asyncio.create_task(request())
    await asyncio.sleep(0)
    for incarnation in (2, 3):
        report(news, incarnation)
        await asyncio.sleep(0.01)
    ended.set()
    with pytest.raises(TimeoutError):
        await requesting
    assert news.pservers[0].incarnation == 3


async def test_waits_for_news_share_few_heartbeats() -> None:
    news = News()
    num_heartbeats = 0

    async def send_heartbeats() -> None:
        nonlocal num_heartbeats
        while True:
            await news.wait_for_next_heartbeat(60)
            num_heartbeats += 1

    async def want_news() -> None:
        for _ in range(3):
            await news.wait_for_heartbeat(60)

    sending = asyncio.create_task(send_heartbeats())
    begun = time.monotonic()
    await asyncio.gather(*(want_news() for _ in range(20)))
    sending.cancel()
    assert 2 <= num_heartbeats <= 5
    assert time.monotonic() - begun >= 2 * MIN_PERIOD_SECONDS >= 0.4
