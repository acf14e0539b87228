"""Live parameters: the list, and safetensors files of one parameter or the whole model, each of one version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from pydantic import BaseModel

from ps_protocol.errors import NotFound
from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import DTYPE_BYTES, ParameterSpec, PserverIndex, Round
from services.runtime.large_replies import Stream

from ..coordinator import Coordinator
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


def find_parameter(plan: SlicePlan, name: str) -> ParameterSpec:
    """Return a parameter. Raises NotFound."""
    if name not in plan.parameter:
        raise NotFound(f"there is no parameter {name!r} in this run")
    return plan.parameter[name]


@asynccontextmanager
async def open_file(coordinator: Coordinator, name: str | None = None) -> AsyncIterator[Stream]:
    """Open a safetensors file of one parameter or, without a name, of the model, for `load_state_dict`.

    The model has tied names and buffers, too. Every pserver sends its blocks in plan order, then its buffers. The file
    has the same order, so that at most one tensor is held here. In asynchronous modes each shard is of its own version,
    which the metadata describes. Raises NotFound, NotReady, TryAgain, RoundPending.
    """
    plan, run = current_plan(coordinator), coordinator.cluster.run
    specs = plan.parameters if name is None else [find_parameter(plan, name)]
    buffers = plan.buffers if name is None else ()
    pieces = {spec.name: [(b.pserver, plan.block_bytes(b)) for b in plan.blocks_of[spec.name]] for spec in specs}
    pieces |= {spec.name: [(spec.pserver, spec.num_bytes)] for spec in buffers}
    further: dict[str, list[str]] = {}
    if name is None and run.record.declaration is not None:
        for alias, of in run.record.declaration.aliases.items():
            further.setdefault(of, []).append(alias)
    entries = [(key, s.dtype, s.shape) for s in (*specs, *buffers) for key in (s.name, *further.get(s.name, ()))]
    names: dict[PserverIndex, list[str]] = {index: [] for index in range(plan.num_pservers)}
    if name is not None:
        owners = {block.pserver for block in plan.blocks_of[name]}
        names = {index: [b.name for b in plan.blocks_of[name] if b.pserver == index] for index in sorted(owners)}
    async with open_frames(coordinator, names) as frames:
        metadata = {"format": "pt", "run": run.record.name, **_describe(coordinator, frames)}
        header = encode_header(entries, metadata)

        async def parts() -> AsyncIterator[bytes]:
            yield header
            for key, of_tensor in pieces.items():
                copies: list[bytes] = []
                for pserver, num_bytes in of_tensor:
                    async for part in frames[pserver].read(num_bytes):
                        yield part
                        if key in further:
                            copies.append(part)
                for part in copies * len(further.get(key, ())):
                    yield part

        sizes = {key: sum(size for _, size in of_tensor) for key, of_tensor in pieces.items()}
        num_bytes = len(header) + sum(size * (1 + len(further.get(key, ()))) for key, size in sizes.items())
        file = f"{run.record.name}-round-{metadata['round']}.safetensors"
        headers = {"gradpost-round": metadata["round"], "content-disposition": f'attachment; filename="{file}"'}
        yield Stream(num_bytes, parts(), headers)


def _describe(coordinator: Coordinator, frames: Mapping[PserverIndex, IncomingFrame]) -> dict[str, str]:
    """Return the version of the frames: the run may have been rolled back since it was read."""
    run, versions = coordinator.cluster.run, [frame.version for frame in frames.values()]
    described = {
        "attempt": str(max((frame.attempt for frame in frames.values()), default=run.record.attempt)),
        "round": str(min(versions, default=round_everywhere(coordinator))),
    }
    for index, frame in frames.items():
        facts = {key: value for key, value in frame.metadata.items() if key not in ("run", "attempt", "round")}
        described |= {f"pserver{index}.{key}": value for key, value in facts.items()}
    return described
