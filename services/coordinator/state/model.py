"""The declared model: the comparison between trainers, and its slice plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ps_protocol.errors import BadModel, ModelMismatch, NotFound
from ps_protocol.messages import DeclareModel
from ps_protocol.optimizers import check_optimizer
from ps_protocol.plan import SlicePlan, make_plan, make_ring_plan
from ps_protocol.vocabulary import ParameterSpec, Rank
from ps_protocol.wire_types import WireTypes

from ..settings import CoordinatorSettings

# Settings that need pservers, and the value that has no effect without them.
_OF_PSERVERS = {"push_type": "float32", "pull_type": "float32", "local_steps": 0}
_SAME = "all trainers must build the same model"


def plan_model(model: DeclareModel, settings: CoordinatorSettings, num_pservers: int) -> SlicePlan:
    """Return the slice plan of a declared model. Raises BadModel or BadInput (`unsupported_optimizer`)."""
    parameters = [ParameterSpec(*fields) for fields in model.parameters]
    if settings.consistency.is_ring:
        if useless := [name for name, same in _OF_PSERVERS.items() if getattr(model, name) not in (None, same)]:
            raise BadModel(f"{', '.join(useless)} would have no effect with strategy ring, which has no pservers")
        return make_ring_plan(parameters, model.buffers)
    if settings.consistency.is_async and model.nonfinite == "skip_round":
        raise BadModel("nonfinite skip_round needs the synchronous mode: the other modes have no rounds")
    if model.max_grad_norm is not None and model.local_steps:
        raise BadModel("max_grad_norm has no effect with local_steps: call clip_grad_norm_ before each local step")
    push, pull = model.push_type or settings.push_type, model.pull_type or settings.pull_type
    wire = WireTypes(push, pull, settings.topk)
    wire.check_mode(settings.consistency)
    if wire.pulls_deltas and model.local_steps:
        raise BadModel("pull_type int8 must not be set with local_steps: trainers change the deltas' base version")
    return make_plan(
        parameters,
        num_pservers,
        min_block_size=settings.min_block_size,
        placement=settings.placement,
        slice_parameters=settings.slice_parameters,
        buffers=model.buffers,
        optimizer=check_optimizer(model.optimizer, model.group_flags, model.members),
        wire=wire,
    )


def find_parameter(plan: SlicePlan, name: str) -> ParameterSpec:
    """Return a parameter. Raises NotFound."""
    if name not in plan.parameter:
        raise NotFound(f"there is no parameter {name!r} in this run")
    return plan.parameter[name]


def check_same_model(rank: Rank, mine: DeclareModel, whose: str, theirs: DeclareModel) -> None:
    """Raise ModelMismatch with the first difference between the declarations of trainer `rank` and of `whose`."""
    for name in DeclareModel.model_fields:
        if name in ("run", "incarnation", "rendezvous", "parameters", "buffers"):
            continue
        if getattr(mine, name) != getattr(theirs, name):
            raise ModelMismatch(
                f"trainer {rank} and {whose} disagree on {name}",
                expected=getattr(theirs, name),
                actual=getattr(mine, name),
            )
    for name, a, b in (("parameters", mine.parameters, theirs.parameters), ("buffers", mine.buffers, theirs.buffers)):
        if len(a) != len(b):
            raise ModelMismatch(
                f"trainer {rank} and {whose} have different numbers of {name}; {_SAME}", expected=len(b), actual=len(a)
            )
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                raise ModelMismatch(
                    f"trainer {rank} and {whose} differ in {name[:-1]} {i}; {_SAME}",
                    expected=_describe(y),
                    actual=_describe(x),
                )


def _describe(tensor: Sequence[Any]) -> str:
    """Return a declared parameter or buffer in words.

    >>> _describe(("0.weight", (33, 16), "F32", 0))
    "'0.weight' of shape [33, 16] and dtype F32 in parameter group 0"
    """
    name, shape, dtype, *groups = tensor
    return f"{name!r} of shape {list(shape)} and dtype {dtype}" + "".join(f" in parameter group {g}" for g in groups)


def check_same_tensors(plan: SlicePlan, other: SlicePlan, whose: str) -> None:
    """Raise ModelMismatch with the first difference between two plans' tensors and optimizers; cuts may differ."""
    for what, mine, theirs in (
        ("parameters", plan.parameters, other.parameters),
        ("buffers", _shapes(plan), _shapes(other)),
        ("optimizer", (plan.optimizer,), (other.optimizer,)),
    ):
        if mine != theirs:
            pairs = [(a, b) for a, b in zip_longest(mine, theirs) if a != b]
            raise ModelMismatch(
                f"the trainers and {whose} declare different {what}", expected=str(pairs[0][1]), actual=str(pairs[0][0])
            )


def _shapes(plan: SlicePlan) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((spec.name, spec.shape, spec.dtype) for spec in plan.buffers)
