"""The whole model of one round as a safetensors file, put together while it flows: no more than a tensor is held here.

Every pserver sends its blocks in plan order, then its buffers. The file has the parameters in plan order, each of
blocks in order, then the buffers; so whatever comes next in it comes next from its pserver, too.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import SHARD
from ps_protocol.vocabulary import DTYPE_BYTES, PserverIndex
from services.runtime.large_replies import Stream

from ..coordinator import Coordinator
from .arriving import ArrivingFrame, open_frames
from .reading import current_plan


@asynccontextmanager
async def open_model(coordinator: Coordinator) -> AsyncIterator[Stream]:
    """The model of one round, tied names and buffers included, for `load_state_dict(strict=True)`.

    In asynchronous modes pservers have no round in common: the shard of each is a cut between contributions, and the
    metadata says of each which steps of whom are in it. Raises NotReady, TryAgain, RoundPending.
    """
    plan = current_plan(coordinator)
    run = coordinator.cluster.run
    async with open_frames(coordinator, SHARD, dict.fromkeys(range(plan.num_pservers), ())) as shards:
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

        version = min((shard.version for shard in shards.values()), default=0)
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


async def _read_item(
    plan: SlicePlan, shards: Mapping[PserverIndex, ArrivingFrame], item: _Item
) -> AsyncIterator[bytes]:
    if item.pserver:
        async for part in shards[item.pserver[0]].read(item.num_bytes):
            yield part
        return
    for block in plan.blocks_of[item.name]:
        async for part in shards[block.pserver].read(plan.block_bytes(block)):
            yield part


def _describe(run: str, shards: Mapping[PserverIndex, ArrivingFrame]) -> dict[str, str]:
    versions = [shard.version for shard in shards.values()]
    described = {"run": run, "round": str(min(versions, default=0))}
    for index, shard in shards.items():
        for key, value in shard.metadata.items():
            if key not in ("run", "attempt", "round"):
                described[f"pserver{index}.{key}"] = value
    return described
