"""Live parameters: the list, one parameter with its optimizer state, and the whole model, each of one version."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ps_protocol.errors import NotFound
from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import BLOCKS, SHARD, SLOTS, STEPS_KEY
from ps_protocol.vocabulary import DTYPE_BYTES, Block, ParameterSpec, PserverIndex, Round
from services.runtime.large_replies import PART_BYTES, Stream

from ..coordinator import Coordinator
from .formats import Format, Tensor, check_json
from .reading import IncomingFrame, current_plan, open_frames, round_everywhere


class BlockEntry(BaseModel):
    """A block in the list: elements `begin` to `end` of the flattened parameter."""

    name: str
    begin: int
    end: int
    pserver: PserverIndex


class ParameterEntry(BaseModel):
    """A parameter in the list; `bytes` is the size of its values in its own dtype."""

    name: str
    shape: list[int]
    dtype: str
    group: int
    bytes: int
    blocks: list[BlockEntry]


class ParameterList(BaseModel):
    """All parameters in the model's order; `version` is the newest round that all pservers have applied."""

    run: str
    digest: str
    version: Round
    parameters: list[ParameterEntry]


def describe_parameters(coordinator: Coordinator) -> dict[str, Any]:
    """Return all parameters with their blocks, in the model's order."""
    plan = current_plan(coordinator)
    return {
        "run": coordinator.cluster.run.name,
        "digest": plan.digest,
        "version": round_everywhere(coordinator),
        "parameters": [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "group": spec.group,
                "bytes": spec.num_elements * DTYPE_BYTES[spec.dtype],
                "blocks": [
                    {"name": b.name, "begin": b.begin, "end": b.end, "pserver": b.pserver}
                    for b in plan.blocks_of[spec.name]
                ],
            }
            for spec in plan.parameters
        ],
    }


def find_parameter(plan: SlicePlan, name: str) -> tuple[ParameterSpec, Sequence[Block]]:
    """Return a parameter and its blocks. Raises NotFound."""
    spec = plan.parameter.get(name)
    if spec is None:
        raise NotFound(f"there is no parameter {name!r} in this run")
    return spec, plan.blocks_of[name]


def owners_of(blocks: Sequence[Block]) -> list[PserverIndex]:
    """Return the pservers of these blocks."""
    return sorted({block.pserver for block in blocks})


@asynccontextmanager
async def open_parameter(coordinator: Coordinator, name: str, form: Format) -> AsyncIterator[Stream]:
    """Open one parameter; in the synchronous mode all of it is of one round.

    In asynchronous modes pservers have no version in common, and `round` is the oldest.
    Raises NotFound, BadInput, TryAgain, NotReady.
    """
    spec, blocks = find_parameter(current_plan(coordinator), name)
    if form == "json":
        check_json(spec)
    async with open_frames(coordinator, BLOCKS, _names_of(blocks)) as frames:
        tensor = Tensor(name, spec.dtype, spec.shape, _facts(coordinator, frames))
        # From the pservers' answers: the run may have been rolled back and reached this round again.
        tag = '"{run}.{attempt}.{round}"'.format(**tensor.facts)
        headers = {"etag": tag, "gradpost-round": tensor.facts["round"]}
        parts = _read_blocks(frames, blocks, DTYPE_BYTES[spec.dtype])
        if form == "json":
            body = tensor.encode_json(b"".join([part async for part in parts]))
            yield Stream(len(body), _once(body), headers)
        else:
            head = tensor.begin(form)
            yield Stream(len(head) + tensor.num_bytes(form), _join(head, tensor.convert(parts, form)), headers)


async def _read_blocks(
    frames: Mapping[PserverIndex, IncomingFrame], blocks: Sequence[Block], width: int
) -> AsyncIterator[bytes]:
    for block in blocks:
        async for part in frames[block.pserver].read(width * block.num_elements):
            yield part


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _join(head: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for part in parts:
        yield part


@asynccontextmanager
async def open_slots(coordinator: Coordinator, name: str) -> AsyncIterator[Stream]:
    """Open the optimizer slots of one parameter: a safetensors file of float32 tensors of its shape.

    A slot that no update has used is left out. The metadata `steps` is how often the parameter was stepped.
    """
    spec, blocks = find_parameter(current_plan(coordinator), name)
    async with open_frames(coordinator, SLOTS, _names_of(blocks)) as frames:
        slots = sorted({name.split("/", 1)[0] for frame in frames.values() for name in frame.names})
        steps = [json.loads(frame.metadata.get(STEPS_KEY, "{}")) for frame in frames.values()]  # for each block
        fewest = min((count for counts in steps for count in counts.values()), default=0)
        facts = {**_facts(coordinator, frames), STEPS_KEY: str(fewest)}
        head = encode_header([(slot, "F32", spec.shape) for slot in slots], facts)

        async def parts() -> AsyncIterator[bytes]:
            for slot in slots:
                for block in blocks:
                    async for part in _read_slot(frames[block.pserver], f"{slot}/{block.name}", block.num_elements):
                        yield part

        yield Stream(len(head) + len(slots) * 4 * spec.num_elements, _join(head, parts()), {})


async def _read_slot(frame: IncomingFrame, name: str, num_elements: int) -> AsyncIterator[bytes]:
    """Yield a slot of one block; zeros if its pserver has not used it."""
    if name in frame.names:
        async for part in frame.read(4 * num_elements):
            yield part
        return
    for begin in range(0, 4 * num_elements, PART_BYTES):
        yield bytes(min(PART_BYTES, 4 * num_elements - begin))


async def wait_for_newer(coordinator: Coordinator, name: str, after: Round, seconds: float) -> bool:
    """Wait until a parameter has a version after this one. Returns False after so many seconds.

    Another attempt counts as newer. Versions are those of the pservers' heartbeats. Raises NotFound, NotReady.
    """
    run = coordinator.cluster.run
    plan = current_plan(coordinator)
    _, blocks = find_parameter(plan, name)
    members, attempt = coordinator.cluster.registry.members, run.attempt
    owners = owners_of(blocks) or range(plan.num_pservers)  # any pserver, for a parameter without elements

    def is_newer() -> bool:
        return run.attempt != attempt or all(index in members and members[index].round > after for index in owners)

    await coordinator.wait_until(lambda: coordinator.cluster.run is not run or is_newer(), seconds)
    return coordinator.cluster.run is run and is_newer()


def _names_of(blocks: Sequence[Block]) -> dict[PserverIndex, list[str]]:
    """Return the names of the blocks of each pserver."""
    return {index: [block.name for block in blocks if block.pserver == index] for index in owners_of(blocks)}


def _facts(coordinator: Coordinator, frames: Mapping[PserverIndex, IncomingFrame]) -> dict[str, str]:
    if not frames:  # the parameter has no elements
        run = coordinator.cluster.run
        return {"run": run.name, "attempt": str(run.attempt), "round": str(round_everywhere(coordinator))}
    newest = max(frames.values(), key=lambda frame: frame.attempt)
    version = min(frame.version for frame in frames.values())
    return {"run": newest.run, "attempt": str(newest.attempt), "round": str(version)}


@asynccontextmanager
async def open_model(coordinator: Coordinator) -> AsyncIterator[Stream]:
    """Open the model of one round as a safetensors file for `load_state_dict`, with tied names and buffers.

    Every pserver sends its blocks in plan order, then its buffers. The file has the same order, so that at most one
    tensor is held here. In asynchronous modes each shard is of its own version, which the metadata describes.
    Raises NotReady, TryAgain, RoundPending.
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
    pserver: tuple[PserverIndex, ...]  # of a buffer; empty for a parameter

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


async def _read_item(
    plan: SlicePlan, shards: Mapping[PserverIndex, IncomingFrame], item: _Item
) -> AsyncIterator[bytes]:
    if item.pserver:
        async for part in shards[item.pserver[0]].read(item.num_bytes):
            yield part
        return
    for block in plan.blocks_of[item.name]:
        async for part in shards[block.pserver].read(plan.block_bytes(block)):
            yield part


def _describe(run: str, shards: Mapping[PserverIndex, IncomingFrame]) -> dict[str, str]:
    versions = [shard.version for shard in shards.values()]
    described = {"run": run, "round": str(min(versions, default=0))}
    for index, shard in shards.items():
        for key, value in shard.metadata.items():
            if key not in ("run", "attempt", "round"):
                described[f"pserver{index}.{key}"] = value
    return described
