"""However many requests wait for a pserver that is away, the coordinator is asked now and then."""

from __future__ import annotations

import asyncio
import time

import pytest

from trainer_client.news import MIN_PERIOD_SECONDS, News


@pytest.mark.asyncio
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
