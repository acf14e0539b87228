"""The connection to one pserver: its current address, and how requests are repeated until it answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

import httpx

from ps_config.control_client import GatewayPage
from ps_protocol.errors import (
    ContributionMissing,
    FutureRound,
    GradpostError,
    NotReady,
    RolledBack,
    RoundPending,
    StalePserver,
    StaleRun,
    TryAgain,
    Unreachable,
)
from ps_protocol.fence import Fence
from ps_protocol.messages import PserverInfo
from ps_protocol.retry import Patience, RetryPolicy, choose_backoff, choose_pause, request_with_retry
from ps_protocol.vocabulary import Incarnation

from ..transport.exchange import Exchange
from .metrics import LinkMeter, TrainerMetrics
from .news import News

T = TypeVar("T")

PAUSE_SECONDS = 0.02  # a get waits at the pserver; this is for answers that come at once
NEWS_SECONDS = 2.0  # the wait for a heartbeat after another incarnation of the pserver answered
# No answer, or one of these: a request is repeated after it.
SURVIVED = (httpx.TransportError, TimeoutError, TryAgain, ContributionMissing, StalePserver, StaleRun, FutureRound)
MAX_REPUSHES = 5  # of one round, to one incarnation of a pserver: it may lose what it holds with each


class PserverConnection:
    """The address, incarnation and fence of one pserver, which follow the cluster. Used on the I/O loop."""

    def __init__(
        self,
        info: PserverInfo,
        fence: Fence,
        exchange_for: Callable[[PserverInfo], Exchange],
        metrics: TrainerMetrics,
        news: News,
        *,
        retry_seconds: float,
        deadline_seconds: float,
    ) -> None:
        self.info = info
        self.fence = fence
        self.link = LinkMeter()
        self.metrics = metrics
        self.news = news
        self.retry_seconds = retry_seconds
        self.deadline_seconds = deadline_seconds
        self.first_incarnation = info.incarnation
        self._exchange_for = exchange_for

    @property
    def exchange(self) -> Exchange:
        """The open HTTP connections to the pserver."""
        return self._exchange_for(self.info)

    def url(self, path: str) -> httpx.URL:
        """Return the URL of a route."""
        return _parse_url(self.info.address + path)

    def is_coordinator_reachable(self) -> bool:
        """Return whether the coordinator answers. It then decides how long this trainer waits for the pserver."""
        return self.news.has_recent_heartbeat(asyncio.get_running_loop().time(), self.retry_seconds)

    def refresh(self) -> None:
        """Adopt the pserver's newest address and incarnation. Raises RolledBack if the run has a newer attempt."""
        if self.news.newest_attempt > self.fence.attempt:
            round_ = self.news.resume
            raise RolledBack(f"the run went back to round {round_}", round=round_)
        info = self.news.pservers.get(self.info.index, self.info)
        if info.incarnation > self.info.incarnation:
            self.news.mark_reachable(info.index)
        if info.incarnation >= self.info.incarnation:
            self.info = info
            self.fence = replace(self.fence, pserver_incarnation=info.incarnation)

    def follow_attempt(self, attempt: int) -> None:
        """Send all further requests for this attempt of the run."""
        self.fence = replace(self.fence, attempt=attempt)

    async def request_with_retry(
        self, route: str, attempt: Callable[[], Awaitable[T]], push_again: Callable[[], Awaitable[bool]] | None = None
    ) -> T:
        """Repeat a request until the pserver, or its next incarnation, answers it.

        `push_again` pushes the contribution of the round once more, and returns False if this trainer has none. A
        pserver is unreachable after `retry_seconds`, unless the coordinator expects it back. Raises RolledBack when the
        run goes back meanwhile.
        """
        policy = RetryPolicy(SURVIVED, _Retries(self, push_again).pause)
        return await request_with_retry(partial(self._request, route, attempt), policy)

    async def _request(self, route: str, attempt: Callable[[], Awaitable[T]]) -> T:
        self.refresh()
        metrics = self.metrics
        metrics.requests.labels(route).inc()
        with metrics.in_flight.labels(route).track_inprogress(), metrics.request_seconds.labels(route).time():
            async with asyncio.timeout(self.deadline_seconds) as limit:
                with self.news.waits[self.info.index].add(limit):
                    try:
                        result = await attempt()
                    except GradpostError:
                        self.news.mark_reachable(self.info.index)
                        raise
            self.news.mark_reachable(self.info.index)
            return result


@lru_cache(maxsize=1024)
def _parse_url(url: str) -> httpx.URL:
    """Parse a URL once, because that takes as long as sending a small request to it."""
    return httpx.URL(url)


class _Retries:
    """The failures of one request until now."""

    def __init__(self, connection: PserverConnection, push_again: Callable[[], Awaitable[bool]] | None) -> None:
        self._connection = connection
        self._push_again = push_again
        self._num_unanswered = 0  # attempts in a row
        self._silence = Patience(connection.retry_seconds)  # the first attempt may have waited long for its answer
        self._refusals = Patience(connection.deadline_seconds)  # a pending round before them may have lasted long
        self._refused_by: Incarnation | None = None
        self._num_repushes: Counter[Incarnation] = Counter()

    async def pause(self, error: Exception) -> None:
        if not isinstance(error, GradpostError):
            await self._pause_unanswered(error)
            return
        self._num_unanswered = 0
        self._silence.reset()
        if isinstance(error, TryAgain):
            await self._pause_busy(error)
        elif isinstance(error, ContributionMissing):
            await self._repush(error)
        else:
            await self._pause_stale(error)

    def _count(self, reason: str) -> None:
        self._connection.metrics.retries.labels(reason).inc()

    async def _pause_unanswered(self, error: Exception) -> None:
        connection = self._connection
        news, info = connection.news, connection.info
        self._num_unanswered += 1
        page = str(error) if isinstance(error, GatewayPage) else None
        news.mark_unreachable(info, asyncio.get_running_loop().time(), page)
        if self._silence.is_exhausted() and not connection.is_coordinator_reachable():
            raise Unreachable(
                f"pserver {info.index} at {info.address} could not be reached for {connection.retry_seconds:g} s: "
                f"{error!r}"
            ) from error
        self._count(type(error).__name__)
        seconds = choose_backoff(self._num_unanswered)
        await news.wait_for_heartbeat(seconds)
        await asyncio.sleep(min(seconds, PAUSE_SECONDS))

    async def _pause_busy(self, answer: TryAgain) -> None:
        # A pending round ends by itself at the round time-out.
        is_expected = isinstance(answer, NotReady) and self._connection.is_coordinator_reachable()
        if is_expected or isinstance(answer, RoundPending):
            self._refused_by = None
        elif self._is_refused_for_long():
            raise answer
        self._count(answer.code)
        await asyncio.sleep(choose_pause(answer, PAUSE_SECONDS))

    async def _repush(self, answer: ContributionMissing) -> None:
        incarnation = self._connection.info.incarnation
        if self._push_again is None or self._num_repushes[incarnation] == MAX_REPUSHES:
            raise answer
        self._num_repushes[incarnation] += 1
        if not await self._push_again():
            raise answer
        self._count(answer.code)

    async def _pause_stale(self, answer: GradpostError) -> None:
        connection = self._connection
        incarnation, news = connection.info.incarnation, connection.news
        has_lost_rounds = isinstance(answer, FutureRound)
        if has_lost_rounds and incarnation == connection.first_incarnation:
            raise answer
        if self._is_refused_for_long() and (has_lost_rounds or not connection.is_coordinator_reachable()):
            raise answer
        if has_lost_rounds:
            news.mark_ahead_of(connection.info.index, incarnation)
        self._count(answer.code)
        await news.wait_for_heartbeat(NEWS_SECONDS)

    def _is_refused_for_long(self) -> bool:
        incarnation = self._connection.info.incarnation
        if self._refused_by != incarnation:
            self._refused_by = incarnation
            self._refusals.reset()
        return self._refusals.is_exhausted()
