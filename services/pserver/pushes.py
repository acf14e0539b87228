"""Reading a received push: which blocks and numbers it holds, checked against the plan before anything is staged."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from ps_protocol.errors import BadHyperParameters, MalformedFrame, UnknownBlock, WrongDtype, WrongShape
from ps_protocol.frames import TensorEntry
from ps_protocol.optimizers import HyperParameters, OptimizerSpec, check_hyper_parameters
from ps_protocol.routes import COMPUTED_ON_KEY, HYPER_PARAMETERS_KEY, NUM_BLOCKS_KEY
from ps_protocol.vocabulary import BufferSpec, Round

from .bodies import Body
from .layout import ShardLayout
from .tensors import StagedBlock


def read_blocks(body: Body, layout: ShardLayout, *, skip: Collection[str] = ()) -> dict[str, StagedBlock]:
    """The blocks of a body by name, without a copy; tensors called as in `skip` are left out.

    Raises UnknownBlock, WrongDtype or WrongShape.
    """
    blocks = {}
    for entry in body.frame.tensors:
        if entry.name in skip:
            continue
        place = layout.place.get(entry.name)
        if place is None:
            raise UnknownBlock(f"block {entry.name!r} is not on this pserver")
        if entry.dtype != place.dtype:
            raise WrongDtype(f"block {entry.name!r}", expected=place.dtype, actual=entry.dtype)
        if entry.shape != (place.block.num_elements,):
            raise WrongShape(f"block {entry.name!r}", expected=[place.block.num_elements], actual=list(entry.shape))
        blocks[entry.name] = StagedBlock(body, entry)
    return blocks


def read_buffers(body: Body, specs: Mapping[str, BufferSpec]) -> list[TensorEntry]:
    """Those tensors of a body that are buffers of this pserver. Raises WrongShape."""
    entries = [entry for entry in body.frame.tensors if entry.name in specs]
    for entry in entries:
        spec = specs[entry.name]
        if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            raise WrongShape(
                f"buffer {entry.name!r} does not fit the plan",
                expected=f"{spec.dtype} {list(spec.shape)}",
                actual=f"{entry.dtype} {list(entry.shape)}",
            )
    return entries


def read_completion(
    metadata: Mapping[str, str], optimizer: OptimizerSpec
) -> tuple[int | None, list[HyperParameters] | None]:
    """What the last push of a contribution says: its number of blocks, and the optimizer's numbers.

    Nothing for the pushes before it. Raises MalformedFrame or BadHyperParameters.
    """
    num_blocks = _read_number(metadata, NUM_BLOCKS_KEY, max_digits=9)
    if num_blocks is None:
        return None, None
    try:
        numbers = json.loads(metadata.get(HYPER_PARAMETERS_KEY, "null"))
    except (ValueError, RecursionError) as error:
        raise BadHyperParameters(f"{HYPER_PARAMETERS_KEY} is not JSON: {error}") from None
    return num_blocks, check_hyper_parameters(optimizer, numbers)


def read_computed_on(metadata: Mapping[str, str]) -> Round:
    """After which step the trainer had pulled what it computed with. Raises MalformedFrame."""
    step = _read_number(metadata, COMPUTED_ON_KEY, max_digits=18)
    if step is None:
        raise MalformedFrame(f"the last push of a step lacks {COMPUTED_ON_KEY}", expected="the step of a get")
    return step


def _read_number(metadata: Mapping[str, str], key: str, max_digits: int) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= max_digits):
        raise MalformedFrame(f"{key} is not a number", expected="decimal digits", actual=text[:40])
    return int(text)
