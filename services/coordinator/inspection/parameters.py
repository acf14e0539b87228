"""Live parameters: the list, one parameter with its optimizer state, and the whole model, each of one version."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from pydantic import BaseModel

from ps_protocol.errors import NotFound
from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import STEPS_KEY
from ps_protocol.routes import BLOCKS, SHARD, SLOTS
from ps_protocol.vocabulary import DTYPE_BYTES, Block, ParameterSpec, PserverIndex, Round
from services.runtime.large_replies import PART_BYTES, Stream

from ..coordinator import Coordinator
from .formats import Format, Tensor, begin_npy, check_json, convert_to_npy, encode_json
from .reading import IncomingFrame, current_plan, open_frames, round_everywhere


class BlockEntry(BaseModel):
    """A block in the list: elements `begin` to `end` of the flattened parameter."""

    name: str
    begin: int
    end: int
    pserver: PserverIndex


class ParameterEntry(BaseModel):
    """A parameter in the list; `bytes` is the size of its values in its own dtype.

    `optimizer` is the name of its optimizer, if the run has several.
    """

    name: str
    shape: list[int]
    dtype: str
    group: int
    optimizer: str | None
    bytes: int
    blocks: list[BlockEntry]


class ParameterList(BaseModel):
    """All parameters in the model's order; `version` is the newest round that all pservers have applied."""

    run: str
    digest: str
    version: Round
    parameters: list[ParameterEntry]


def describe_parameters(coordinator: Coordinator) -> ParameterList:
    """Return all parameters with their blocks, in the model's order."""
    plan = current_plan(coordinator)
    return ParameterList(
        run=coordinator.cluster.run.record.name,
        digest=plan.digest,
        version=round_everywhere(coordinator),
        parameters=[
            ParameterEntry(
                name=spec.name,
                shape=list(spec.shape),
                dtype=spec.dtype,
                group=spec.group,
                optimizer=None if plan.optimizer is None else plan.optimizer.find_member(spec.group),
                bytes=spec.num_elements * DTYPE_BYTES[spec.dtype],
                blocks=[
                    BlockEntry(name=block.name, begin=block.begin, end=block.end, pserver=block.pserver)
                    for block in plan.blocks_of[spec.name]
                ],
            )
            for spec in plan.parameters
        ],
    )


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
    """Open one parameter; in the synchronous mode all blocks are of one round.

    In asynchronous modes pservers have no version in common, and `round` is the oldest.
    Raises NotFound, BadInput, TryAgain, NotReady.
    """
    plan = current_plan(coordinator)
    spec, blocks = find_parameter(plan, name)
    if form == "json":
        check_json(name, spec.num_elements)
    tensor = Tensor(name, spec.dtype, spec.shape, [(block.pserver, plan.block_bytes(block)) for block in blocks])
    async with open_frames(coordinator, BLOCKS, _names_of(blocks)) as frames:
        facts = _facts(coordinator, frames)
        # From the pservers' answers: the run may have been rolled back and reached this round again.
        headers = {"etag": '"{run}.{attempt}.{round}"'.format(**facts), "gradpost-round": facts["round"]}
        parts = _read_tensor(frames, tensor)
        if form == "json":
            body = encode_json(tensor, facts, b"".join([part async for part in parts]))
            yield Stream(len(body), _join(body), headers)
        elif form == "npy":
            head, num_bytes = begin_npy(tensor)
            yield Stream(len(head) + num_bytes, _join(head, convert_to_npy(tensor.dtype, parts)), headers)
        else:
            yield _encode_file(frames, [tensor], facts, headers)


@asynccontextmanager
async def open_slots(coordinator: Coordinator, name: str) -> AsyncIterator[Stream]:
    """Open the optimizer slots of one parameter: a safetensors file of float32 tensors of its shape.

    A slot that no update has used is left out; zeros stand for the blocks that did not use it. The metadata `steps` is
    the number of steps of the parameter.
    """
    spec, blocks = find_parameter(current_plan(coordinator), name)
    async with open_frames(coordinator, SLOTS, _names_of(blocks)) as frames:
        slots = sorted({name.split("/", 1)[0] for frame in frames.values() for name in frame.names})
        steps = [json.loads(frame.metadata.get(STEPS_KEY, "{}")) for frame in frames.values()]  # for each block
        fewest = min((count for counts in steps for count in counts.values()), default=0)

        def find_pserver(slot: str, block: Block) -> PserverIndex | None:
            return block.pserver if f"{slot}/{block.name}" in frames[block.pserver].names else None

        tensors = [
            Tensor(slot, "F32", spec.shape, [(find_pserver(slot, block), 4 * block.num_elements) for block in blocks])
            for slot in slots
        ]
        yield _encode_file(frames, tensors, {**_facts(coordinator, frames), STEPS_KEY: str(fewest)}, {})


@asynccontextmanager
async def open_model(coordinator: Coordinator) -> AsyncIterator[Stream]:
    """Open the model of one round as a safetensors file for `load_state_dict`, with tied names and buffers.

    Every pserver sends its blocks in plan order, then its buffers. The file has the same order, so that at most one
    tensor is held here. In asynchronous modes each shard is of its own version, which the metadata describes.
    Raises NotReady, TryAgain, RoundPending.
    """
    plan = current_plan(coordinator)
    run = coordinator.cluster.run
    tensors = [
        Tensor(
            spec.name,
            spec.dtype,
            spec.shape,
            [(block.pserver, plan.block_bytes(block)) for block in plan.blocks_of[spec.name]],
        )
        for spec in plan.parameters
    ]
    for buffer in plan.buffers:
        num_bytes = math.prod(buffer.shape) * DTYPE_BYTES[buffer.dtype]
        tensors.append(Tensor(buffer.name, buffer.dtype, buffer.shape, [(buffer.pserver, num_bytes)]))
    async with open_frames(coordinator, SHARD, dict.fromkeys(range(plan.num_pservers), ())) as shards:
        version = min((shard.version for shard in shards.values()), default=0)
        name = f'attachment; filename="{run.record.name}-round-{version}.safetensors"'
        aliases = {} if run.record.declaration is None else run.record.declaration.aliases
        metadata = {"format": "pt", **_describe_shards(run.record.name, shards)}
        yield _encode_file(shards, tensors, metadata, {"content-disposition": name}, aliases)


def _encode_file(
    frames: Mapping[PserverIndex, IncomingFrame],
    tensors: Sequence[Tensor],
    metadata: Mapping[str, str],
    headers: Mapping[str, str],
    aliases: Mapping[str, str] | None = None,
) -> Stream:
    """Return a safetensors file. `aliases` are further names of tensors, whose values it repeats."""
    names: dict[str, list[str]] = {}
    for alias, name in (aliases or {}).items():
        names.setdefault(name, []).append(alias)
    entries = [(name, t.dtype, t.shape) for t in tensors for name in (t.name, *names.get(t.name, ()))]
    header = encode_header(entries, metadata)
    total = sum(tensor.num_bytes * (1 + len(names.get(tensor.name, ()))) for tensor in tensors)

    async def parts() -> AsyncIterator[bytes]:
        for tensor in tensors:
            copies: list[bytes] = []
            async for part in _read_tensor(frames, tensor):
                yield part
                if tensor.name in names:
                    copies.append(part)
            for _ in names.get(tensor.name, ()):
                for part in copies:
                    yield part

    return Stream(len(header) + total, _join(header, parts()), headers)


async def _read_tensor(frames: Mapping[PserverIndex, IncomingFrame], tensor: Tensor) -> AsyncIterator[bytes]:
    for pserver, num_bytes in tensor.pieces:
        if pserver is None:
            for begin in range(0, num_bytes, PART_BYTES):
                yield bytes(min(PART_BYTES, num_bytes - begin))
            continue
        async for part in frames[pserver].read(num_bytes):
            yield part


async def _join(head: bytes, parts: AsyncIterator[bytes] | None = None) -> AsyncIterator[bytes]:
    yield head
    if parts is not None:
        async for part in parts:
            yield part


def _names_of(blocks: Sequence[Block]) -> dict[PserverIndex, list[str]]:
    """Return the names of the blocks of each pserver."""
    return {index: [block.name for block in blocks if block.pserver == index] for index in owners_of(blocks)}


def _facts(coordinator: Coordinator, frames: Mapping[PserverIndex, IncomingFrame]) -> dict[str, str]:
    if not frames:  # the parameter has no elements
        run = coordinator.cluster.run
        return {"run": run.record.name, "attempt": str(run.record.attempt), "round": str(round_everywhere(coordinator))}
    newest = max(frames.values(), key=lambda frame: frame.attempt)
    version = min(frame.version for frame in frames.values())
    return {"run": newest.run, "attempt": str(newest.attempt), "round": str(version)}


def _describe_shards(run: str, shards: Mapping[PserverIndex, IncomingFrame]) -> dict[str, str]:
    versions = [shard.version for shard in shards.values()]
    described = {"run": run, "round": str(min(versions, default=0))}
    for index, shard in shards.items():
        for key, value in shard.metadata.items():
            if key not in ("run", "attempt", "round"):
                described[f"pserver{index}.{key}"] = value
    return described


async def wait_for_newer(coordinator: Coordinator, name: str, after: Round, seconds: float) -> bool:
    """Wait until a parameter has a version after this one. Returns False after `seconds`.

    Another attempt counts as newer. Versions are those of the pservers' heartbeats. Raises NotFound, NotReady.
    """
    cluster, before = coordinator.cluster, coordinator.cluster.run
    plan = current_plan(coordinator)
    _, blocks = find_parameter(plan, name)
    owners = owners_of(blocks) or range(plan.num_pservers)  # any pserver, for a parameter without elements

    def is_newer() -> bool:
        members = cluster.registry.members
        return cluster.run.record.attempt != before.record.attempt or all(
            index in members and members[index].round > after for index in owners
        )

    await coordinator.wait_until(lambda: not cluster.is_current(before) or is_newer(), seconds)
    return cluster.is_current(before) and is_newer()
