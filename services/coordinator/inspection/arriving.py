"""Frames of pservers while they arrive: what passes through the coordinator flows, and is never here as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from ps_protocol.errors import TryAgain
from ps_protocol.frames import LENGTH_BYTES, Frame, FrameLimits, parse_header, parse_length
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.large_replies import PART_BYTES
from services.runtime.peers import raise_for_problem

from ..coordinator import Coordinator
from ..pservers import PserverMember
from .reading import READ_SECONDS, WAIT_SECONDS, Answer, read_alike

_LIMITS = FrameLimits(max_body_bytes=1 << 62, max_header_bytes=1 << 30, max_tensors=1 << 30)  # our own pservers


class ArrivingFrame(Answer):
    """One pserver's frame: its header is here, its data is read in order."""

    def __init__(self, frame: Frame, parts: AsyncIterator[bytes], rest: bytes) -> None:
        self.metadata = dict(frame.metadata)
        self.names = frozenset(entry.name for entry in frame.tensors)
        self._parts = parts
        self._rest = rest

    async def read(self, num_bytes: int) -> AsyncIterator[bytes]:
        """The next so many bytes. Raises TryAgain if it ends before them."""
        while num_bytes:
            if not self._rest:
                try:
                    self._rest = await anext(self._parts)
                except (StopAsyncIteration, httpx.HTTPError) as error:
                    raise TryAgain("a pserver went away while its shard was being read") from error
            part, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
            num_bytes -= len(part)
            yield part


@asynccontextmanager
async def open_frames(
    coordinator: Coordinator, route: str, names: Mapping[PserverIndex, Sequence[str]]
) -> AsyncIterator[dict[PserverIndex, ArrivingFrame]]:
    """The frames that these pservers answer for these blocks (none: all of them), all of one version.

    Raises NotReady, TryAgain, RoundPending.
    """
    async with AsyncExitStack() as stack:
        opened: dict[PserverIndex, AsyncExitStack] = {}

        async def ask(member: PserverMember, named: Round | None) -> ArrivingFrame:
            index = member.info.index
            if (before := opened.pop(index, None)) is not None:
                await before.aclose()  # it was of another round than the others
            own = opened[index] = await stack.enter_async_context(AsyncExitStack())
            parameters: dict[str, Any] = {"name": list(names[index])} if names[index] else {}
            if named is not None:
                parameters |= {"round": named, "wait_seconds": WAIT_SECONDS}
            return await _open_frame(coordinator, own, member, route, parameters)

        yield dict(zip(names, await read_alike(coordinator, list(names), ask), strict=True))


async def _open_frame(
    coordinator: Coordinator, stack: AsyncExitStack, member: PserverMember, route: str, parameters: dict[str, Any]
) -> ArrivingFrame:
    """Ask for it and read the beginning of the answer; the rest is left on its way until the stack is closed."""
    try:
        response = await stack.enter_async_context(
            coordinator.http.stream(
                "GET", member.info.address + route, params=parameters, timeout=READ_SECONDS + WAIT_SECONDS
            )
        )
        if response.is_error:
            await response.aread()
            raise_for_problem(response)
        parts = response.aiter_bytes(PART_BYTES)
        begun = b""
        while len(begun) < LENGTH_BYTES or len(begun) < parse_length(begun, _LIMITS):
            begun += await anext(parts)
    except (httpx.HTTPError, StopAsyncIteration) as error:
        raise TryAgain(f"pserver {member.info.index} did not answer: {error!r}") from error
    data_begin = parse_length(begun, _LIMITS)
    return ArrivingFrame(parse_header(begun[LENGTH_BYTES:data_begin], _LIMITS), parts, begun[data_begin:])
