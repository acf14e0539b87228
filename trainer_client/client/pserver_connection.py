"""The connection to one pserver: its current address, and the loop that repeats requests until it answers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx

from ps_config.control_client import GatewayPage, raise_for_problem
from ps_http2.client_connection import LOCAL_EXTENSION
from ps_http2.stream import Sink
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
    Unauthenticated,
    Unreachable,
)
from ps_protocol.fence import Fence
from ps_protocol.messages import PserverInfo
from ps_protocol.retry import Patience, choose_backoff, choose_pause
from ps_protocol.vocabulary import Incarnation

from ..transport.exchange import Exchange
from ..transport.work import Work, pause
from .news import News
from .telemetry import TrainerMetrics

T = TypeVar("T")

PAUSE_SECONDS = 0.02  # a get waits at the pserver; this is for answers that come at once
NEWS_SECONDS = 2.0  # the wait for a heartbeat after another incarnation of the pserver answered
MAX_REPUSHES = 5  # of a round to one incarnation of a pserver, which has no reason to lose it again


@dataclass(eq=False)
class PserverConnection:
    """The address, incarnation and fence of one pserver, which follow the cluster."""

    info: PserverInfo
    fence: Fence
    io: Exchange
    metrics: TrainerMetrics
    news: News
    retry_seconds: float
    deadline_seconds: float  # of one request
    uses_local: bool = True  # a Unix socket, if the pserver is on this host
    is_local: bool = False  # the newest answer came over one
    sent_bytes: int = 0  # of the frames that the pserver has acknowledged
    received_bytes: int = 0

    def __post_init__(self) -> None:
        self.first_incarnation = self.info.incarnation

    def is_coordinator_reachable(self) -> bool:
        """Return whether the coordinator answers. It then decides how long this trainer waits for the pserver."""
        return self.news.has_recent_heartbeat(self.retry_seconds)

    def refresh(self) -> None:
        """Adopt the pserver's newest address and incarnation. Raises RolledBack if the run has a newer attempt."""
        newest = self.news.newest_attempt
        if newest.number > self.fence.attempt:
            raise RolledBack(f"the run went back to round {newest.base_round}", round=newest.base_round)
        info = self.news.pservers.get(self.info.index, self.info)
        if info.incarnation > self.info.incarnation:
            self.news.mark_reachable(info.index)
        if info.incarnation >= self.info.incarnation and info != self.info:
            self.info = info
            self.fence = self.fence._replace(pserver_incarnation=info.incarnation)

    def send(
        self,
        method: str,
        route: str,
        headers: Mapping[str, str],
        *,
        body: Sequence[memoryview] = (),
        sink: Sink | None = None,
    ) -> Work[httpx.Response]:
        """Send a request once, and return its response, as `Exchange.send`. Raises the error in the answer, too."""
        local = self.info.local if self.uses_local else None
        url, http2 = self.info.address + route, self.info.http2
        response = yield from self.io.send(method, url, headers, body=body, sink=sink, http2=http2, local=local)
        raise_for_problem(response)
        self.is_local = response.extensions.get(LOCAL_EXTENSION, False)
        return response

    def request_with_retry(
        self, route: str, send_once: Callable[[], Work[T]], push_again: Callable[[], Work[bool]] | None = None
    ) -> Work[T]:
        """Repeat a request until the pserver, or its next incarnation, answers it.

        `push_again` pushes the contribution of the round once more, and returns False if this trainer has none. Raises
        RolledBack when the run goes back meanwhile, the error that ended the run, and any error that is not in this
        table at once.

        =========================  ==========================  ===============================  =================
        answer                     pause                       raised after                     counted again from
        =========================  ==========================  ===============================  =================
        none, or a gateway's page  random; its limit doubles   retry_seconds (1), Unreachable   any answer below
        RoundPending               PAUSE_SECONDS               never: rounds have a time-out
        NotReady, code `stopping`  PAUSE_SECONDS               deadline_seconds (1)             (2)
        any other TryAgain         `Retry-After`               deadline_seconds                 (2)
        StalePserver, StaleRun     until the next heartbeat    deadline_seconds (1)             (2)
        FutureRound                until the next heartbeat    deadline_seconds (3)             (2)
        Unauthenticated (4)        until the next heartbeat    deadline_seconds (3)             (2)
        ContributionMissing        none: push again            MAX_REPUSHES                     a new incarnation
        the same, nothing to push  as for FutureRound
        =========================  ==========================  ===============================  =================

        (1) Not while the coordinator answers, which then decides how long this trainer waits. (2) A new incarnation,
        RoundPending, or a pserver away under (1). (3) At once by the first known incarnation, which has lost no rounds.
        (4) A new token may reach the host of a promoted standby later than this trainer.
        """
        num_unanswered = 0  # requests in a row
        silence = Patience(self.retry_seconds)  # from the first failure, since a request may wait long for its answer
        refusals = defaultdict[Incarnation, Patience](lambda: Patience(self.deadline_seconds))
        num_repushes = Counter[Incarnation]()
        while True:
            try:
                return (yield from self._request(route, send_once))
            except httpx.TransportError as error:
                num_unanswered += 1
                self.news.mark_unreachable(self.info, str(error) if isinstance(error, GatewayPage) else None)
                if silence.note_failure() and not self.is_coordinator_reachable():
                    raise Unreachable(
                        f"pserver {self.info.index} at {self.info.address} could not be reached for "
                        f"{self.retry_seconds:g} s: {error!r}"
                    ) from error
                self.metrics.retries.labels(type(error).__name__).inc()
                seconds = choose_backoff(num_unanswered)
                yield from self._wait(self.news.wait_for_heartbeat(seconds))
                yield from pause(min(seconds, PAUSE_SECONDS))
            except (TryAgain, ContributionMissing, StalePserver, StaleRun, FutureRound, Unauthenticated) as answer:
                num_unanswered, incarnation = 0, self.info.incarnation
                silence.reset()
                has_repushed = False
                if isinstance(answer, ContributionMissing):
                    num_repushes[incarnation] += 1
                    if push_again is None or num_repushes[incarnation] > MAX_REPUSHES:
                        raise
                    has_repushed = yield from push_again()
                match answer:
                    case TryAgain():
                        is_away = isinstance(answer, NotReady) or answer.code == "stopping"
                        is_expected = is_away and self.is_coordinator_reachable()
                        if is_expected or isinstance(answer, RoundPending):
                            refusals.clear()
                        elif refusals[incarnation].note_failure():
                            raise
                        yield from self._wait(pause(choose_pause(answer, PAUSE_SECONDS)))
                    case StalePserver() | StaleRun():
                        if refusals[incarnation].note_failure() and not self.is_coordinator_reachable():
                            raise
                        yield from self._wait(self.news.wait_for_heartbeat(NEWS_SECONDS))
                    case ContributionMissing() if has_repushed:
                        pass
                    case FutureRound() | ContributionMissing() | Unauthenticated():
                        if incarnation == self.first_incarnation or refusals[incarnation].note_failure():
                            raise
                        if not isinstance(answer, Unauthenticated):  # it lacks a round that this trainer has pulled
                            self.news.ahead_of[self.info.index] = incarnation
                        yield from self._wait(self.news.wait_for_heartbeat(NEWS_SECONDS))
                self.metrics.retries.labels(answer.code).inc()

    def _request(self, route: str, send_once: Callable[[], Work[T]]) -> Work[T]:
        """Send a request once. Raises httpx.ReadTimeout at its deadline, or if the pserver has a newer incarnation."""
        self.news.check_failure()
        self.refresh()
        info, deadline = self.info, time.monotonic() + self.deadline_seconds
        counted = self.metrics.of_route(route)
        begun = counted.begin()
        work = send_once()
        try:
            while True:
                yield min(next(work), deadline)
                self.news.check_failure()
                if self.news.has_newer(info) or time.monotonic() >= deadline:
                    raise httpx.ReadTimeout("no answer in time")
        except StopIteration as end:
            self.news.mark_reachable(info.index)
            result: T = end.value
            return result
        except GradpostError:
            if self.news.failure is None:
                self.news.mark_reachable(info.index)
            raise
        finally:
            work.close()
            counted.end(begun)

    def _wait(self, work: Work[None]) -> Work[None]:
        """Wait, but raise the error that ended the run at once."""
        for due in work:
            yield due
            self.news.check_failure()
