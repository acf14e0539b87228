"""One pserver as a trainer sees it: push, barrier and get, each repeated with the same identity until answered."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple, TypeVar

import httpx
import tenacity

from ps_http2.client import LOCAL_EXTENSION
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
from ps_protocol.frames import CONTENT_TYPE, FrameLimits
from ps_protocol.messages import BarrierAnswer, NormAnswer, PserverInfo, PushAnswer
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.optimizers import HyperParameters
from ps_protocol.routes import (
    BARRIER,
    BARRIER_HEADER,
    BUFFERS,
    GET,
    GRAD_SCALER_KEY,
    HAVE_HEADER,
    HEALTH,
    INITIAL,
    NORM,
    NORM_HEADER,
    SEND,
    SINCE_KEY,
    SKIPPED_BEFORE_KEY,
    SKIPPED_KEY,
    SLOT_NAMES_KEY,
    SLOTS,
    STATES_KEY,
    VERDICT_HEADER,
    WAIT_HEADER,
)
from ps_protocol.slots import StepState, read_states
from ps_protocol.vocabulary import Incarnation, Rank, Round

from .answers import GatewayPage, may_be_problem, raise_for_problem
from .links import LinkMeter
from .metrics import TrainerMetrics
from .news import News
from .pauses import choose_backoff, choose_pause
from .pulling.differences import Differences
from .pushing.buckets import Payload
from .transport.exchange import Exchange
from .transport.frame_sink import NO_DIFFERENCES, FrameSink

T = TypeVar("T")

WAIT_SECONDS = 10.0  # how long a pserver holds a get back before it says who is missing
PAUSE_SECONDS = 0.02  # a get waits at the pserver; this is for answers that come at once
NEWS_SECONDS = 2.0  # how long a request that met another life waits for news of it before it tries again
MAX_REPUSHES = 5  # of one round, to one life of a pserver: it may lose what it holds with each
MIN_KEPT_ROUNDS = 8


class Pulled(NamedTuple):
    """What came of a shard."""

    version: Round
    skipped: dict[Round, tuple[Rank, ...]]  # of the newest rounds: for whose gradients they were, if they were
    scaler: HyperParameters | None  # the state of the lowest rank's GradScaler in this round


class HeldSlots(NamedTuple):
    """What a pserver remembers besides the values."""

    states: Mapping[str, StepState]  # of blocks that have been stepped
    slots: frozenset[str]  # that there are, of all blocks


class PserverClient:
    """Requests of one trainer to one pserver. All methods run on the I/O loop.

    Every request may be repeated: its identity is in the fence, so the pserver counts it once.
    """

    def __init__(
        self,
        info: PserverInfo,
        fence: Fence,
        http: Callable[[PserverInfo], Exchange],
        metrics: TrainerMetrics,
        news: News,
        *,
        retry_seconds: float,
        deadline_seconds: float,
        max_delay: int,
    ) -> None:
        self.info = info
        self._fence = fence
        self._http_of = http
        self._metrics = metrics
        self._news = news
        self.link = LinkMeter()
        self._first_life = info.incarnation
        self._urls: dict[str, httpx.URL] = {}
        self._urls_of = ""
        self._kept: dict[Round, list[Payload]] = {}  # pushed, and not pulled yet: a pserver may lose it
        self._retry_seconds = retry_seconds
        self._deadline_seconds = deadline_seconds
        self._max_delay = max_delay
        self._limits = FrameLimits(max_body_bytes=1 << 62, max_header_bytes=1 << 30, max_tensors=1 << 30)

    async def warm_up(self) -> None:
        """Open the connection: the first frames are small until the server's settings arrive. Take its time."""

        async def attempt() -> None:
            await self._http.send("GET", self._url(HEALTH), {})
            asked = perf_counter()
            response = await self._http.send("GET", self._url(HEALTH), {})
            self.link.round_trip_seconds = perf_counter() - asked
            self.link.is_local = response.extensions.get(LOCAL_EXTENSION, False)

        await self._repeat(HEALTH, attempt)

    @property
    def _http(self) -> Exchange:
        return self._http_of(self.info)

    def _url(self, path: str) -> httpx.URL:
        address = self.info.address
        if self._urls_of != address:
            self._urls_of, self._urls = address, {}
        url = self._urls.get(path)
        if url is None:  # parsing it takes as long as sending it
            url = self._urls[path] = httpx.URL(address + path)
        return url

    def go_back(self, attempt: int) -> None:
        """Follow the run to its newest attempt; what was under way is forgotten."""
        self._fence = replace(self._fence, attempt=attempt)
        self._kept.clear()

    async def push(self, round_: Round, body: Payload, *, initial: bool = False) -> PushAnswer:
        """Push one encoded bucket. `body` must not change until this returns."""
        path = INITIAL if initial else SEND
        num_bytes = sum(map(len, body))
        if not initial:
            self._keep(round_, body)

        async def attempt() -> PushAnswer:
            headers = {**self._fence.at_round(round_).to_headers(), "content-type": CONTENT_TYPE}
            with self.link.pushes.transfer():
                response = await self._http.send("POST", self._url(path), headers, body=body)
            raise_for_problem(response)
            self.link.is_local = response.extensions.get(LOCAL_EXTENSION, False)
            self.link.pushes.add(num_bytes)
            return PushAnswer.model_validate_json(response.content)

        try:
            answer = await self._repeat(path, attempt)
        except BaseException:
            self._drop(round_, body)
            raise
        self._metrics.pushed_bytes.inc(num_bytes)
        return answer

    def _keep(self, round_: Round, body: Payload) -> None:
        for old in sorted(self._kept)[: -max(MIN_KEPT_ROUNDS, self._max_delay + 1)]:
            del self._kept[old]  # of a caller that pushes and never pulls
        frames = self._kept.setdefault(round_, [])
        if not any(frame is body for frame in frames):
            frames.append(body)

    def _drop(self, round_: Round, body: Payload) -> None:
        """It was refused or given up: whoever tries again brings a frame of its own."""
        frames = [frame for frame in self._kept.pop(round_, ()) if frame is not body]
        if frames:
            self._kept[round_] = frames

    def _forget(self, round_: Round) -> None:
        """It is in the parameters that were pulled."""
        for old in [known for known in self._kept if known <= round_]:
            del self._kept[old]

    async def barrier(self, round_: Round, kind: str, *, is_finite: bool = True) -> BarrierAnswer:
        """Send a batch or fetch barrier; a batch barrier says whether this trainer's gradient is finite."""

        async def attempt() -> BarrierAnswer:
            headers = {**self._fence.at_round(round_).to_headers(), BARRIER_HEADER: kind, **_verdict(is_finite)}
            response = await self._http.send("POST", self._url(BARRIER), headers)
            raise_for_problem(response)
            return BarrierAnswer.model_validate_json(response.content)

        return await self._repeat(BARRIER, attempt, round_)

    async def norm(
        self,
        round_: Round,
        *,
        with_batch_barrier: bool = False,
        is_finite: bool = True,
        norm: AgreedNorm | None = None,
    ) -> ShardNorm | None:
        """Wait until this pserver has aggregated a round, and return its part of the norm.

        None if the round is over and it knows none. With the global `norm` it waits until it is over; raises
        NormChanged if that is another one there.
        """

        async def attempt() -> NormAnswer:
            headers = {**self._fence.at_round(round_).to_headers(), WAIT_HEADER: f"{WAIT_SECONDS:g}"}
            if with_batch_barrier:
                headers |= {BARRIER_HEADER: "batch", **_verdict(is_finite)}
            if norm is not None:
                headers[NORM_HEADER] = norm.to_header()
            response = await self._http.send("POST", self._url(NORM), headers)
            raise_for_problem(response)
            return NormAnswer.model_validate_json(response.content)

        answer = await self._repeat(NORM, attempt, round_)
        return None if answer.sum_of_squares is None else ShardNorm(answer.contributions, answer.sum_of_squares)

    async def get(
        self,
        round_: Round,
        destinations: Mapping[str, memoryview],
        *,
        with_batch_barrier: bool = False,
        is_finite: bool = True,
        norm: AgreedNorm | None = None,
        names: Sequence[str] = (),
        have: Round | None = None,
        differences: Differences | None = None,
        on_landed: Callable[[str], None] | None = None,
    ) -> Pulled:
        """Wait for version `round_` and write its blocks to `destinations` (block name -> its writable bytes).

        With `have` they hold the blocks of that version already, and those that have not changed are left as they are;
        if the run's pulls are differences, it needs `differences`, which are added to them in the end.
        `norm` lets the pserver step a round that is to be clipped; raises NormChanged if it is another one there.
        Without `names` the whole shard is fetched and every block of it needs a destination. `on_landed` is told the
        name of each block that is there; without `differences`, which are added when all of them are.
        """
        headers = {WAIT_HEADER: f"{WAIT_SECONDS:g}"}
        if with_batch_barrier:
            headers |= {BARRIER_HEADER: "batch", **_verdict(is_finite)}
        if norm is not None:
            headers[NORM_HEADER] = norm.to_header()
        if have is not None:
            headers[HAVE_HEADER] = str(have)
        asked = perf_counter()
        memory = differences.memory if differences else NO_DIFFERENCES
        metadata, answered, differing = await self._fetch(
            "POST", GET, round_, headers, destinations, names, memory, on_landed
        )
        self._metrics.barrier_wait.observe(answered - asked)
        version = self._check_version(metadata, round_)
        if metadata.get(SINCE_KEY) not in (None, str(have)):
            raise GradpostError("a pserver left out more than it was told to", actual=dict(metadata))
        if differing:
            assert differences is not None  # or there was no memory for them
            if have is None or SINCE_KEY not in metadata:
                raise GradpostError("a pserver sent a difference to nobody knows what", actual=dict(metadata))
            await differences.add(differing)
        if not names:
            self._forget(round_)
        before = json.loads(metadata.get(SKIPPED_BEFORE_KEY, "{}"))
        skipped = {int(round_): tuple(ranks) for round_, ranks in before.items()}
        if SKIPPED_KEY in metadata:
            skipped[version] = tuple(json.loads(metadata[SKIPPED_KEY]))
        return Pulled(version, skipped, json.loads(metadata.get(GRAD_SCALER_KEY, "null")))

    async def get_buffers(self, destinations: Mapping[str, memoryview]) -> None:
        """Fetch the buffers that live there, which no round changes."""
        metadata, _, _ = await self._fetch("GET", BUFFERS, 0, {}, destinations, ())
        self._check_version(metadata, 0)

    async def describe_slots(self, round_: Round) -> HeldSlots:
        """Which slots there are after a round that this trainer has pulled."""
        metadata, _, _ = await self._fetch("POST", SLOTS, round_, {}, {}, ())
        self._check_version(metadata, round_)
        names = json.loads(metadata[SLOT_NAMES_KEY])
        return HeldSlots(read_states(metadata[STATES_KEY]), frozenset(names))

    async def get_slots(self, round_: Round, destinations: Mapping[str, memoryview]) -> None:
        """Fetch slots (`{slot}/{block}` -> its writable bytes) as of that round."""
        metadata, _, _ = await self._fetch("POST", SLOTS, round_, {}, destinations, list(destinations))
        self._check_version(metadata, round_)

    def _check_version(self, metadata: Mapping[str, str], round_: Round) -> Round:
        actual = (metadata.get("run"), metadata.get("attempt"))
        version = int(metadata.get("round", -1))
        is_it = version == round_ or (version > round_ and self._max_delay > 0)
        if actual != (self._fence.run, str(self._fence.attempt)) or not is_it:
            raise GradpostError("a pserver answered another version than it was asked for", actual=dict(metadata))
        return version

    async def _fetch(
        self,
        method: str,
        path: str,
        round_: Round,
        extra: Mapping[str, str],
        destinations: Mapping[str, memoryview],
        names: Sequence[str],
        differences: Mapping[str, memoryview] = NO_DIFFERENCES,
        on_landed: Callable[[str], None] | None = None,
    ) -> tuple[Mapping[str, str], float, list[str]]:
        """Metadata of the answer, when (by `perf_counter`) it began, and what of it went to `differences`."""

        async def attempt() -> tuple[Mapping[str, str], float, list[str]]:
            sink = FrameSink(destinations, self._limits, differences, on_landed)
            headers = {**self._fence.at_round(round_).to_headers(), **extra}
            body = (memoryview(json.dumps(list(names)).encode()),) if names else ()
            response = await self._http.begin(method, self._url(path), headers, body=body, sink=sink)
            answered = perf_counter()
            try:
                if may_be_problem(response):
                    await response.aread()
                raise_for_problem(response)
                with self.link.pulls.transfer():
                    async for chunk in response.aiter_raw():
                        sink.feed(chunk)
                self.link.pulls.add(sink.num_bytes)
                self._metrics.pulled_bytes.inc(sink.num_bytes)
            finally:
                await response.aclose()
            return sink.finish(), answered, sink.differing

        return await self._repeat(path, attempt, round_)

    # ------------------------------------------------------------------ retries

    async def _repeat(self, route: str, attempt: Callable[[], Awaitable[T]], round_: Round = 0) -> T:
        """Repeat until it is answered: while the pserver asks for it, while it is away, and in its next life.

        It is away for `retry_seconds` at most, or as long as the coordinator expects it back. Raises RolledBack when
        the whole run has gone back meanwhile.
        """
        loop = asyncio.get_running_loop()
        refused: tuple[Incarnation, float] | None = None  # by which life of the pserver, and since when

        def refuses_for_long() -> bool:  # not since the beginning: a pending round may have lasted long
            nonlocal refused
            if refused is None or refused[0] != self.info.incarnation:
                refused = self.info.incarnation, loop.time()
            return loop.time() > refused[1] + self._deadline_seconds

        repushed: Counter[Incarnation] = Counter()
        while True:
            self._look_around()
            try:
                return await self._reach(route, attempt)
            except TryAgain as answer:
                # It answered, so it lives. A pending round ends by itself at the round time-out.
                is_expected = isinstance(answer, NotReady) and self._is_in_touch(loop.time())
                if is_expected or isinstance(answer, RoundPending):
                    refused = None
                elif refuses_for_long():
                    raise
                self._metrics.retries.labels(answer.code).inc()
                await asyncio.sleep(choose_pause(answer, PAUSE_SECONDS))
            except ContributionMissing as answer:
                life = self.info.incarnation
                if round_ not in self._kept or repushed[life] == MAX_REPUSHES:
                    raise
                repushed[life] += 1
                self._metrics.retries.labels(answer.code).inc()
                await self._push_again(round_)
            except (StalePserver, StaleRun, FutureRound) as answer:
                has_lost_rounds = isinstance(answer, FutureRound)
                if has_lost_rounds and self.info.incarnation == self._first_life:
                    raise
                if refuses_for_long() and (has_lost_rounds or not self._is_in_touch(loop.time())):
                    raise
                if has_lost_rounds:
                    self._news.ahead_of[self.info.index] = self.info.incarnation
                self._metrics.retries.labels(answer.code).inc()
                await self._news.wait(NEWS_SECONDS)

    def _is_in_touch(self, now: float) -> bool:
        """Whether the coordinator answers: then it brings pserver and trainer together, or says that it never will."""
        return self._news.is_in_touch(now, self._retry_seconds)

    def _look_around(self) -> None:
        """Take over where the pserver is now. Raises RolledBack if this request belongs to an attempt that is over."""
        if self._news.newest_attempt > self._fence.attempt:
            round_ = self._news.resume
            raise RolledBack(f"the run went back to round {round_}", round=round_)
        info = self._news.pservers.get(self.info.index, self.info)
        if info.incarnation > self.info.incarnation:
            self._news.answered(info.index)
        if info.incarnation >= self.info.incarnation:
            self.info = info
            self._fence = replace(self._fence, pserver_incarnation=info.incarnation)

    async def _push_again(self, round_: Round) -> None:
        """A pserver has come back without what was staged there: it gets the same bytes again."""
        await asyncio.gather(*(self.push(round_, frame) for frame in list(self._kept[round_])))

    async def _reach(self, route: str, attempt: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        failing_since: float | None = None  # the first try may have waited long for its answer

        def has_failed_for_long(state: tenacity.RetryCallState) -> bool:
            nonlocal failing_since
            failing_since = failing_since or loop.time()
            self._news.failing.setdefault(self.info.index, (self.info.incarnation, loop.time()))
            if isinstance(page := _error(state), GatewayPage):
                self._news.pages[self.info.index] = str(page)
            is_expected = self._is_in_touch(loop.time())
            return loop.time() - failing_since >= self._retry_seconds and not is_expected

        async def pause(seconds: float) -> None:
            await self._news.wait(seconds)
            await asyncio.sleep(min(seconds, PAUSE_SECONDS))
            self._look_around()

        policy = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((httpx.TransportError, TimeoutError)),
            wait=lambda state: choose_backoff(state.attempt_number),
            sleep=pause,
            stop=has_failed_for_long,
            before_sleep=lambda state: self._metrics.retries.labels(type(_error(state)).__name__).inc(),
        )

        async def bounded() -> T:
            metrics = self._metrics
            metrics.requests.labels(route).inc()
            with metrics.in_flight.labels(route).track_inprogress(), metrics.request_seconds.labels(route).time():
                async with asyncio.timeout(self._deadline_seconds) as limit:
                    with self._news.waiting_for(self.info.index, limit):
                        try:
                            result = await attempt()
                        except GradpostError:
                            self._news.answered(self.info.index)
                            raise
                self._news.answered(self.info.index)
                return result

        try:
            return await policy(bounded)
        except tenacity.RetryError as error:
            cause = error.last_attempt.exception()
            raise Unreachable(
                f"pserver {self.info.index} at {self.info.address} could not be reached for "
                f"{self._retry_seconds:g} s: {cause!r}"
            ) from cause


def _verdict(is_finite: bool) -> dict[str, str]:
    return {} if is_finite else {VERDICT_HEADER: "nonfinite"}


def _error(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
