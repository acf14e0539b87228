"""Looking inside a run: status, the list of parameters, and one parameter's live values."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from ps_protocol.errors import NotFound, NotReady, TryAgain
from ps_protocol.frames import FrameLimits, encode_header, parse_frame
from ps_protocol.messages import ClusterStatus, PserverStatus, TrainerStatus
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import BLOCKS
from ps_protocol.vocabulary import DTYPE_BYTES, Block
from services.runtime.peers import raise_for_problem

from .coordinator import Coordinator

READ_TIMEOUT_SECONDS = 30.0
CONSISTENT_READ_TRIES = 5


def describe_status(coordinator: Coordinator) -> ClusterStatus:
    """How the cluster stands now."""
    cluster, run, now = coordinator.cluster, coordinator.cluster.run, coordinator.now()
    plan = run.plan
    pservers = [member for _, member in sorted(cluster.registry.members.items())]
    return ClusterStatus(
        run=run.name,
        state=run.state,
        mode=run.mode,
        num_pservers=cluster.registry.num_pservers,
        num_trainers=run.defaults.num_trainers,
        waiting_for=tuple(cluster.waiting_for),
        prospects=tuple(
            f"{text}; the run fails in {seconds:.0f} s unless it comes back" for text, seconds in cluster.prospects(now)
        ),
        failure=run.failure.to_problem() if run.failure else None,
        plan_digest=plan.digest if plan else None,
        num_parameters=len(plan.parameters) if plan else 0,
        parameter_bytes=sum(plan.shard_bytes(i) for i in range(plan.num_pservers)) if plan else 0,
        round=min((member.round for member in pservers), default=0),
        pservers=tuple(
            PserverStatus(
                index=member.info.index,
                address=member.info.address,
                incarnation=member.info.incarnation,
                round=member.round,
                missing=member.missing,
                waiting_seconds=member.waiting_seconds,
                heartbeat_age_seconds=now - member.seen_at,
            )
            for member in pservers
        ),
        trainers=tuple(
            TrainerStatus(
                rank=trainer.rank,
                incarnation=trainer.incarnation,
                round=trainer.round,
                state=trainer.state,
                heartbeat_age_seconds=now - trainer.seen_at,
                metrics_address=trainer.metrics_address,
                results=trainer.results,
            )
            for _, trainer in sorted(run.trainers.items())
        ),
    )


def describe_parameters(coordinator: Coordinator) -> dict[str, Any]:
    """All parameters of the run with their blocks, in the model's order."""
    plan = _plan(coordinator)
    blocks: dict[str, list[Block]] = {spec.name: [] for spec in plan.parameters}
    for block in plan.blocks:
        blocks[block.parameter].append(block)
    return {
        "run": coordinator.cluster.run.name,
        "digest": plan.digest,
        "parameters": [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "bytes": spec.num_elements * DTYPE_BYTES[spec.dtype],
                "blocks": [
                    {"name": b.name, "begin": b.begin, "end": b.end, "pserver": b.pserver} for b in blocks[spec.name]
                ],
            }
            for spec in plan.parameters
        ],
    }


async def read_parameter(coordinator: Coordinator, name: str) -> bytes:
    """A safetensors file with one whole parameter; its metadata tells the version.

    In the synchronous mode all blocks are of one version: the read is repeated while rounds go on between the
    pservers' answers. In the others pservers have no version in common, and the metadata tells the oldest. The
    parameter passes through this process's memory once.
    """
    plan = _plan(coordinator)
    spec = plan.parameter.get(name)
    if spec is None:
        raise NotFound(f"there is no parameter {name!r} in this run")
    blocks = [block for block in plan.blocks if block.parameter == name]
    for _ in range(CONSISTENT_READ_TRIES):
        answers = await asyncio.gather(*(_read_block(coordinator, block) for block in blocks))
        versions = {int(version) for version, _ in answers}
        if len(versions) <= 1 or not coordinator.cluster.run.defaults.consistency.has_common_versions:
            metadata = {"run": coordinator.cluster.run.name, "round": str(min(versions, default=0))}
            return encode_header([(name, spec.dtype, spec.shape)], metadata) + b"".join(data for _, data in answers)
    raise TryAgain(f"the pservers moved on {CONSISTENT_READ_TRIES} times while {name!r} was being read")


async def _read_block(coordinator: Coordinator, block: Block) -> tuple[str, bytes]:
    member = coordinator.cluster.registry.members.get(block.pserver)
    if member is None:
        raise NotReady(f"pserver {block.pserver} is not here", waiting_for=f"pserver {block.pserver}")
    try:
        response = await coordinator.http.get(
            member.info.address + BLOCKS, params={"name": block.name}, timeout=READ_TIMEOUT_SECONDS
        )
        raise_for_problem(response)
    except httpx.HTTPError as error:
        raise TryAgain(f"pserver {block.pserver} did not answer: {error!r}") from error
    body = response.content
    frame = parse_frame(body, FrameLimits(max_body_bytes=len(body)))
    return frame.metadata["round"], body[frame.data_begin :]


def _plan(coordinator: Coordinator) -> SlicePlan:
    plan = coordinator.cluster.run.plan
    if plan is None:
        raise NotReady("no run has begun, so there are no parameters yet", waiting_for=coordinator.cluster.waiting_for)
    return plan
