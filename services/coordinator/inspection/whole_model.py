"""The whole model of one round as a safetensors file, put together while it flows: no more than a tensor is held here.

Every pserver sends its blocks in plan order, then its buffers. The file has the parameters in plan order, each of
blocks in order, then the buffers; so whatever comes next in it comes next from its pserver, too.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ps_protocol.errors import TryAgain
from ps_protocol.frames import LENGTH_BYTES, FrameLimits, encode_header, parse_header, parse_length
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import SHARD
from ps_protocol.vocabulary import DTYPE_BYTES, PserverIndex, Round
from services.runtime.large_replies import Stream
from services.runtime.peers import raise_for_problem

from ..coordinator import Coordinator
from ..pservers import PserverMember
from .reading import READ_SECONDS, WAIT_SECONDS, Answer, current_plan, read_alike

PART_BYTES = 1024 * 1024
_LIMITS = FrameLimits(max_body_bytes=1 << 62, max_header_bytes=1 << 30, max_tensors=1 << 30)  # our own pservers


@asynccontextmanager
async def open_model(coordinator: Coordinator) -> AsyncIterator[Stream]:
    """The model of one round, tied names and buffers included, for `load_state_dict(strict=True)`.

    In asynchronous modes pservers have no round in common: the shard of each is a cut between contributions, and the
    metadata says of each which steps of whom are in it. Raises NotReady, TryAgain, RoundPending.
    """
    plan = current_plan(coordinator)
    run = coordinator.cluster.run
    async with AsyncExitStack() as stack:
        opened: dict[PserverIndex, AsyncExitStack] = {}

        async def ask(member: PserverMember, named: Round | None) -> _Shard:
            if (before := opened.pop(member.info.index, None)) is not None:
                await before.aclose()  # it was of another round than the others
            own = opened[member.info.index] = await stack.enter_async_context(AsyncExitStack())
            return await _open_shard(coordinator, own, member, named)

        shards = await read_alike(coordinator, range(plan.num_pservers), ask)
        aliases = {} if run.declaration is None else run.declaration.aliases
        items = [_Item(spec.name, spec.dtype, spec.shape, ()) for spec in plan.parameters]
        items += [_Item(spec.name, spec.dtype, spec.shape, (spec.pserver,)) for spec in plan.buffers]
        names: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            names.setdefault(name, []).append(alias)
        header = encode_header(
            [(name, item.dtype, item.shape) for item in items for name in (item.name, *names.get(item.name, ()))],
            {"format": "pt", **_describe(run.name, shards)},
        )
        total = sum(item.num_bytes * (1 + len(names.get(item.name, ()))) for item in items)

        async def parts() -> AsyncIterator[bytes]:
            yield header
            for item in items:
                copies: list[bytes] = []
                async for part in _read_item(plan, shards, item):
                    yield part
                    if item.name in names:
                        copies.append(part)
                for _ in names.get(item.name, ()):
                    for part in copies:
                        yield part

        version = min((shard.version for shard in shards), default=0)
        name = f'attachment; filename="{run.name}-round-{version}.safetensors"'
        yield Stream(len(header) + total, parts(), {"content-disposition": name})


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pserver: tuple[PserverIndex, ...]  # of a buffer; of a parameter its blocks say

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class _Shard(Answer):
    """One pserver's frame while it arrives."""

    def __init__(self, metadata: dict[str, str], parts: AsyncIterator[bytes], rest: bytes) -> None:
        self.metadata = metadata
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


async def _open_shard(
    coordinator: Coordinator, stack: AsyncExitStack, member: PserverMember, named: Round | None
) -> _Shard:
    """Ask for a shard and read the beginning of the answer; the rest is left on its way until the stack is closed."""
    parameters: dict[str, Any] = {} if named is None else {"round": named, "wait_seconds": WAIT_SECONDS}
    try:
        response = await stack.enter_async_context(
            coordinator.http.stream(
                "GET", member.info.address + SHARD, params=parameters, timeout=READ_SECONDS + WAIT_SECONDS
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
    frame = parse_header(begun[LENGTH_BYTES:data_begin], _LIMITS)
    return _Shard(dict(frame.metadata), parts, begun[data_begin:])


async def _read_item(plan: SlicePlan, shards: Sequence[_Shard], item: _Item) -> AsyncIterator[bytes]:
    if item.pserver:
        async for part in shards[item.pserver[0]].read(item.num_bytes):
            yield part
        return
    for block in plan.blocks_of[item.name]:
        async for part in shards[block.pserver].read(plan.block_bytes(block)):
            yield part


def _describe(run: str, shards: Sequence[_Shard]) -> dict[str, str]:
    versions = [shard.version for shard in shards]
    described = {"run": run, "round": str(min(versions, default=0))}
    for index, shard in enumerate(shards):
        for key, value in shard.metadata.items():
            if key not in ("run", "attempt", "round"):
                described[f"pserver{index}.{key}"] = value
    return described
