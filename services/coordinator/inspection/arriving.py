"""Frames of pservers while they arrive: what passes through the coordinator flows, and is never here as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx

from ps_protocol.errors import TryAgain
from ps_protocol.frames import LENGTH_BYTES, Frame, FrameLimits, parse_header, parse_length
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.errors import raise_for_problem
from services.runtime.large_replies import PART_BYTES

from ..coordinator import Coordinator
from ..pservers import PserverMember
from .reading import READ_SECONDS, WAIT_SECONDS, Answer, read_alike

STILL_SECONDS = 7.0  # a server gives up on who takes nothing for `body_timeout_seconds`, which is longer
PARTS_AT_ONCE = 2  # so much more than the kernels hold between two processes as to move what they hold
_LIMITS = FrameLimits(max_body_bytes=1 << 62, max_header_bytes=1 << 30, max_tensors=1 << 30)  # our own pservers
GONE = "a pserver went away while its shard was being read"


class ArrivingFrame(Answer):
    """One pserver's frame: its header is here, its data is read in order."""

    def __init__(self, frame: Frame, parts: AsyncIterator[bytes], rest: bytes) -> None:
        self.metadata = dict(frame.metadata)
        self.names = frozenset(entry.name for entry in frame.tensors)
        self._parts = parts
        self._rest = bytearray(rest)
        self._taking = asyncio.Lock()
        self._taken_at = asyncio.get_running_loop().time()

    async def _take(self) -> bool:
        """Have the next part here; False if there is none. Raises httpx.HTTPError."""
        async with self._taking:
            part = await anext(self._parts, None)
            self._taken_at = asyncio.get_running_loop().time()
            self._rest += part or b""
            return part is not None

    async def keep_moving(self) -> None:
        """Take a little now and then, while what stands before it in a file flows at the pace of who reads that."""
        with suppress(httpx.HTTPError):  # whoever reads on hears of it
            while True:
                await asyncio.sleep(STILL_SECONDS / 2)
                if asyncio.get_running_loop().time() - self._taken_at >= STILL_SECONDS / 2:
                    for _ in range(PARTS_AT_ONCE):
                        if not await self._take():
                            return

    async def read(self, num_bytes: int) -> AsyncIterator[bytes]:
        """The next so many bytes. Raises TryAgain if it ends before them."""
        while num_bytes:
            if not self._rest:
                try:
                    await self._take()
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

        frames = dict(zip(names, await read_alike(coordinator, list(names), ask), strict=True))
        moving = [asyncio.create_task(frame.keep_moving(), name="keep moving") for frame in frames.values()]
        try:
            yield frames
        finally:
            for task in moving:
                task.cancel()
            await asyncio.gather(*moving, return_exceptions=True)


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
