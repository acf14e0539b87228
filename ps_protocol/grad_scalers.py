"""The state of a `GradScaler`, which the trainers of a run have in common: how it is told, and what a round does to it.

https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

import json
import math
import struct
import sys
from dataclasses import asdict, dataclass

from .errors import BadInput
from .vocabulary import Round


@dataclass(frozen=True, slots=True)
class ScalerState:
    """`after` is the newest round whose outcome is in it; `growth_tracker` counts what was applied since a change."""

    after: Round
    scale: float  # a float32
    growth_tracker: int

    def next(
        self, *, is_skipped: bool, growth_factor: float, backoff_factor: float, growth_interval: int
    ) -> ScalerState:
        """The state after another round, as `torch.amp.GradScaler` computes it.

        >>> ScalerState(0, 8.0, 1).next(is_skipped=False, growth_factor=2.0, backoff_factor=0.5, growth_interval=2)
        ScalerState(after=1, scale=16.0, growth_tracker=0)
        """
        if is_skipped:
            return ScalerState(self.after + 1, as_float32(self.scale * backoff_factor), 0)
        if self.growth_tracker + 1 != growth_interval:
            return ScalerState(self.after + 1, self.scale, self.growth_tracker + 1)
        grown = as_float32(self.scale * growth_factor)
        return ScalerState(self.after + 1, grown if math.isfinite(grown) else self.scale, 0)

    def to_json(self) -> str:
        """As it stands in the metadata of frames."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> ScalerState | None:
        """The same back, None if there is none. Raises BadInput.

        >>> ScalerState.from_json('{"after":7,"scale":1024.0,"growth_tracker":3}')
        ScalerState(after=7, scale=1024.0, growth_tracker=3)
        """
        if text is None:
            return None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or values.keys() != {"after", "scale", "growth_tracker"}:
            raise _malformed(text)
        after, scale, tracker = values["after"], values["scale"], values["growth_tracker"]
        if not all(type(count) is int and 0 <= count < 1 << 63 for count in (after, tracker)):
            raise _malformed(text)
        if type(scale) not in (int, float) or not 0 <= scale <= sys.float_info.max:  # no NaN either
            raise _malformed(text)
        return cls(after, float(scale), tracker)


def _malformed(text: str) -> BadInput:
    return BadInput(
        "this is no state of a GradScaler",
        code="malformed_frame", expected="after, scale, growth_tracker", actual=text[:80],
    )  # fmt: skip


def as_float32(number: float) -> float:
    """The nearest number that a scale can be; infinity if it is too large for one."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return math.inf
