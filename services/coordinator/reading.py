"""Reads of several pservers at one version.

Rounds go on while pservers answer. If their newest rounds differ, a later round is named, and each pserver answers
when it has applied it. Tensors are streamed: a frame is never held as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx

from ps_config.control_client import may_be_problem, raise_for_problem
from ps_protocol.errors import NotReady, StaleRound, TryAgain
from ps_protocol.frames import LENGTH_BYTES, TRUSTED_LIMITS, Frame, parse_header, parse_length
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import SHARD
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.large_replies import PART_BYTES

from .coordinator import Coordinator
from .state.pservers import PserverMember

TRIES = 6
WAIT_SECONDS = 10.0  # until a named round is applied
READ_SECONDS = 30.0  # for the answer itself


def current_plan(coordinator: Coordinator) -> SlicePlan:
    """Return the run's plan. Raises NotReady without one, and Conflict (`no_pservers`) in a ring."""
    coordinator.cluster.require_pservers()
    plan = coordinator.cluster.run.record.plan
    if plan is None:
        raise NotReady("no run has begun, so there are no parameters yet", waiting_for=coordinator.cluster.waiting_for)
    return plan


def find_member(coordinator: Coordinator, index: PserverIndex) -> PserverMember:
    """Return a living pserver. Raises NotReady if it is not registered."""
    member = coordinator.cluster.registry.members.get(index)
    if member is None:
        raise NotReady(f"pserver {index} is not registered", waiting_for=f"pserver {index}")
    return member


async def get_from(coordinator: Coordinator, member: PserverMember, route: str, parameters: dict[str, Any]) -> bytes:
    """Return the body of a pserver's answer. Raises its GradpostError, or TryAgain without an answer."""
    try:
        response = await coordinator.http.get(
            member.info.address + route, params=parameters, timeout=READ_SECONDS + WAIT_SECONDS
        )
        raise_for_problem(response)
    except httpx.HTTPError as error:
        raise TryAgain(f"pserver {member.info.index} did not answer: {error!r}") from error
    return response.content


STILL_SECONDS = 7.0  # a server closes a stalled connection after `body_timeout_seconds`, which is longer
PARTS_AT_ONCE = 2  # more than the kernels' buffers between two processes hold
GONE = "a pserver went away while its shard was being read"


class IncomingFrame:
    """A pserver's frame: a parsed header with the version, and data that is read in order.

    `version` is the round; in asynchronous modes the number of contributions.
    """

    def __init__(self, frame: Frame, parts: AsyncIterator[bytes], rest: bytes) -> None:
        self.metadata = dict(frame.metadata)
        self.run = self.metadata["run"]
        self.attempt = int(self.metadata["attempt"])
        self.version: Round = int(self.metadata["round"])
        self._parts = parts
        self._rest = bytearray(rest)
        self._receive_lock = asyncio.Lock()

    async def _receive(self) -> bool:
        """Receive the next part. Returns False at the end. Raises httpx.HTTPError."""
        async with self._receive_lock:
            part = await anext(self._parts, None)
            self._rest += part or b""
            return part is not None

    async def drain_slowly(self) -> None:
        """Receive a little now and then, while the client still reads the tensors before this frame's."""
        with suppress(httpx.HTTPError):  # the reader gets the error
            while True:
                await asyncio.sleep(STILL_SECONDS / 2)
                for _ in range(PARTS_AT_ONCE):
                    if not await self._receive():
                        return

    async def read(self, num_bytes: int) -> AsyncIterator[bytes]:
        """Yield the next bytes. Raises TryAgain if the frame ends before."""
        while num_bytes:
            if not self._rest:
                try:
                    await self._receive()
                except httpx.HTTPError as error:
                    raise TryAgain(f"{GONE}: {error!r}") from error
            if not self._rest:
                raise TryAgain(GONE)
            part = bytes(self._rest[: min(num_bytes, PART_BYTES)])
            del self._rest[: len(part)]
            num_bytes -= len(part)
            yield part


@asynccontextmanager
async def open_frames(
    coordinator: Coordinator, names: Mapping[PserverIndex, Sequence[str]]
) -> AsyncIterator[dict[PserverIndex, IncomingFrame]]:
    """Open the frames of these pservers with these blocks (none: all of them).

    The frames are of one version, except in asynchronous modes. Raises NotReady, RoundPending, and TryAgain if the
    versions never agree.
    """
    has_common_versions = coordinator.cluster.run.settings.consistency.has_common_versions
    named: dict[str, Any] = {}
    ahead = 1
    for _ in range(TRIES):
        async with AsyncExitStack() as stack:
            opening = [
                _open_frame(coordinator, stack, find_member(coordinator, index), {**named, "name": list(of_pserver)})
                for index, of_pserver in names.items()
            ]
            answers = await asyncio.gather(*opening, return_exceptions=True)
            late = [error for error in answers if isinstance(error, StaleRound)]
            for error in answers:
                if isinstance(error, BaseException) and not isinstance(error, StaleRound):
                    raise error
            frames = [answer for answer in answers if not isinstance(answer, BaseException)]
            versions = {(frame.run, frame.attempt, frame.version) for frame in frames}
            if not late and (len(versions) <= 1 or not has_common_versions):
                async with _draining(frames):
                    yield dict(zip(names, frames, strict=True))
                return
        rounds = [version for _, _, version in versions]
        newest = max([*rounds, *(int(error.facts.get("current") or 0) for error in late)])
        named, ahead = {"round": newest + ahead, "wait_seconds": WAIT_SECONDS}, 2 * ahead
    raise TryAgain(f"the pservers applied rounds during each of {TRIES} attempts to read them; retry later")


@asynccontextmanager
async def _draining(frames: Sequence[IncomingFrame]) -> AsyncIterator[None]:
    """Drain the frames slowly during the block."""
    moving = [asyncio.create_task(frame.drain_slowly(), name="keep moving") for frame in frames]
    try:
        yield
    finally:
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)


async def _open_frame(
    coordinator: Coordinator, stack: AsyncExitStack, member: PserverMember, parameters: dict[str, Any]
) -> IncomingFrame:
    """Request a frame and read its header. The data arrives until the stack is closed."""
    try:
        response = await stack.enter_async_context(
            coordinator.http.stream(
                "GET", member.info.address + SHARD, params=parameters, timeout=READ_SECONDS + WAIT_SECONDS
            )
        )
        if may_be_problem(response):
            await response.aread()
        raise_for_problem(response)
        parts = response.aiter_bytes(PART_BYTES)
        begun = b""
        while len(begun) < LENGTH_BYTES or len(begun) < parse_length(begun, TRUSTED_LIMITS):
            begun += await anext(parts)
    except (httpx.HTTPError, StopAsyncIteration) as error:
        raise TryAgain(f"pserver {member.info.index} did not answer: {error!r}") from error
    data_begin = parse_length(begun, TRUSTED_LIMITS)
    return IncomingFrame(parse_header(begun[LENGTH_BYTES:data_begin], TRUSTED_LIMITS), parts, begun[data_begin:])
