"""The nouns that every part of Gradpost shares.

    parameter   one named trainable tensor
    block       a half-open range of a parameter's flattened elements: unit of storage, version and update
    shard       all the blocks of one pserver
    slice plan  blocks + placement + digest
    round       one synchronous cycle; round r produces version r, version 0 holds the initial values

The module has frozen values and pure tests of them, and imports no other module of the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeGuard, get_args

PROTOCOL_VERSION = 2
DEFAULT_PSERVERS = DEFAULT_TRAINERS = 2  # of a cluster, however it is started

Rank: TypeAlias = int  # of a trainer, from 0
Round: TypeAlias = int  # synchronous cycle, from 1; 0 means the initial values
Incarnation: TypeAlias = int  # counts the processes of one trainer rank or pserver index, from 1
PserverIndex: TypeAlias = int  # from 0

Mode: TypeAlias = Literal["sync", "async", "ssp"]
Strategy: TypeAlias = Literal["ps", "ring"]
Placement: TypeAlias = Literal["balanced", "round_robin", "hash"]
NonfinitePolicy: TypeAlias = Literal["reject", "skip_round", "allow"]
Durability: TypeAlias = Literal["none", "log", "fsync", "replicated"]
ReplicaLoss: TypeAlias = Literal["wait", "continue"]
LossPolicy: TypeAlias = Literal["wait", "continue", "fail"]

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

# safetensors' names of element types, with their size in bytes.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
# What a parameter, and therefore a gradient, may be made of.
PARAMETER_DTYPES = ("F32", "BF16", "F16")

MAX_DIMENSIONS = 64  # torch's own limit


def is_size(value: object) -> TypeGuard[int]:
    """Return whether the value is a number of elements, bytes or pservers: an integer from 0 that fits into 63 bits.

    `True` is not an integer here.
    """
    return type(value) is int and 0 <= value < 1 << 63


def is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    """Return whether the value is the shape of a tensor that could exist.

    >>> is_shape((10, 1000)), is_shape(()), is_shape((0, -1)), is_shape((2,) * 65)
    (True, True, False, False)
    """
    return isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS and all(map(is_size, value))


def is_name(value: object) -> TypeGuard[str]:
    """Return whether a tensor can have this name on the wire.

    It can be any text except the empty one, `__metadata__` and text with a lone surrogate.

    >>> is_name("layers.0.weight"), is_name(""), is_name("__metadata__"), is_name("\\ud800")
    (True, False, False, False)
    """
    if not isinstance(value, str) or value in ("", "__metadata__"):
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a plan; `group` is the index of its optimizer parameter group."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"
    group: int = 0
    is_sparse: bool = False  # its gradients name the rows that they touch

    @property
    def num_elements(self) -> int:
        """The number of elements; 1 for a scalar, whose shape is empty."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """The number of elements of a row, the unit in which a sparse parameter is cut; 1 for other parameters."""
        return max(1, math.prod(self.shape[1:])) if self.is_sparse else 1


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A tensor, such as an integer counter, that is stored whole on one pserver and never stepped."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pserver: PserverIndex

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


WINDOW = 64  # elements that a pserver steps together; a multiple of every vector width and cache line


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `[begin, end)` of a flattened parameter and the pserver that owns them."""

    parameter: str
    index: int
    begin: int
    end: int
    pserver: PserverIndex

    @property
    def name(self) -> str:
        """The name `{parameter}.block{index}`, which is unique because the last suffix alone is added."""
        return f"{self.parameter}.block{self.index}"

    @property
    def num_elements(self) -> int:
        """The number of elements, which is never zero."""
        return self.end - self.begin
