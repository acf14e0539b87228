"""One pserver as a trainer sees it: push, barrier and pull."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar

from ps_protocol import routes
from ps_protocol.errors import ContributionMissing, GradpostError, RoundPending
from ps_protocol.fields import Message
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.norms import ShardNorm
from ps_protocol.optimizers import StepState, read_states
from ps_protocol.requests import (
    SLOT_NAMES_KEY,
    STATES_KEY,
    NormAnswer,
    Pull,
    Pulled,
    PushAnswer,
)
from ps_protocol.vocabulary import Incarnation, Round

from ..transport.destinations import ShardDestination
from ..transport.frame_sink import NO_DELTAS, FrameSink
from ..transport.work import Work, together
from .buckets import FrameParts
from .news import Attempt
from .pserver_connection import PserverConnection

M = TypeVar("M", bound=Message)


class HeldState(NamedTuple):
    """The optimizer state that a pserver has."""

    states: Mapping[str, StepState]  # by block name; a block that was never stepped has none
    slots: frozenset[str]  # the slots that exist, of all blocks


class Fetched(NamedTuple):
    """A frame that was received into memory."""

    version: Round
    metadata: Mapping[str, str]
    began: float  # when its first bytes arrived, by `perf_counter`
    names: Collection[str]  # the tensors in it
    delta_names: list[str]  # the tensors that are deltas


class PserverClient:
    """Requests of one trainer to one pserver.

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

    def warm_up(self) -> Work[None]:
        """Open the connection: frames are small until the pserver's settings arrive."""
        connection = self.connection
        yield from connection.request_with_retry(routes.HEALTH, lambda: connection.send("GET", routes.HEALTH, {}))

    def follow(self, attempt: Attempt) -> None:
        """Send all further requests for this attempt of the run, and forget the pushes of the attempt before."""
        self.connection.fence = self.connection.fence._replace(attempt=attempt.number)
        self._kept.clear()

    # ------------------------------------------------------------------ pushes

    def forget_pushes(self, round_: Round) -> None:
        """Forget the frames of a round that will be pushed again as a whole."""
        self._kept.pop(round_, None)

    def push(self, round_: Round, body: FrameParts, *, initial: bool = False) -> Work[None]:
        """Push one encoded bucket. `body` must not change until this has ended."""
        route = routes.INITIAL if initial else routes.SEND
        if not initial:
            self._kept.setdefault(round_, {})[id(body)] = body
        send_once = partial(self._send, PushAnswer, route, round_, {"content-type": CONTENT_TYPE}, body)
        try:
            yield from self.connection.request_with_retry(route, send_once)
        except BaseException:  # the caller pushes the step again in frames of its own
            self._kept.get(round_, {}).pop(id(body), None)
            raise
        self._count_pushed(body)

    def _count_pushed(self, frame: FrameParts) -> None:
        num_bytes = sum(map(len, frame))
        self.connection.sent_bytes += num_bytes
        self.connection.metrics.pushed_bytes.inc(num_bytes)

    def _push_again(self, round_: Round) -> Work[bool]:
        """Push a round's contribution again, because a restarted pserver may have lost the staged blocks."""
        frames = list(self._kept.get(round_, {}).values())
        yield from together(self.push(round_, frame) for frame in frames)
        return bool(frames)

    # ------------------------------------------------------------------ small answers

    def norm(self, pull: Pull) -> Work[ShardNorm | None]:
        """Wait until this pserver has aggregated a round, and return its part of the norm.

        None if the round is over and the pserver has no norm of it. With the global norm in `pull` the request waits
        until the round is over. Raises NormChanged if the pserver has another gradient by then.
        """
        send_once = partial(self._send, NormAnswer, routes.NORM, pull.round, pull.to_headers())
        push_again = partial(self._push_again, pull.round)
        answer = yield from self.connection.request_with_retry(routes.NORM, send_once, push_again)
        return None if answer.sum_of_squares is None else ShardNorm(answer.contributions, answer.sum_of_squares)

    def _send(
        self, kind: type[M], route: str, round_: Round, headers: Mapping[str, str], body: FrameParts = ()
    ) -> Work[M]:
        headers = {**self.connection.fence._replace(round=round_).to_headers(), **headers}
        response = yield from self.connection.send("POST", route, headers, body=body)
        return kind.from_answer(response.content)

    # ------------------------------------------------------------------ frames

    def get(
        self,
        pull: Pull,
        destination: ShardDestination,
        on_block: Callable[[str], None] | None = None,
        pushed: FrameParts = (),
    ) -> Work[Pulled]:
        """Wait for a version and write its blocks to their destination, which needs every block that is pulled.

        The request carries the frame `pushed`, if there is one: the last one of the contribution to the round.
        If the run pulls deltas, a pull with a base needs a destination with deltas, which are added at the end.
        Without deltas `on_block` is called with the name of each block as soon as it is complete. Raises NormChanged
        if the pserver has another gradient than that of the norm.
        """
        asked = perf_counter()
        fetched = yield from self._fetch("POST", routes.GET, pull, destination, on_block, pushed)
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
            yield from destination.deltas.add(fetched.delta_names)
        destination.received = fetched.names
        for old in sorted(self._kept):
            if old <= pull.round:
                del self._kept[old]
        return pulled

    def get_buffers(self, buffers: Mapping[str, memoryview]) -> Work[None]:
        """Fetch buffers of this pserver, which no round changes."""
        yield from self._fetch("GET", routes.BUFFERS, Pull(0), ShardDestination(buffers))

    def describe_optimizer_state(self, round_: Round) -> Work[HeldState]:
        """Return the step states and the names of the slots after a round that this trainer has pulled."""
        fetched = yield from self._fetch("POST", routes.SLOTS, Pull(round_), ShardDestination({}))
        names = json.loads(fetched.metadata[SLOT_NAMES_KEY])
        return HeldState(read_states(fetched.metadata[STATES_KEY]), frozenset(names))

    def get_optimizer_state(self, round_: Round, slots: Mapping[str, memoryview]) -> Work[None]:
        """Fetch slots (`{slot}/{block}` -> its writable bytes) as of this round."""
        yield from self._fetch("POST", routes.SLOTS, Pull(round_, names=tuple(slots)), ShardDestination(slots))

    def _fetch(
        self,
        method: str,
        route: str,
        pull: Pull,
        destination: ShardDestination,
        on_block: Callable[[str], None] | None = None,
        pushed: FrameParts = (),
    ) -> Work[Fetched]:
        connection, deltas = self.connection, destination.deltas
        pull_headers = pull.to_headers() if route == routes.GET else {}
        staged_by: Incarnation | None = None  # the pserver that has the pushed frame, and waits for other trainers

        def send_once() -> Work[Fetched]:
            nonlocal staged_by
            sink = FrameSink(
                destination.blocks,
                deltas=NO_DELTAS if deltas is None else deltas.memory,
                rows=destination.rows,
                on_block=on_block if deltas is None else None,
            )
            headers = {**connection.fence._replace(round=pull.round).to_headers(), **pull_headers}
            body: FrameParts = (memoryview(pull.body),) if pull.names else ()
            if pushed and connection.info.incarnation != staged_by:
                body = pushed
                headers["content-type"] = CONTENT_TYPE
            try:
                yield from connection.send(method, route, headers, body=body, sink=sink)
            except RoundPending:
                staged_by = connection.info.incarnation
                raise
            except ContributionMissing:
                staged_by = None
                raise
            connection.received_bytes += sink.num_bytes
            connection.metrics.pulled_bytes.inc(sink.num_bytes)
            metadata = sink.finish()
            version = self._check_version(metadata, pull.round)
            return Fetched(version, metadata, sink.began, sink.names, sink.delta_names)

        def push_again() -> Work[bool]:
            has_pushed = yield from self._push_again(pull.round)
            return has_pushed or bool(pushed)

        return (yield from connection.request_with_retry(route, send_once, push_again))

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
