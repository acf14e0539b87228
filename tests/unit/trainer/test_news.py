"""What the news of other lives of pservers does to those who wait for it, and how often it is asked for."""

from __future__ import annotations

import asyncio
import time

import pytest

from ps_protocol.messages import PserverInfo, TrainerHeartbeatReply
from trainer_client.news import MIN_PERIOD_SECONDS, News

pytestmark = pytest.mark.asyncio


def reply(*incarnations: int) -> TrainerHeartbeatReply:
    infos = tuple(
        PserverInfo(index=index, address=f"http://{index}-{incarnation}:1", incarnation=incarnation, http2=True)
        for index, incarnation in enumerate(incarnations)
    )
    return TrainerHeartbeatReply(state="training", failure=None, attempt=0, pservers=infos)


async def wait(news: News, index: int, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds) as limit:
            with news.waiting_for(index, limit):
                await asyncio.Event().wait()
    except TimeoutError:
        return "given up"
    raise AssertionError


async def test_a_request_to_a_replaced_pserver_is_given_up_at_once():
    news, now = News(), asyncio.get_running_loop().time
    news.heard(reply(1, 1), now())
    waits = [asyncio.create_task(wait(news, index, 30)) for index in (0, 0, 1)]
    await asyncio.sleep(0)
    news.heard(reply(1, 1), now())
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waits)
    news.heard(reply(2, 1), now())
    assert await asyncio.wait_for(asyncio.gather(*waits[:2]), 1) == ["given up"] * 2
    assert not waits[2].done()
    waits[2].cancel()


async def test_nobody_is_woken_by_an_older_life_or_after_the_answer():
    news, now = News(), asyncio.get_running_loop().time
    news.heard(reply(2), now())
    waiting = asyncio.create_task(wait(news, 0, 0.05))
    await asyncio.sleep(0)
    news.heard(reply(1), now())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert await waiting == "given up"  # by its own time
    news.heard(reply(3), now())
    assert news.pservers[0].incarnation == 3


async def test_all_who_want_news_share_few_heartbeats() -> None:
    news = News()
    num_heartbeats = 0

    async def send_heartbeats() -> None:
        nonlocal num_heartbeats
        while True:
            await news.wait_until_wanted(60)
            num_heartbeats += 1

    async def want_news() -> None:
        for _ in range(3):
            await news.wait(60)

    sending = asyncio.create_task(send_heartbeats())
    begun = time.monotonic()
    await asyncio.gather(*(want_news() for _ in range(20)))
    sending.cancel()
    assert 2 <= num_heartbeats <= 5
    assert time.monotonic() - begun >= 2 * MIN_PERIOD_SECONDS >= 0.4


async def test_another_life_is_news_to_a_request_that_is_ending_already() -> None:
    """The time-out cannot be moved any more; that must not end the heartbeats."""
    news, ended = News(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def request() -> None:
        async with asyncio.timeout(100) as limit:
            with news.waiting_for(0, limit):
                try:
                    await asyncio.Event().wait()
                finally:
                    await ended.wait()  # its connection is closed

    news.heard(reply(1), loop.time())
    requesting = asyncio.create_task(request())
    await asyncio.sleep(0)
    for incarnation in (2, 3):
        news.heard(reply(incarnation), loop.time())
        await asyncio.sleep(0.01)
    ended.set()
    with pytest.raises(TimeoutError):
        await requesting
    assert news.pservers[0].incarnation == 3
