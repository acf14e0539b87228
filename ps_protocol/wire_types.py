"""The types of gradients and parameters on the wire: unchanged, rounded, quantised, or the largest elements alone.

Only float32 parameters are made smaller. A block called `w.block0` with n elements is sent as, by type:

    float32    w.block0 (n,) F32
    bfloat16   w.block0 (n,) BF16             float16 likewise
    int8       w.block0 (n,) I8,              and w.block0.scales (ceil(n / 256),) F32: I8[i] * scales[i // 256]
    topk       w.block0 (k,) F32,             and w.block0.indices (k,) I32, increasing: all other elements are 0

The gradient of a sparse parameter, and the change of its values, name rows of the block, each of `width` elements:

    float32    w.block0.rows (k,) I32, increasing, and w.block0 (k * width,) F32; bfloat16 and float16 likewise

A pull in int8 is the delta to the round before, for trainers that have its values. Pservers add the quantisation error
to the next delta. Other trainers pull float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .consistency import Consistency
from .errors import BadModel

PushType: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "topk"]
PullType: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]

LOSSY: frozenset[PushType] = frozenset(("int8", "topk"))
GROUP = 256  # elements that share a scale
DEFAULT_TOPK = 0.01
SCALES = ".scales"  # suffix of a block's second tensor
ROWS = ".rows"

_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

WireTensor: TypeAlias = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def quantised(name: str, num_elements: int) -> list[WireTensor]:
    """Return the tensors of a block in int8.

    >>> quantised("w.block0", 1000)
    [('w.block0', 'I8', (1000,)), ('w.block0.scales', 'F32', (4,))]
    """
    return [(name, "I8", (num_elements,)), (name + SCALES, "F32", (-(-num_elements // GROUP),))]


def sparse(name: str, dtype: str, num_rows: int, width: int) -> list[WireTensor]:
    """Return the tensors of some rows of a block.

    >>> sparse("w.block0", "F32", 3, 16)
    [('w.block0.rows', 'I32', (3,)), ('w.block0', 'F32', (48,))]
    """
    return [(name + ROWS, "I32", (num_rows,)), (name, dtype, (num_rows * width,))]


@dataclass(frozen=True, slots=True)
class WireTypes:
    """The wire types of a run, the same for all trainers."""

    push: PushType = "float32"
    pull: PullType = "float32"
    topk: float = DEFAULT_TOPK  # share of a block's elements that `topk` pushes

    def check(self) -> None:
        """Raise BadModel for an unknown type or a wrong `topk`."""
        for name, kind, kinds in (("push", self.push, get_args(PushType)), ("pull", self.pull, get_args(PullType))):
            if kind not in kinds:
                raise BadModel(f"there is no such {name} type", expected=", ".join(kinds), actual=f"{kind!r:.80}")
        if not 0 < self.topk <= 1:
            raise BadModel("topk must be a share of a block's elements", expected="above 0, up to 1", actual=self.topk)

    def pushed(self, name: str, dtype: str, num_elements: int) -> list[WireTensor]:
        """Return the tensors of a gradient of this block on the wire; `dtype` is the parameter's.

        >>> WireTypes(push="int8").pushed("w.block0", "F32", 1000)
        [('w.block0', 'I8', (1000,)), ('w.block0.scales', 'F32', (4,))]
        """
        if dtype != "F32":
            return [(name, dtype, (num_elements,))]
        if self.push == "int8":
            return quantised(name, num_elements)
        if self.push == "topk":
            count = max(1, math.ceil(num_elements * self.topk))
            return [(name, "F32", (count,)), (name + ".indices", "I32", (count,))]
        return [(name, _FLOATS[self.push], (num_elements,))]

    def pulled(self, dtype: str) -> str:
        """Return the dtype of a parameter's values on the wire; `dtype` is the parameter's own.

        With `int8` it is the dtype for trainers that have no values to which a delta could be added.
        """
        return _FLOATS.get(self.pull, "F32") if dtype == "F32" else dtype

    @property
    def pulls_deltas(self) -> bool:
        """True if pservers hold the values that trainers have, beside their own, and send deltas."""
        return self.pull == "int8"

    def check_mode(self, consistency: Consistency) -> None:
        """Raise BadModel for wire types that a run of this mode cannot have."""
        if self.pulls_deltas and (consistency.is_async or consistency.max_delay):
            raise BadModel(
                "pull_type int8 needs the synchronous mode without max_delay, where all trainers have the values "
                "of the previous round. Use bfloat16"
            )


UNCHANGED = WireTypes()
