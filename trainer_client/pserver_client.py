"""One pserver as a trainer sees it: push, barrier and get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple, TypeVar

from ps_config.control_client import may_be_problem, raise_for_problem
from ps_http2.client import LOCAL_EXTENSION
from ps_protocol import routes
from ps_protocol.errors import GradpostError
from ps_protocol.frames import CONTENT_TYPE, TRUSTED_LIMITS
from ps_protocol.messages import BarrierAnswer, NormAnswer, PushAnswer
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.optimizers import HyperParameters, StepState, read_states
from ps_protocol.vocabulary import Rank, Round

from .destinations import Deltas
from .pserver_connection import PserverConnection
from .pushing.buckets import Payload
from .transport.frame_sink import NO_DELTAS, FrameSink

T = TypeVar("T")

WAIT_SECONDS = 10.0  # how long a pserver holds a get back before it answers which trainers are missing
MIN_KEPT_ROUNDS = 8


class Pulled(NamedTuple):
    """The result of pulling a shard."""

    version: Round
    skipped: dict[Round, tuple[Rank, ...]]  # skipped rounds among the newest: the ranks with NaN or infinity
    scaler: HyperParameters | None  # the state of the lowest rank's GradScaler in this round


class HeldState(NamedTuple):
    """The optimizer state that a pserver has."""

    states: Mapping[str, StepState]  # of blocks that have been stepped
    slots: frozenset[str]  # the slots that exist, of all blocks


class PserverClient:
    """Requests of one trainer to one pserver. All methods run on the I/O loop.

    Every request may be repeated: its identity is in the fence, so the pserver counts it once.
    """

    def __init__(self, connection: PserverConnection, *, max_delay: int) -> None:
        self.connection = connection
        self.link = connection.link
        self._kept: dict[Round, list[Payload]] = {}  # pushed, and not pulled yet: a pserver may lose it
        self._max_delay = max_delay

    @property
    def index(self) -> int:
        """The index of the pserver."""
        return self.connection.info.index

    async def warm_up(self) -> None:
        """Open the connection and measure its round trip: frames are small until the pserver's settings arrive."""
        connection = self.connection

        async def attempt() -> None:
            await connection.exchange.send("GET", connection.url(routes.HEALTH), {})
            asked = perf_counter()
            response = await connection.exchange.send("GET", connection.url(routes.HEALTH), {})
            self.link.round_trip_seconds = perf_counter() - asked
            self.link.is_local = response.extensions.get(LOCAL_EXTENSION, False)

        await connection.request_with_retry(routes.HEALTH, attempt)

    async def _send(self, path: str, headers: Mapping[str, str], body: Payload = ()) -> bytes:
        connection = self.connection
        response = await connection.exchange.send("POST", connection.url(path), headers, body=body)
        raise_for_problem(response)
        self.link.is_local = response.extensions.get(LOCAL_EXTENSION, False)
        return response.content

    def _headers(self, round_: Round) -> dict[str, str]:
        return self.connection.fence.at_round(round_).to_headers()

    def go_back(self, attempt: int) -> None:
        """Follow the run to its newest attempt, and forget the pushes of the one before."""
        self.connection.fence = replace(self.connection.fence, attempt=attempt)
        self._kept.clear()

    async def push(self, round_: Round, body: Payload, *, initial: bool = False) -> PushAnswer:
        """Push one encoded bucket. `body` must not change until this returns."""
        path = routes.INITIAL if initial else routes.SEND
        num_bytes = sum(map(len, body))
        if not initial:
            self._keep(round_, body)

        async def attempt() -> PushAnswer:
            with self.link.pushes.transfer():
                content = await self._send(path, {**self._headers(round_), "content-type": CONTENT_TYPE}, body)
            self.link.pushes.add(num_bytes)
            return PushAnswer.model_validate_json(content)

        try:
            answer = await self.connection.request_with_retry(path, attempt)
        except BaseException:
            self._drop(round_, body)
            raise
        self.connection.metrics.pushed_bytes.inc(num_bytes)
        return answer

    def _keep(self, round_: Round, body: Payload) -> None:
        for old in sorted(self._kept)[: -max(MIN_KEPT_ROUNDS, self._max_delay + 1)]:
            del self._kept[old]  # of a caller that pushes and never pulls
        frames = self._kept.setdefault(round_, [])
        if not any(frame is body for frame in frames):
            frames.append(body)

    def _drop(self, round_: Round, body: Payload) -> None:
        """Forget a push that was refused or given up: the next attempt of the caller has a frame of its own."""
        frames = [frame for frame in self._kept.pop(round_, ()) if frame is not body]
        if frames:
            self._kept[round_] = frames

    def _forget(self, round_: Round) -> None:
        """Forget the pushes of rounds that have been pulled."""
        for old in [known for known in self._kept if known <= round_]:
            del self._kept[old]

    async def barrier(self, round_: Round, kind: str, *, is_finite: bool = True) -> BarrierAnswer:
        """Send a batch or fetch barrier; a batch barrier says whether this trainer's gradient is finite."""

        async def attempt() -> BarrierAnswer:
            headers = {**self._headers(round_), routes.BARRIER_HEADER: kind, **_verdict(is_finite)}
            return BarrierAnswer.model_validate_json(await self._send(routes.BARRIER, headers))

        return await self._request_with_repush(routes.BARRIER, attempt, round_)

    async def norm(
        self,
        round_: Round,
        *,
        with_batch_barrier: bool = False,
        is_finite: bool = True,
        norm: AgreedNorm | None = None,
    ) -> ShardNorm | None:
        """Wait until this pserver has aggregated a round, and return its part of the norm.

        None if the round is over and the pserver has no norm of it. With the global `norm` the request waits until the
        round is over. Raises NormChanged if the pserver has another gradient by then.
        """
        extra = _wait_headers(with_batch_barrier, is_finite, norm)

        async def attempt() -> NormAnswer:
            return NormAnswer.model_validate_json(await self._send(routes.NORM, {**self._headers(round_), **extra}))

        answer = await self._request_with_repush(routes.NORM, attempt, round_)
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
        deltas: Deltas | None = None,
        on_block: Callable[[str], None] | None = None,
    ) -> Pulled:
        """Wait for version `round_` and write its blocks to `destinations` (block name -> its writable bytes).

        `names` are the blocks to fetch; without them, every block of the shard needs a destination. `have` is the
        version that the destinations hold already: blocks that have not changed since are left as they are. If the run
        pulls deltas, it needs `deltas`, which are added at the end. `norm` lets the pserver step a round that is
        clipped; raises NormChanged if the pserver has another gradient. Without deltas `on_block` is called with the
        name of each block as soon as it is complete.
        """
        headers = _wait_headers(with_batch_barrier, is_finite, norm)
        if have is not None:
            headers[routes.HAVE_HEADER] = str(have)
        asked = perf_counter()
        memory = deltas.memory if deltas else NO_DELTAS
        metadata, answered, delta_names = await self._fetch(
            "POST", routes.GET, round_, headers, destinations, names, memory, on_block
        )
        self.connection.metrics.barrier_wait.observe(answered - asked)
        version = self._check_version(metadata, round_)
        if metadata.get(routes.SINCE_KEY) not in (None, str(have)):
            raise GradpostError(
                f"pserver {self.index} left out blocks that changed after version {have}; this is a bug, please report "
                "it",
                actual=dict(metadata),
            )
        if delta_names:
            assert deltas is not None  # or there was no memory for them
            if have is None or routes.SINCE_KEY not in metadata:
                raise GradpostError(
                    f"pserver {self.index} sent a delta without naming its base version; this is a bug, please report "
                    "it",
                    actual=dict(metadata),
                )
            await deltas.add(delta_names)
        if not names:
            self._forget(round_)
        before = json.loads(metadata.get(routes.SKIPPED_BEFORE_KEY, "{}"))
        skipped = {int(round_): tuple(ranks) for round_, ranks in before.items()}
        if routes.SKIPPED_KEY in metadata:
            skipped[version] = tuple(json.loads(metadata[routes.SKIPPED_KEY]))
        return Pulled(version, skipped, json.loads(metadata.get(routes.GRAD_SCALER_KEY, "null")))

    async def get_buffers(self, destinations: Mapping[str, memoryview]) -> None:
        """Fetch buffers of this pserver, which no round changes."""
        metadata, _, _ = await self._fetch("GET", routes.BUFFERS, 0, {}, destinations, ())
        self._check_version(metadata, 0)

    async def describe_optimizer_state(self, round_: Round) -> HeldState:
        """Return which optimizer state there is after a round that this trainer has pulled."""
        metadata, _, _ = await self._fetch("POST", routes.SLOTS, round_, {}, {}, ())
        self._check_version(metadata, round_)
        names = json.loads(metadata[routes.SLOT_NAMES_KEY])
        return HeldState(read_states(metadata[routes.STATES_KEY]), frozenset(names))

    async def get_optimizer_state(self, round_: Round, destinations: Mapping[str, memoryview]) -> None:
        """Fetch slots (`{slot}/{block}` -> its writable bytes) as of that round."""
        metadata, _, _ = await self._fetch("POST", routes.SLOTS, round_, {}, destinations, list(destinations))
        self._check_version(metadata, round_)

    def _check_version(self, metadata: Mapping[str, str], round_: Round) -> Round:
        fence = self.connection.fence
        actual = (metadata.get("run"), metadata.get("attempt"))
        version = int(metadata.get("round", -1))
        is_it = version == round_ or (version > round_ and self._max_delay > 0)
        if actual != (fence.run, str(fence.attempt)) or not is_it:
            raise GradpostError(
                f"pserver {self.index} answered with another version than {round_}; this is a bug, please report it",
                actual=dict(metadata),
            )
        return version

    async def _fetch(
        self,
        method: str,
        path: str,
        round_: Round,
        extra: Mapping[str, str],
        destinations: Mapping[str, memoryview],
        names: Sequence[str],
        deltas: Mapping[str, memoryview] = NO_DELTAS,
        on_block: Callable[[str], None] | None = None,
    ) -> tuple[Mapping[str, str], float, list[str]]:
        """Return the metadata of the answer, its begin (`perf_counter`), and the tensors that went to `deltas`."""
        connection = self.connection

        async def attempt() -> tuple[Mapping[str, str], float, list[str]]:
            sink = FrameSink(destinations, TRUSTED_LIMITS, deltas, on_block)
            body = (memoryview(json.dumps(list(names)).encode()),) if names else ()
            response = await connection.exchange.begin(
                method, connection.url(path), {**self._headers(round_), **extra}, body=body, sink=sink
            )
            answered = perf_counter()
            try:
                if may_be_problem(response):
                    await response.aread()
                raise_for_problem(response)
                with self.link.pulls.transfer():
                    async for chunk in response.aiter_raw():
                        sink.feed(chunk)
                self.link.pulls.add(sink.num_bytes)
                connection.metrics.pulled_bytes.inc(sink.num_bytes)
            finally:
                await response.aclose()
            return sink.finish(), answered, sink.delta_names

        return await self._request_with_repush(path, attempt, round_)

    async def _request_with_repush(self, path: str, attempt: Callable[[], Awaitable[T]], round_: Round) -> T:
        return await self.connection.request_with_retry(path, attempt, lambda: self._push_again(round_))

    async def _push_again(self, round_: Round) -> bool:
        """Push what was pushed for a round once more: a restarted pserver may have lost what was staged there."""
        frames = list(self._kept.get(round_, ()))
        await asyncio.gather(*(self.push(round_, frame) for frame in frames))
        return bool(frames)


def _wait_headers(with_batch_barrier: bool, is_finite: bool, norm: AgreedNorm | None) -> dict[str, str]:
    headers = {routes.WAIT_HEADER: f"{WAIT_SECONDS:g}"}
    if with_batch_barrier:
        headers |= {routes.BARRIER_HEADER: "batch", **_verdict(is_finite)}
    if norm is not None:
        headers[routes.NORM_HEADER] = norm.to_header()
    return headers


def _verdict(is_finite: bool) -> dict[str, str]:
    return {} if is_finite else {routes.VERDICT_HEADER: "nonfinite"}
