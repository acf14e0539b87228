"""One pserver as a trainer sees it: push, barrier and pull."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from ps_config.control_client import may_be_problem, raise_for_problem
from ps_http2.client import LOCAL_EXTENSION
from ps_protocol import routes
from ps_protocol.errors import GradpostError
from ps_protocol.fields import Message
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.norms import ShardNorm
from ps_protocol.optimizers import StepState, read_states
from ps_protocol.requests import (
    SLOT_NAMES_KEY,
    STATES_KEY,
    Barrier,
    BarrierAnswer,
    NormAnswer,
    Pull,
    Pulled,
    PushAnswer,
)
from ps_protocol.vocabulary import Round

from ..transport.destinations import ShardDestination
from ..transport.exchange import raw_parts
from ..transport.frame_sink import NO_DELTAS, FrameSink
from .buckets import FrameParts
from .news import Attempt
from .pserver_connection import PserverConnection

M = TypeVar("M", bound=Message)

MIN_KEPT_ROUNDS = 8


class HeldState(NamedTuple):
    """The optimizer state that a pserver has."""

    states: Mapping[str, StepState]  # by block name; a block that was never stepped has none
    slots: frozenset[str]  # the slots that exist, of all blocks


class Fetched(NamedTuple):
    """A frame that was received into memory."""

    version: Round
    metadata: Mapping[str, str]
    began: float  # when its first byte arrived, by `perf_counter`
    names: Collection[str]  # the tensors in it
    delta_names: list[str]  # the tensors that are deltas


class PserverClient:
    """Requests of one trainer to one pserver. All methods run on the I/O loop.

    Every request may be repeated: its identity is in the fence, so the pserver counts it once.
    """

    def __init__(self, connection: PserverConnection, *, max_delay: int) -> None:
        self.connection = connection
        # Frames that were pushed and not pulled yet, by identity: a pserver may lose them.
        self._kept: dict[Round, dict[int, FrameParts]] = {}
        self._max_delay = max_delay

    @property
    def index(self) -> int:
        """The index of the pserver."""
        return self.connection.info.index

    async def warm_up(self) -> None:
        """Open the connection: frames are small until the pserver's settings arrive."""
        connection = self.connection

        async def send_once() -> None:
            response, _ = await connection.exchange.send("GET", connection.url(routes.HEALTH), {})
            connection.is_local = response.extensions.get(LOCAL_EXTENSION, False)

        await connection.request_with_retry(routes.HEALTH, send_once)

    def follow(self, attempt: Attempt) -> None:
        """Send all further requests for this attempt of the run, and forget the pushes of the attempt before."""
        self.connection.fence = self.connection.fence._replace(attempt=attempt.number)
        self._kept.clear()

    # ------------------------------------------------------------------ pushes

    async def push(self, round_: Round, body: FrameParts, *, initial: bool = False) -> PushAnswer:
        """Push one encoded bucket. `body` must not change until this returns."""
        route = routes.INITIAL if initial else routes.SEND
        if not initial:
            for old in sorted(self._kept)[: -max(MIN_KEPT_ROUNDS, self._max_delay + 1)]:
                del self._kept[old]  # `get` deletes what it pulls, but a ParameterClient may never call it
            self._kept.setdefault(round_, {})[id(body)] = body

        send_once = partial(self._send, PushAnswer, route, round_, {"content-type": CONTENT_TYPE}, body)

        try:
            answer = await self.connection.request_with_retry(route, send_once)
        except BaseException:  # the caller pushes the step again in frames of its own
            self._kept.get(round_, {}).pop(id(body), None)
            raise
        self._count_pushed(body)
        return answer

    def _count_pushed(self, frame: FrameParts) -> None:
        num_bytes = sum(map(len, frame))
        self.connection.sent_bytes += num_bytes
        self.connection.metrics.pushed_bytes.inc(num_bytes)

    async def _push_again(self, round_: Round) -> bool:
        """Push a round's contribution again, because a restarted pserver may have lost the staged blocks."""
        frames = list(self._kept.get(round_, {}).values())
        await asyncio.gather(*(self.push(round_, frame) for frame in frames))
        return bool(frames)

    # ------------------------------------------------------------------ small answers

    async def barrier(self, round_: Round, barrier: Barrier) -> None:
        """Send a barrier without a pull."""
        await self._ask(BarrierAnswer, routes.BARRIER, round_, barrier.to_headers())

    async def norm(self, pull: Pull) -> ShardNorm | None:
        """Wait until this pserver has aggregated a round, and return its part of the norm.

        None if the round is over and the pserver has no norm of it. With the global norm in `pull` the request waits
        until the round is over. Raises NormChanged if the pserver has another gradient by then.
        """
        answer = await self._ask(NormAnswer, routes.NORM, pull.round, pull.to_headers())
        return None if answer.sum_of_squares is None else ShardNorm(answer.contributions, answer.sum_of_squares)

    async def _ask(self, kind: type[M], route: str, round_: Round, headers: Mapping[str, str]) -> M:
        send_once = partial(self._send, kind, route, round_, headers)
        return await self.connection.request_with_retry(route, send_once, partial(self._push_again, round_))

    async def _send(
        self, kind: type[M], route: str, round_: Round, headers: Mapping[str, str], body: FrameParts = ()
    ) -> M:
        connection = self.connection
        headers = {**connection.fence._replace(round=round_).to_headers(), **headers}
        response, content = await connection.exchange.send("POST", connection.url(route), headers, body=body)
        raise_for_problem(response)
        connection.is_local = response.extensions.get(LOCAL_EXTENSION, False)
        return kind.from_answer(content)

    # ------------------------------------------------------------------ frames

    async def get(
        self,
        pull: Pull,
        destination: ShardDestination,
        on_block: Callable[[str], None] | None = None,
        pushed: FrameParts = (),
    ) -> Pulled:
        """Wait for a version and write its blocks to their destination, which needs every block that is pulled.

        The request carries the frame `pushed`, if there is one: the whole contribution of the round.
        If the run pulls deltas, a pull with a base needs a destination with deltas, which are added at the end.
        Without deltas `on_block` is called with the name of each block as soon as it is complete. Raises NormChanged
        if the pserver has another gradient than that of the norm.
        """
        asked = perf_counter()
        headers = pull.to_headers() | ({"content-type": CONTENT_TYPE} if pushed else {})
        fetched = await self._fetch("POST", routes.GET, pull, destination, headers, on_block, pushed)
        if pushed:
            self._count_pushed(pushed)
        self.connection.metrics.barrier_wait.observe(fetched.began - asked)
        pulled = Pulled.from_metadata(fetched.version, fetched.metadata)
        if pulled.base not in (None, pull.base):
            problem = f"left out blocks that changed after version {pull.base}"
        elif fetched.delta_names and pulled.base is None:
            problem = "sent a delta without naming its base version"
        else:
            problem = ""
        if problem:
            raise GradpostError(
                f"pserver {self.index} {problem}; this is a bug, please report it", actual=dict(fetched.metadata)
            )
        if destination.deltas is not None:
            await destination.deltas.add(fetched.delta_names)
        destination.received = fetched.names
        if not pull.names:
            for old in sorted(self._kept):
                if old <= pull.round:
                    del self._kept[old]
        return pulled

    async def get_buffers(self, buffers: Mapping[str, memoryview]) -> None:
        """Fetch buffers of this pserver, which no round changes."""
        await self._fetch("GET", routes.BUFFERS, Pull(0), ShardDestination(buffers))

    async def describe_optimizer_state(self, round_: Round) -> HeldState:
        """Return the step states and the names of the slots after a round that this trainer has pulled."""
        metadata = (await self._fetch("POST", routes.SLOTS, Pull(round_), ShardDestination({}))).metadata
        names = json.loads(metadata[SLOT_NAMES_KEY])
        return HeldState(read_states(metadata[STATES_KEY]), frozenset(names))

    async def get_optimizer_state(self, round_: Round, slots: Mapping[str, memoryview]) -> None:
        """Fetch slots (`{slot}/{block}` -> its writable bytes) as of this round."""
        await self._fetch("POST", routes.SLOTS, Pull(round_, names=tuple(slots)), ShardDestination(slots))

    async def _fetch(
        self,
        method: str,
        route: str,
        pull: Pull,
        destination: ShardDestination,
        more_headers: Mapping[str, str] = MappingProxyType({}),
        on_block: Callable[[str], None] | None = None,
        pushed: FrameParts = (),
    ) -> Fetched:
        connection, deltas = self.connection, destination.deltas
        body = (memoryview(pull.body),) if pull.names else pushed

        async def send_once() -> Fetched:
            sink = FrameSink(
                destination.blocks,
                deltas=NO_DELTAS if deltas is None else deltas.memory,
                on_block=on_block if deltas is None else None,
            )
            headers = {**connection.fence._replace(round=pull.round).to_headers(), **more_headers}
            response = await connection.exchange.begin_request(
                method, connection.url(route), headers, body=body, sink=sink
            )
            began = perf_counter()
            try:
                if may_be_problem(response):
                    await response.aread()
                raise_for_problem(response)
                connection.is_local = response.extensions.get(LOCAL_EXTENSION, False)
                async for chunk in raw_parts(response):
                    sink.feed(chunk)
                connection.received_bytes += sink.num_bytes
                connection.metrics.pulled_bytes.inc(sink.num_bytes)
            finally:
                await response.aclose()
            metadata = sink.finish()
            return Fetched(self._check_version(metadata, pull.round), metadata, began, sink.names, sink.delta_names)

        return await connection.request_with_retry(route, send_once, partial(self._push_again, pull.round))

    def _check_version(self, metadata: Mapping[str, str], round_: Round) -> Round:
        fence = self.connection.fence
        actual = (metadata.get("run"), metadata.get("attempt"))
        version = int(metadata.get("round", -1))
        is_it = version == round_ or (version > round_ and self._max_delay > 0)
        if actual != (fence.run, str(fence.attempt)) or not is_it:
            raise GradpostError(
                f"pserver {self.index} replied with another run, attempt or version than requested; this is a "
                "bug, please report it",
                actual=dict(metadata),
            )
        return version
