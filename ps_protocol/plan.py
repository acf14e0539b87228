"""The slice plan: made once when a run starts, the same on every machine, identified by its digest."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from .errors import BadModel
from .optimizers import BUFFER_RULES, SPARSE_NUMBERS, OptimizerSpec
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
from .wire_types import LOSSY, UNCHANGED, WireTensor, WireTypes, sparse

DEFAULT_PLACEMENT: Placement = "balanced"  # never worse on real models: docs/modes.md
MAX_PSERVERS = 1 << 16
MAX_ROWS = (1 << 31) - 1  # of a sparse parameter: an I32 names a row


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
        canonical = json.dumps(self.as_json, sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "digest", hashlib.sha256(canonical.encode()).hexdigest()[:32])

    @property
    def num_bytes(self) -> int:
        """The size of all parameters in their own dtypes."""
        return sum(spec.num_elements * DTYPE_BYTES[spec.dtype] for spec in self.parameters)

    @cached_property
    def parameter(self) -> dict[str, ParameterSpec]:
        return {spec.name: spec for spec in self.parameters}

    @cached_property
    def buffer_rules(self) -> dict[str, str]:
        """The update rules of the parameters that are float buffers, by name. They are exact on the wire."""
        if self.optimizer is None:
            return {}
        rules = [self.optimizer.rule(group) for group in range(len(self.optimizer.group_flags))]
        return {spec.name: rules[spec.group] for spec in self.parameters if rules[spec.group] in BUFFER_RULES}

    @cached_property
    def sparse_groups(self) -> frozenset[int]:
        """The parameter groups that have a sparse parameter."""
        return frozenset(spec.group for spec in self.parameters if spec.is_sparse)

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
        """Return the tensors that a push of this block consists of; of a sparse parameter, one that names all rows."""
        spec = self.parameter[block.parameter]
        tensors = self._wire_of(block.parameter).pushed(block.name, spec.dtype, block.num_elements)
        return (
            sparse(block.name, tensors[0][1], block.num_elements // spec.width, spec.width)
            if spec.is_sparse
            else tensors
        )

    def pulled(self, parameter: str) -> str:
        """Return the dtype of a parameter's values on the wire, when trainers pull them."""
        return self._wire_of(parameter).pulled(self.parameter[parameter].dtype)

    def _wire_of(self, parameter: str) -> WireTypes:
        return UNCHANGED if parameter in self.buffer_rules else self.wire

    def block_bytes(self, block: Block) -> int:
        """Return the size of a block's values in the parameter's dtype."""
        return block.num_elements * DTYPE_BYTES[self.parameter[block.parameter].dtype]

    def pushed_bytes(self, *blocks: Block) -> int:
        """Return the size of whole gradients of these blocks on the wire."""
        tensors = (tensor for block in blocks for tensor in self.pushed(block))
        return sum(DTYPE_BYTES[dtype] * math.prod(shape) for _, dtype, shape in tensors)

    def shard_bytes(self, pserver: PserverIndex) -> int:
        """Return the size of a shard's values in the parameters' dtypes."""
        return sum(self.block_bytes(b) for b in self.shards[pserver])

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """All but the digest, as plain JSON values; the caller must not change them."""
        return {
            "parameters": [
                [p.name, list(p.shape), p.dtype, p.group, *([True] if p.is_sparse else [])] for p in self.parameters
            ],
            "blocks": [[b.parameter, b.index, b.begin, b.end, b.pserver] for b in self.blocks],
            "num_pservers": self.num_pservers,
            "buffers": [[b.name, list(b.shape), b.dtype, b.pserver] for b in self.buffers],
            "optimizer": None if self.optimizer is None else self.optimizer.to_json(),
            "wire": asdict(self.wire),
        }

    @classmethod
    def from_json(cls, value: Any) -> SlicePlan:
        """Read the result of `as_json` from another process of the cluster, and compute the digest again.

        Raises BadInput for another object. A plan is made by the coordinator alone, and not checked again.
        """
        try:
            return cls(
                parameters=tuple(ParameterSpec(p[0], tuple(p[1]), *p[2:]) for p in value["parameters"]),
                blocks=tuple(Block(*block) for block in value["blocks"]),
                num_pservers=value["num_pservers"],
                buffers=tuple(BufferSpec(b[0], tuple(b[1]), *b[2:]) for b in value["buffers"]),
                optimizer=None if value["optimizer"] is None else OptimizerSpec.from_json(value["optimizer"]),
                wire=WireTypes(**value["wire"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise BadModel(f"this is not a slice plan: {error!r:.200}") from None


# ---------------------------------------------------------------- slicing and placement: pure functions


SizedName = tuple[str, int]  # a block's name and its size in bytes


def place_round_robin(blocks: Sequence[SizedName], num_pservers: int) -> list[PserverIndex]:
    """Deal all blocks of all parameters in turn.

    >>> place_round_robin([("w.block0", 8), ("w.block1", 8), ("b.block0", 4)], 2)
    [0, 1, 0]
    """
    return [i % num_pservers for i in range(len(blocks))]


def place_hash(blocks: Sequence[SizedName], num_pservers: int) -> list[PserverIndex]:
    """Place by SHA-256 of the block's name modulo M, which is the same in all processes, unlike Python's `hash()`."""
    digests = (hashlib.sha256(name.encode()).digest() for name, _ in blocks)
    return [int.from_bytes(digest[:8], "big") % num_pservers for digest in digests]


def place_balanced(blocks: Sequence[SizedName], num_pservers: int) -> list[PserverIndex]:
    """Place the largest block first, on the least loaded pserver (Graham's LPT rule).

    Blocks of equal size keep their order. Of equally loaded pservers, the one with the lowest index is chosen.

    >>> place_balanced([("a.block0", 4), ("b.block0", 16), ("c.block0", 8)], 2)
    [1, 0, 1]
    """
    loads = [(0, index) for index in range(num_pservers)]
    owners = [0] * len(blocks)
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i][1]):
        load, owner = heapq.heappop(loads)
        owners[i] = owner
        heapq.heappush(loads, (load + blocks[i][1], owner))
    return owners


PLACE: Mapping[Placement, Callable[[Sequence[SizedName], int], list[PserverIndex]]] = {
    "balanced": place_balanced,
    "round_robin": place_round_robin,
    "hash": place_hash,
}


DEFAULT_MIN_BLOCK_SIZE = 8192  # elements


def slice_parameter(
    num_elements: int, num_pservers: int, *, min_block_size: int = DEFAULT_MIN_BLOCK_SIZE, whole: bool = False
) -> list[tuple[int, int]]:
    """Cut `num_elements` into contiguous half-open ranges that differ by one element at most, larger ones first.

    There are `min(ceil(num_elements / min_block_size), num_pservers)` of them; one if `whole`; none for an
    empty parameter. Of a sparse parameter the rows are cut. For example, shape (10, 1000) on three pservers:

    >>> slice_parameter(10 * 1000, 3)
    [(0, 5000), (5000, 10000)]
    >>> slice_parameter(10, 3, min_block_size=1)
    [(0, 4), (4, 7), (7, 10)]
    """
    if num_elements == 0:
        return []
    max_blocks = -(-num_elements // min_block_size)
    num_blocks = 1 if whole else min(max_blocks, num_pservers)
    size, num_larger = divmod(num_elements, num_blocks)
    begins = [i * size + min(i, num_larger) for i in range(num_blocks + 1)]
    return list(pairwise(begins))


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
    if (wire.push in LOSSY or wire.pulls_deltas) and any(spec.is_sparse for spec in parameters):
        raise BadModel("sparse gradients have no push_type int8 and topk, and no pull_type int8. Use bfloat16")
    cuts = [
        (spec, index, begin * spec.width, end * spec.width)
        for spec in parameters
        for index, (begin, end) in enumerate(
            slice_parameter(
                spec.num_elements // spec.width,
                num_pservers,
                min_block_size=-(-min_block_size // spec.width),
                whole=not slice_parameters,
            )
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


def _check_num_pservers(value: object) -> None:
    if not is_size(value) or not 1 <= value <= MAX_PSERVERS:
        raise BadModel(
            "the number of pservers is out of range", expected=f"1 to {MAX_PSERVERS}", actual=f"{value!r:.80}"
        )


def _check_model(
    parameters: Sequence[ParameterSpec],
    buffers: Sequence[tuple[str, tuple[int, ...], str]],
    optimizer: OptimizerSpec | None,
) -> None:
    num_groups = None if optimizer is None else len(optimizer.group_flags)
    names: set[str] = set()
    for spec in parameters:
        _check_tensor("parameter", spec.name, spec.shape, spec.dtype, PARAMETER_DTYPES, names)
        if not is_size(spec.group) or (num_groups is not None and spec.group >= num_groups):
            raise BadModel(
                f"parameter {spec.name!r:.200} is in a group that the optimizer does not have",
                expected="0 or more" if num_groups is None else f"0 to {num_groups - 1}",
                actual=f"{spec.group!r:.80}",
            )
        if optimizer is not None:
            _check_sparse(spec, optimizer.rule(spec.group))
    names_of_parameters = frozenset(names)
    for name, shape, dtype in buffers:
        _check_tensor("buffer", name, shape, dtype, tuple(DTYPE_BYTES), names)
        parameter, _, index = name.rpartition(".block")
        if parameter in names_of_parameters and index.isdecimal():
            raise BadModel(f"buffer {name!r:.200} has the name of a block of parameter {parameter!r:.200}")


def _check_sparse(spec: ParameterSpec, rule: str) -> None:
    if spec.is_sparse and (rule not in SPARSE_NUMBERS or not spec.shape or spec.shape[0] > MAX_ROWS):
        raise BadModel(
            f"{rule} does not support the sparse gradients of {spec.name!r:.200}. Use SparseAdam, Adagrad or SGD, with "
            "gradpost.wrap_optimizers if other parameters need another one, or create the Embedding with sparse=False",
            expected=f"{', '.join(SPARSE_NUMBERS)}, and at most {MAX_ROWS} rows",
            actual=f"{rule}, shape {list(spec.shape)}",
        )  # fmt: skip
    if rule == "SparseAdam" and not spec.is_sparse:
        raise BadModel(
            f"SparseAdam does not support dense gradients, such as that of {spec.name!r:.200}. Use Adam for it"
        )


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
