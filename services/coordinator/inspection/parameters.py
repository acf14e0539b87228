"""The list of parameters, and one parameter: its values and its optimizer slots, all of one version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ps_protocol.errors import InvalidMessage, NotFound
from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import BLOCKS, SLOTS, STEPS_KEY
from ps_protocol.vocabulary import DTYPE_BYTES, Block, ParameterSpec, PserverIndex, Round

from ..coordinator import Coordinator
from .formats import Tensor
from .reading import Tensors, current_plan, read_alike, read_tensors, round_everywhere


def describe_parameters(coordinator: Coordinator) -> dict[str, Any]:
    """All parameters of the run with their blocks, in the model's order."""
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
    """A parameter and its blocks. Raises NotFound."""
    spec = plan.parameter.get(name)
    if spec is None:
        raise NotFound(f"there is no parameter {name!r} in this run")
    return spec, plan.blocks_of[name]


def owners_of(blocks: Sequence[Block]) -> list[PserverIndex]:
    """The pservers that have them."""
    return sorted({block.pserver for block in blocks})


async def read_parameter(
    coordinator: Coordinator, name: str, begin: int | None = None, end: int | None = None
) -> Tensor:
    """One parameter, whole or elements `[begin, end)` of it, flat; in the synchronous mode all of it of one round.

    In the others pservers have no version in common, and `round` is the oldest. Passes through this process's memory.
    Raises NotFound, InvalidMessage, TryAgain, NotReady.
    """
    spec, blocks = find_parameter(current_plan(coordinator), name)
    low, high = _check_range(spec, begin, end)
    wanted = [block for block in blocks if block.begin < high and low < block.end]
    answers = await _read_blocks(coordinator, BLOCKS, wanted or blocks[:1])
    width = DTYPE_BYTES[spec.dtype]
    data = b"".join(
        _data_of(answers, block.name)[width * max(low - block.begin, 0) : width * (min(high, block.end) - block.begin)]
        for block in wanted
    )
    is_whole = begin is None and end is None
    return Tensor(name, spec.dtype, spec.shape if is_whole else (high - low,), data, _facts(coordinator, answers))


def _check_range(spec: ParameterSpec, begin: int | None, end: int | None) -> tuple[int, int]:
    low, high = begin or 0, spec.num_elements if end is None else end
    if not low <= high <= spec.num_elements:
        raise InvalidMessage(
            f"parameter {spec.name!r} has no such range of elements",
            expected=f"0 <= begin <= end <= {spec.num_elements}", actual=f"begin {low}, end {high}",
        )  # fmt: skip
    return low, high


async def read_slots(coordinator: Coordinator, name: str) -> bytes:
    """A safetensors file of the optimizer's slots of one parameter, in its shape and float32, as `read_parameter` does.

    A slot that no update has needed yet is not in it. Its metadata tells how often the parameter was stepped, `steps`.
    """
    spec, blocks = find_parameter(current_plan(coordinator), name)
    answers = await _read_blocks(coordinator, SLOTS, blocks)
    slots = sorted({key.split("/", 1)[0] for answer in answers for key in answer.data})
    steps = [count for answer in answers for count in json.loads(answer.metadata.get(STEPS_KEY, "{}")).values()]
    facts = {**_facts(coordinator, answers), STEPS_KEY: str(min(steps, default=0))}
    data = [_data_of(answers, f"{slot}/{block.name}", block.num_elements) for slot in slots for block in blocks]
    return encode_header([(slot, "F32", spec.shape) for slot in slots], facts) + b"".join(data)


async def wait_for_newer(coordinator: Coordinator, name: str, after: Round, seconds: float) -> bool:
    """Whether a version after this one can be read of a parameter; waits so long for it. Holds nothing meanwhile.

    One of another attempt is, too: the run has gone back. By the pservers' heartbeats, of which one comes every second
    at least. Raises NotFound, NotReady.
    """
    run = coordinator.cluster.run
    plan = current_plan(coordinator)
    _, blocks = find_parameter(plan, name)
    members, attempt = coordinator.cluster.registry.members, run.attempt
    owners = owners_of(blocks) or range(plan.num_pservers)  # nobody has one without elements

    def is_newer() -> bool:
        return run.attempt != attempt or all(index in members and members[index].round > after for index in owners)

    await coordinator.wait_until(lambda: coordinator.cluster.run is not run or is_newer(), seconds)
    return coordinator.cluster.run is run and is_newer()


async def _read_blocks(coordinator: Coordinator, route: str, blocks: Sequence[Block]) -> list[Tensors]:
    """From each pserver those of the blocks that it has."""
    names = {index: [block.name for block in blocks if block.pserver == index] for index in owners_of(blocks)}
    return await read_alike(
        coordinator,
        list(names),
        lambda member, named: read_tensors(coordinator, member, route, names[member.info.index], named),
    )


def _data_of(answers: Sequence[Tensors], name: str, num_elements: int = 0) -> memoryview:
    """Of one tensor; of a slot that one of the pservers has not needed yet it is zeros."""
    found = (answer.data[name] for answer in answers if name in answer.data)
    return next(found, memoryview(bytes(4 * num_elements)))


def _facts(coordinator: Coordinator, answers: Sequence[Tensors]) -> dict[str, str]:
    run = coordinator.cluster.run
    version = min((answer.version for answer in answers), default=round_everywhere(coordinator))
    attempt = max((answer.attempt for answer in answers), default=run.attempt)
    return {"run": run.name, "attempt": str(attempt), "round": str(version)}
