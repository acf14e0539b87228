"""The slice plan: made once when a run starts, the same on every machine, identified by its digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cached_property
from typing import Any

from .errors import BadModel
from .optimizers import MEAN, OptimizerSpec
from .placement import DEFAULT_MIN_BLOCK_SIZE, PLACE, slice_parameter
from .vocabulary import (
    DTYPE_BYTES,
    PARAMETER_DTYPES,
    Block,
    BufferSpec,
    ParameterSpec,
    Placement,
    PserverIndex,
    is_name,
    is_shape,
    is_size,
)
from .wire_types import UNCHANGED, WireTensor, WireTypes

DEFAULT_PLACEMENT: Placement = "balanced"  # never worse on real models: docs/modes.md
MAX_PSERVERS = 1 << 16


@dataclass(frozen=True)
class SlicePlan:
    """Parameters, blocks in the order of the parameters, their owners, the optimizer and the wire types.

    Two plans are equal exactly if their digests are.
    """

    parameters: tuple[ParameterSpec, ...]
    blocks: tuple[Block, ...]
    num_pservers: int
    buffers: tuple[BufferSpec, ...] = ()
    optimizer: OptimizerSpec | None = None  # None in a plan that is only shown
    wire: WireTypes = UNCHANGED
    digest: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        canonical = _write_canonical(self.to_json())
        object.__setattr__(self, "digest", hashlib.sha256(canonical.encode()).hexdigest()[:32])

    @property
    def num_bytes(self) -> int:
        """The size of all parameters in their own dtypes."""
        return sum(spec.num_elements * DTYPE_BYTES[spec.dtype] for spec in self.parameters)

    @cached_property
    def parameter(self) -> dict[str, ParameterSpec]:
        """The parameters by name."""
        return {spec.name: spec for spec in self.parameters}

    @cached_property
    def means(self) -> frozenset[str]:
        """The names of the parameters whose update rule is MEAN: float buffers. They are exact on the wire."""
        if self.optimizer is None:
            return frozenset()
        rules = [self.optimizer.rule(group) for group in range(len(self.optimizer.group_flags))]
        return frozenset(spec.name for spec in self.parameters if rules[spec.group] == MEAN)

    @cached_property
    def shards(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each pserver, in plan order."""
        shards: list[list[Block]] = [[] for _ in range(self.num_pservers)]
        for block in self.blocks:
            shards[block.pserver].append(block)
        return tuple(map(tuple, shards))

    @cached_property
    def blocks_of(self) -> dict[str, tuple[Block, ...]]:
        """The blocks of each parameter, by its name, in order. A parameter without elements has no blocks."""
        blocks: dict[str, list[Block]] = {spec.name: [] for spec in self.parameters}
        for block in self.blocks:
            blocks[block.parameter].append(block)
        return {name: tuple(its) for name, its in blocks.items()}

    def pushed(self, block: Block) -> list[WireTensor]:
        """Return the tensors that a push of this block consists of."""
        dtype = self.parameter[block.parameter].dtype
        return self._wire_of(block.parameter).pushed(block.name, dtype, block.num_elements)

    def pulled(self, parameter: str) -> str:
        """Return the dtype of a parameter's values on the wire, when trainers pull them."""
        return self._wire_of(parameter).pulled(self.parameter[parameter].dtype)

    def _wire_of(self, parameter: str) -> WireTypes:
        return UNCHANGED if parameter in self.means else self.wire

    def block_bytes(self, block: Block) -> int:
        """Return the size of a block's values in the parameter's dtype."""
        return block.num_elements * DTYPE_BYTES[self.parameter[block.parameter].dtype]

    def pushed_bytes(self, pserver: PserverIndex) -> int:
        """Return the size of a whole gradient of a shard on the wire."""
        tensors = (tensor for block in self.shards[pserver] for tensor in self.pushed(block))
        return sum(DTYPE_BYTES[dtype] * math.prod(shape) for _, dtype, shape in tensors)

    def shard_bytes(self, pserver: PserverIndex) -> int:
        """Return the size of a shard's values in the parameters' dtypes."""
        return sum(self.block_bytes(b) for b in self.shards[pserver])

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """The result of `to_json`, made once; the caller must not change it."""
        return self.to_json()

    def to_json(self) -> dict[str, Any]:
        """Return all but the digest, as plain JSON values."""
        return {
            "parameters": [[p.name, list(p.shape), p.dtype, p.group] for p in self.parameters],
            "blocks": [[b.parameter, b.index, b.begin, b.end, b.pserver] for b in self.blocks],
            "num_pservers": self.num_pservers,
            "buffers": [[b.name, list(b.shape), b.dtype, b.pserver] for b in self.buffers],
            "optimizer": None if self.optimizer is None else self.optimizer.to_json(),
            **({} if self.wire == UNCHANGED else {"wire": self.wire.to_json()}),
        }

    @classmethod
    def from_json(cls, value: Any) -> SlicePlan:
        """Read the result of `to_json` from another process, and compute the digest again.

        Raises BadInput unless the blocks tile every parameter and the rest is as `make_plan` would make it.
        """
        match value:
            case {
                "parameters": [*parameters],
                "blocks": [*blocks],
                "num_pservers": num_pservers,
                "buffers": [*buffers],
                "optimizer": optimizer,
                **rest,
            } if rest.keys() <= {"wire"}:
                plan = cls(
                    parameters=tuple(map(_parse_parameter, parameters)),
                    blocks=tuple(map(_parse_block, blocks)),
                    num_pservers=_check_num_pservers(num_pservers, fewest=1 if blocks else 0),
                    buffers=tuple(map(_parse_buffer, buffers)),
                    optimizer=None if optimizer is None else OptimizerSpec.from_json(optimizer),
                    wire=WireTypes.from_json(rest["wire"]) if rest else UNCHANGED,
                )
            case _:
                raise BadModel(f"a slice plan must be an object of {', '.join(f.name for f in fields(cls) if f.init)}")
        _check_model(plan.parameters, [(b.name, b.shape, b.dtype) for b in plan.buffers], plan.optimizer)
        _check_placed(plan)
        return plan


def make_plan(
    parameters: Sequence[ParameterSpec],
    num_pservers: int,
    *,
    min_block_size: int = DEFAULT_MIN_BLOCK_SIZE,
    placement: Placement = DEFAULT_PLACEMENT,
    slice_parameters: bool = True,
    buffers: Sequence[tuple[str, tuple[int, ...], str]] = (),
    optimizer: OptimizerSpec | None = None,
    wire: WireTypes = UNCHANGED,
) -> SlicePlan:
    """Cut and place a model: a pure function of its arguments, the same in every process.

    `buffers` are (name, shape, dtype) and stay whole; they are dealt to the pservers in turn.
    Raises BadModel for a name that occurs twice, a dtype that is not supported or a setting out of range.

    >>> [(block.name, block.pserver) for block in make_plan([ParameterSpec("w1", (10, 1000))], 3).blocks]
    [('w1.block0', 0), ('w1.block1', 1)]
    """
    _check_num_pservers(num_pservers)
    if min_block_size < 1:
        raise BadModel("min_block_size is too small", expected="at least 1 element", actual=min_block_size)
    if placement not in PLACE:
        raise BadModel("there is no such placement", expected=" or ".join(PLACE), actual=f"{placement!r:.80}")
    wire.check()
    _check_model(parameters, buffers, optimizer)
    cuts = [
        (spec, index, begin, end)
        for spec in parameters
        for index, (begin, end) in enumerate(
            slice_parameter(spec.num_elements, num_pservers, min_block_size=min_block_size, whole=not slice_parameters)
        )
    ]
    sized = [(f"{s.name}.block{i}", (end - begin) * DTYPE_BYTES[s.dtype]) for s, i, begin, end in cuts]
    owners = PLACE[placement](sized, num_pservers)
    return SlicePlan(
        parameters=tuple(parameters),
        blocks=tuple(
            Block(spec.name, index, begin, end, owner)
            for (spec, index, begin, end), owner in zip(cuts, owners, strict=True)
        ),
        num_pservers=num_pservers,
        buffers=tuple(
            BufferSpec(name, tuple(shape), dtype, i % num_pservers) for i, (name, shape, dtype) in enumerate(buffers)
        ),
        optimizer=optimizer,
        wire=wire,
    )


def format_number(value: float) -> str:
    """Write a positive number as ECMAScript and RFC 8785 (3.2.2.3) do.

    >>> [format_number(value) for value in (1.0, 0.5, 1e-05, 1e-07, 1e21)]
    ['1', '0.5', '0.00001', '1e-7', '1e+21']
    """
    if 1e-6 <= value < 1e21:
        return f"{Decimal(repr(value)):f}".removesuffix(".0")
    digits, _, exponent = repr(value).partition("e")
    return f"{digits}e{int(exponent):+d}"


def _write_canonical(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_write_canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, float):
        return format_number(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"))  # the lists of a plan hold no fractions


def make_ring_plan(
    parameters: Sequence[ParameterSpec], buffers: Sequence[tuple[str, tuple[int, ...], str]] = ()
) -> SlicePlan:
    """Return the plan of a ring, without pservers, blocks or an optimizer. Raises BadModel.

    The format has a pserver for each buffer, which is 0 here and has no meaning.
    """
    _check_model(parameters, buffers, None)
    return SlicePlan(
        parameters=tuple(parameters),
        blocks=(),
        num_pservers=0,
        buffers=tuple(BufferSpec(name, tuple(shape), dtype, 0) for name, shape, dtype in buffers),
    )


def _check_num_pservers(value: object, fewest: int = 1) -> int:
    if not is_size(value) or not fewest <= value <= MAX_PSERVERS:
        raise BadModel(
            "the number of pservers is out of range", expected=f"{fewest} to {MAX_PSERVERS}", actual=f"{value!r:.80}"
        )
    return value


def _check_model(
    parameters: Sequence[ParameterSpec],
    buffers: Sequence[tuple[str, tuple[int, ...], str]],
    optimizer: OptimizerSpec | None,
) -> None:
    num_groups = None if optimizer is None else len(optimizer.group_flags)
    names: set[str] = set()
    for spec in parameters:
        _check_tensor("parameter", spec.name, spec.shape, spec.dtype, PARAMETER_DTYPES, names)
        if (type(spec.group), spec.group) == (int, -1):
            raise BadModel(
                f"buffer {spec.name!r:.200} belongs to the setting average_buffers, which this version does not have. "
                "Export the model with the version that wrote it, and load the file in a new run"
            )
        if not is_size(spec.group) or (num_groups is not None and spec.group >= num_groups):
            raise BadModel(
                f"parameter {spec.name!r:.200} is in a group that the optimizer does not have",
                expected="0 or more" if num_groups is None else f"0 to {num_groups - 1}",
                actual=f"{spec.group!r:.80}",
            )
    names_of_parameters = frozenset(names)
    for name, shape, dtype in buffers:
        _check_tensor("buffer", name, shape, dtype, tuple(DTYPE_BYTES), names)
        parameter, _, index = name.rpartition(".block")
        if parameter in names_of_parameters and index.isdecimal():
            raise BadModel(f"buffer {name!r:.200} has the name of a block of parameter {parameter!r:.200}")


def _check_tensor(
    kind: str, name: object, shape: object, dtype: object, dtypes: Sequence[str], names: set[str]
) -> None:
    """Check one tensor and add its name to `names`."""
    if not is_name(name):
        raise BadModel(f"a {kind} cannot be called {name!r:.200}", expected="text, and not __metadata__")
    if name in names:
        raise BadModel(f"two tensors are called {name!r:.200}; each needs a name of its own")
    names.add(name)
    if dtype not in dtypes:
        remedy = "; call model.float() before the optimizer is made" if (kind, dtype) == ("parameter", "F64") else ""
        text = f"{kind} {name!r:.200} has a wrong dtype{remedy}"
        raise BadModel(text, expected=", ".join(dtypes), actual=f"{dtype!r:.80}")
    if not isinstance(shape, tuple | list) or not is_shape(tuple(shape)) or not is_size(8 * math.prod(shape)):
        raise BadModel(f"{kind} {name!r:.200} has an impossible shape", actual=f"{shape!r:.200}")


def _check_placed(plan: SlicePlan) -> None:
    """Check that the blocks tile the parameters, in order, and that all owners exist, if there are pservers."""
    if plan.num_pservers == 0 and not plan.blocks:
        return
    blocks = iter(plan.blocks)
    for spec in plan.parameters:
        index, begin = 0, 0
        while begin < spec.num_elements:
            block = next(blocks, None)
            if block is None or (block.parameter, block.index, block.begin) != (spec.name, index, begin):
                raise BadModel(f"the blocks of parameter {spec.name!r:.200} leave a hole or overlap")
            index, begin = index + 1, block.end
            if not block.begin < block.end <= spec.num_elements:
                raise BadModel(f"block {block.name!r:.200} is empty or longer than its parameter")
    if next(blocks, None) is not None:
        raise BadModel("the plan has more blocks than its parameters need")
    everything: list[Block | BufferSpec] = [*plan.blocks, *plan.buffers]
    for placed in everything:
        if placed.pserver >= plan.num_pservers:
            raise BadModel(f"{placed.name!r:.200} is on a pserver that the plan does not have", actual=placed.pserver)


def _parse_parameter(value: Any) -> ParameterSpec:
    match value:
        case [str(name), [*shape], str(dtype), group]:
            return ParameterSpec(name, tuple(shape), dtype, group)
    raise BadModel("a parameter of a plan must be a list of name, shape, dtype and group", actual=f"{value!r:.200}")


def _parse_block(value: Any) -> Block:
    match value:
        case [str(name), *numbers] if len(numbers) == 4 and all(map(is_size, numbers)):
            return Block(name, *numbers)
    raise BadModel(
        "a block of a plan must be a list of parameter, index, begin, end and pserver", actual=f"{value!r:.200}"
    )


def _parse_buffer(value: Any) -> BufferSpec:
    match value:
        case [str(name), [*shape], str(dtype), pserver] if is_size(pserver):
            return BufferSpec(name, tuple(shape), dtype, pserver)
    raise BadModel("a buffer of a plan must be a list of name, shape, dtype and pserver", actual=f"{value!r:.200}")
